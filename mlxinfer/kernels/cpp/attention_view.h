// Arrays of four axes as attention reads them: by their strides, as long as the last axis is dense.
#pragma once

#include <cstring>
#include <vector>

#include "kernel.h"

namespace kernels {

// The elements of `a`, [., ., ., .], in row order.
inline void copy_in_order(const mx::array& a, char* to) {
  const int64_t size = a.itemsize();
  if (a.flags().row_contiguous) {
    std::memcpy(to, a.data<char>(), a.nbytes());
    return;
  }
  const bool dense = a.strides(3) == 1;
  for (int64_t i = 0; i < a.shape(0); i++)
    for (int64_t j = 0; j < a.shape(1); j++)
      for (int64_t l = 0; l < a.shape(2); l++) {
        const char* row = a.data<char>() + (i * a.strides(0) + j * a.strides(1) + l * a.strides(2)) * size;
        const int64_t step = dense ? a.shape(3) : 1;
        for (int64_t d = 0; d < a.shape(3); d += step, to += step * size)
          std::memcpy(to, row + d * a.strides(3) * size, step * size);
      }
}

class View {
 public:
  explicit View(const mx::array& a) : data_(a.data<char>()), size_(a.itemsize()), strides(a.strides()) {
    if (a.shape(3) == 1 || strides[3] == 1) return;
    copy_.resize(a.size() * size_);
    copy_in_order(a, copy_.data());
    data_ = copy_.data();
    strides[3] = 1;
    for (int i = 2; i >= 0; i--) strides[i] = strides[i + 1] * a.shape(i + 1);
  }

  // At an index of the first axis.
  const char* at(int64_t index) const { return data_ + index * strides[0] * size_; }

 private:
  const char* data_;
  int64_t size_;
  std::vector<char> copy_;

 public:
  mx::Strides strides;  // of the four axes, in elements
};

}  // namespace kernels
