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

// Element by element: for views that no model makes.
void RowView::pack(const mx::array& a) {
  const size_t size = a.itemsize();
  packed_.resize(a.size() * size);
  std::vector<int64_t> at(a.ndim(), 0);
  const char* from = a.data<char>();
  for (size_t i = 0; i < a.size(); i++) {
    int64_t offset = 0;
    for (int axis = 0; axis < static_cast<int>(a.ndim()); axis++) offset += at[axis] * a.strides(axis);
    std::memcpy(packed_.data() + i * size, from + offset * static_cast<int64_t>(size), size);
    for (int axis = static_cast<int>(a.ndim()) - 1; axis >= 0 && ++at[axis] == a.shape(axis); axis--) at[axis] = 0;
  }
  const int64_t dim = a.shape(-1);
  rows_ = {packed_.data(), 1, {static_cast<int64_t>(a.size()) / dim}, {dim}};
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
