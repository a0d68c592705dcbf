#pragma once

#include "rows.h"

namespace kernels {

// y = f(gate) * x over elements of rows of `dim`; y, in row order, may be the gate.
struct GateArgs {
  Rows gate;
  Rows x;
  void* y;
  int64_t dim;
  Type type;
};

struct ActivationTable {
  // Elements begin to end of all the rows.
  void (*silu_mul)(const GateArgs&, int64_t begin, int64_t end);
  void (*gelu_mul)(const GateArgs&, int64_t begin, int64_t end);
};

}  // namespace kernels
