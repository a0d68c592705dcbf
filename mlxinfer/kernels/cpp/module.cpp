// The extension module. Its functions have the signatures of mlx's own and take their places.
#include "bindings.h"

NB_MODULE(_kernels, m) {
  m.doc() = "CPU kernels behind mlx's calls.";
  nb::module_::import_("mlx.core");
  m.def("isa", [] { return kernels::table().name; }, "The instruction set in use: avx512, avx2, neon or base.");
  m.def("threads", &kernels::threads, "How many threads work on one kernel.");
  kernels::bind_norm(m);
  kernels::bind_rope(m);
  kernels::bind_activation(m);
  kernels::bind_attention(m);
  kernels::bind_product(m);
  kernels::bind_softmax(m);
  kernels::bind_probe(m);
}
