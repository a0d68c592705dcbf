#pragma once

#include "types.h"

namespace kernels {

// How a row of weights lies in memory. Affine: w = scale * q + bias, with q of that many bits, packed from the low bits
// on. FP4 and FP8: E2M1 and E4M3 with an E8M0 scale per 32. Dense: the numbers themselves.
enum Format : int { AFFINE2, AFFINE3, AFFINE4, AFFINE5, AFFINE6, AFFINE8, FP4, FP8, DENSE_F32, DENSE_F16, DENSE_BF16 };

enum ScaleType : int { SCALE_F32, SCALE_F16, SCALE_BF16, SCALE_E8M0, NO_SCALE };

// Weights are decoded this many at a time.
constexpr int BLOCK = 32;

// y = x times the transpose of w, over the rows of one matrix w.
struct ProductArgs {
  const float* x;  // rows as `pack` lays them out
  void* y;
  const void* w;
  const void* scales;
  const void* biases;
  // Which row of x belongs to which row of y; null: the first to the first, and so on.
  const int64_t* x_rows;
  const int64_t* y_rows;
  int64_t rows;
  int64_t depth;    // elements in a row of x and of w, a multiple of BLOCK
  int64_t columns;  // rows of w
  int64_t group;    // elements under one scale
  Format format;
  ScaleType scale_type;
  Type y_type;
};

struct PackArgs {
  const void* x;
  Type type;
  float* packed;
  int64_t depth;
  Format format;
};

struct ProductTable {
  // Rows begin to end of x in float32, in the order in which the format's weights are decoded.
  void (*pack)(const PackArgs&, int64_t begin, int64_t end);
  // How many columns one call of `multiply` should get, where there are as many as in `args`, for `threads` threads.
  int64_t (*column_block)(const ProductArgs&, int threads);
  // How many floats of working memory `multiply` needs for so many columns.
  int64_t (*scratch)(const ProductArgs&, int64_t columns);
  // Columns begin to end of y.
  void (*multiply)(const ProductArgs&, int64_t begin, int64_t end, float* scratch);
};

}  // namespace kernels
