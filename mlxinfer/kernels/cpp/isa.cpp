// Every kernel, compiled once for each instruction set: with -DISA=isa_avx512 and so on, and the flags that go with it.
#include "simd.h"

#include "norm.inl"
#include "rope.inl"
#include "activation.inl"
#include "attention.inl"
#include "product.inl"
#include "softmax.inl"
#include "probe.inl"

namespace kernels {

extern const Table KERNELS_TABLE;
const Table KERNELS_TABLE = {
    KERNELS_NAME,
    ISA::W,
    ISA::norm_table,
    ISA::rope_table,
    ISA::activation_table,
    ISA::attention_table,
    ISA::product_table,
    ISA::softmax_table,
    ISA::probe_table,
};

}  // namespace kernels
