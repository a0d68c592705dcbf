namespace ISA {

static constexpr kernels::AttentionTable attention_table = {};

}  // namespace ISA
