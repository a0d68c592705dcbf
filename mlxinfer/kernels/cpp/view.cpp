#include "view.h"

#include <cstring>

#include "mlx/allocator.h"

namespace kernels {

RowView::RowView(const mx::array& a) : rows_{a.data<void>(), 1, {1}, {0}} {
  if (!follow(a)) pack(a);
}

bool RowView::follow(const mx::array& a) {
  const int last = static_cast<int>(a.ndim()) - 1;
  if (last < 0) return true;
  if (a.shape(last) != 1 && a.strides(last) != 1) return false;
  int axes = 0;
  for (int axis = 0; axis < last; axis++) {
    const int64_t length = a.shape(axis), stride = a.strides(axis);
    if (length == 1) continue;
    if (axes > 0 && rows_.strides[axes - 1] == length * stride) {
      rows_.shape[axes - 1] *= length;
      rows_.strides[axes - 1] = stride;
      continue;
    }
    if (axes == MAX_ROW_AXES) return false;
    rows_.shape[axes] = length;
    rows_.strides[axes++] = stride;
  }
  if (axes > 0) rows_.axes = axes;
  return true;
}

RowView::RowView(const mx::array& a, Packed) { pack(a); }

void RowView::pack(const mx::array& a) {
  packed_.resize(a.nbytes());
  copy_in_order(a, packed_.data());
  const int64_t dim = a.shape(-1);
  rows_ = {packed_.data(), 1, {static_cast<int64_t>(a.size()) / dim}, {dim}};
}

void copy_in_order(const mx::array& a, char* to) {
  const int64_t size = a.itemsize();
  if (a.size() == 0) return;
  if (a.ndim() == 0 || a.flags().row_contiguous) {
    std::memcpy(to, a.data<char>(), a.nbytes());
    return;
  }
  const int last = static_cast<int>(a.ndim()) - 1;
  const int64_t dim = a.shape(last), run = a.strides(last) == 1 ? dim : 1;
  std::vector<int64_t> at(last, 0);
  for (int64_t rows = static_cast<int64_t>(a.size()) / dim; rows > 0; rows--) {
    int64_t start = 0;
    for (int axis = 0; axis < last; axis++) start += at[axis] * a.strides(axis);
    for (int64_t i = 0; i < dim; i += run, to += run * size)
      std::memcpy(to, a.data<char>() + (start + i * a.strides(last)) * size, run * size);
    for (int axis = last - 1; axis >= 0 && ++at[axis] == a.shape(axis); axis--) at[axis] = 0;
  }
}

void take_over_first(const Arrays& inputs, Arrays& outputs) {
  const auto& first = inputs[0];
  if (first.is_donatable() && first.flags().row_contiguous && first.nbytes() == outputs[0].nbytes()) {
    outputs[0].copy_shared_buffer(first);
    return;
  }
  outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
}

}  // namespace kernels
