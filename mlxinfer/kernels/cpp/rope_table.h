#pragma once

#include "rows.h"

namespace kernels {

constexpr int MAX_ROPE_DIMS = 1024;
constexpr int ROPE_PADDING = 16;  // the longest vector

// Rotary positions for x as (batch, heads, length, width), of which the first `dims` of the width are rotated.
struct RopeArgs {
  const void* x;
  void* y;                // in row order
  int64_t x_strides[3];   // of batch, heads and length, in elements
  int64_t batch, heads, length, width;
  int dims;
  bool traditional;       // pairs are neighbours; else halves
  const int64_t* offsets; // batch of them: the position of each sequence's first token
  // Of each pair, and then anything up to a multiple of ROPE_PADDING: what one position turns it by, as a fraction of a
  // whole turn times 2^64, and what is added to its cosine and sine: 0, or NaN where the frequency isn't finite.
  // `spoilt` may be null: all 0.
  const uint64_t* turns;
  const float* spoilt;
  Type type;
};

struct RopeTable {
  // Tokens begin to end, of batch * length; each with all its heads.
  void (*rope)(const RopeArgs&, int64_t begin, int64_t end);
};

}  // namespace kernels
