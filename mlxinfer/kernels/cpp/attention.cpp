#include "bindings.h"

namespace kernels {

void bind_attention(nb::module_&) {}

}  // namespace kernels
