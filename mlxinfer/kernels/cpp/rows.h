// Rows of a view: each row's elements lie next to each other, the rows themselves anywhere.
#pragma once

#include "types.h"

namespace kernels {

constexpr int MAX_ROW_AXES = 6;

// `shape` and `strides` (in elements) are those of the axes before the last one, merged where they can be.
struct Rows {
  const void* data;
  int axes;
  int64_t shape[MAX_ROW_AXES];
  int64_t strides[MAX_ROW_AXES];
};

// Where row number `row` begins, in elements. Static, so that each instruction set keeps a copy of its own.
static inline int64_t row_start(const Rows& rows, int64_t row) {
  int64_t start = 0;
  for (int axis = rows.axes - 1; axis > 0; axis--) {
    start += row % rows.shape[axis] * rows.strides[axis];
    row /= rows.shape[axis];
  }
  return start + row * rows.strides[0];
}

}  // namespace kernels
