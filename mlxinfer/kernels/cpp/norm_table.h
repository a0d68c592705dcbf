#pragma once

#include "rows.h"

namespace kernels {

// y[i] = x[i] / sqrt(mean(x[i]^2) + eps) * weight, for rows of `dim` elements; weight may be null, y may be x.
struct NormArgs {
  Rows x;
  const void* weight;
  void* y;
  int64_t dim;
  float eps;
  Type type;  // of x, weight and y
};

struct NormTable {
  // Rows begin to end.
  void (*rms_norm)(const NormArgs&, int64_t begin, int64_t end);
};

}  // namespace kernels
