#pragma once

#include "rows.h"

namespace kernels {

// Rows are summed in spans of this many elements, always, so that threads can share a row and the sum stays the same.
constexpr int64_t SOFTMAX_SPAN = 8192;

// Of a span: its largest element m, and the sum of e^(x - m); infinite m counts as 0 there.
struct Partial {
  float largest;
  float sum;
};

// Softmax or its logarithm's denominator, for rows of `dim` elements.
struct SoftmaxArgs {
  Rows x;
  void* y;
  Partial* partials;  // `spans` for each row
  int64_t dim, spans;
  Type type;
};

struct SoftmaxTable {
  // Spans begin to end of all the rows.
  void (*partials)(const SoftmaxArgs&, int64_t begin, int64_t end);
  // y = log(sum(e^x)) of rows begin to end.
  void (*logsumexp)(const SoftmaxArgs&, int64_t begin, int64_t end);
  // y = e^x / sum(e^x) of spans begin to end; y may be x. The first of each row's partials is the whole row's.
  void (*softmax)(const SoftmaxArgs&, int64_t begin, int64_t end);
  // Make the first of each row's partials that of the whole row.
  void (*combine)(const SoftmaxArgs&, int64_t begin, int64_t end);
};

}  // namespace kernels
