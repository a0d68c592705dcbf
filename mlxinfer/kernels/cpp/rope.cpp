#include "bindings.h"

namespace kernels {

void bind_rope(nb::module_&) {}

}  // namespace kernels
