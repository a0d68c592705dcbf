namespace ISA {

static constexpr kernels::ActivationTable activation_table = {};

}  // namespace ISA
