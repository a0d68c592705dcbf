// Evaluated arrays as rows that kernels can read, without a copy where the last axis has no gaps.
#pragma once

#include <vector>

#include "kernel.h"
#include "rows.h"

namespace kernels {

// Not to be moved or copied: `rows` may point into `packed`. The array must live as long.
class RowView {
 public:
  struct Packed {};
  explicit RowView(const mx::array& a);
  RowView(const mx::array& a, Packed);  // a copy without any gaps
  RowView(const RowView&) = delete;
  RowView& operator=(const RowView&) = delete;

  const Rows& rows() const { return rows_; }

 private:
  // Set up rows_ for the array's own memory; false: it can't be.
  bool follow(const mx::array& a);
  void pack(const mx::array& a);

  Rows rows_;
  std::vector<char> packed_;
};

// The elements of `a` in row order.
void copy_in_order(const mx::array& a, char* to);

// For `Call::allocate`, where out[i] needs nothing but in[i]: the first output takes over the first input's memory when
// nobody else holds it.
void take_over_first(const Arrays& inputs, Arrays& outputs);

}  // namespace kernels
