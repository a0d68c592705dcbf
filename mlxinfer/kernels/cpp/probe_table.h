#pragma once

#include "types.h"

namespace kernels {

// The helpers of simd.h by themselves, for their tests. `lanes`: whole vectors where they fit, else one by one.
struct ProbeTable {
  void (*exp)(const float* x, float* y, int64_t count);
  void (*widen)(Type type, const void* x, float* y, int64_t count, bool lanes);
  void (*narrow)(Type type, const float* x, void* y, int64_t count, bool lanes);
  // Of one vector.
  float (*sum)(const float* x);
  float (*largest)(const float* x);
};

}  // namespace kernels
