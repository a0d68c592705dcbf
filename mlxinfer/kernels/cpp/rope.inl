namespace ISA {

static constexpr kernels::RopeTable rope_table = {};

}  // namespace ISA
