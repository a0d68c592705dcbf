namespace ISA {

static constexpr kernels::ProductTable product_table = {};

}  // namespace ISA
