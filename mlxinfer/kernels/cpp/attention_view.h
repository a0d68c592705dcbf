// Arrays of four axes as attention reads them: by their strides, as long as the last axis is dense.
#pragma once

#include <vector>

#include "view.h"

namespace kernels {

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
