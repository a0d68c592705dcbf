// Tiles that decode their weights, and few rows, which need no other.
#include "product_formats.inl"

namespace ISA {

using kernels::BLOCK;
using kernels::ProductArgs;

constexpr int64_t AHEAD = 4096;  // bytes to ask for before they are needed, at least

static inline int64_t row_at(const int64_t* rows, int64_t i) { return rows ? rows[i] : i; }

static inline int64_t groups_of(const ProductArgs& a) {
  return a.scale_type == kernels::NO_SCALE ? 0 : a.depth / a.group;
}

static inline void put(const ProductArgs& a, int64_t row, int64_t column, int64_t count, const float* sums) {
  const int64_t at = row_at(a.y_rows, row) * a.columns + column;
  for (int64_t i = 0; i < count; i++) {
    switch (a.y_type) {
      case kernels::F32: from_scalar(sums[i], static_cast<float*>(a.y) + at + i); break;
      case kernels::F16: from_scalar(sums[i], static_cast<half_t*>(a.y) + at + i); break;
      case kernels::BF16: from_scalar(sums[i], static_cast<bfloat_t*>(a.y) + at + i); break;
    }
  }
}

// The weights of a row of w, and its scales and biases, from one place on.
struct Column {
  const uint8_t* w;
  const float* scales;
  const float* biases;
};

template <class F>
static inline Column column_of(const ProductArgs& a, int64_t column, int64_t k, int64_t depth, float* space) {
  Column out = {static_cast<const uint8_t*>(a.w) + (column * a.depth + k) / BLOCK * F::bytes, nullptr, nullptr};
  const int64_t first = (column * a.depth + k) / a.group, count = (depth + a.group - 1) / a.group;
  if constexpr (F::has_scale) out.scales = scales_from(a.scales, a.scale_type, first, count, space);
  if constexpr (F::has_bias) out.biases = scales_from(a.biases, a.scale_type, first, count, space + count);
  return out;
}

template <class F>
static inline typename F::Group open_group(const Column& c, int64_t group) {
  float scale = 0, bias = 0;
  if constexpr (F::has_scale) scale = c.scales[group];
  if constexpr (F::has_bias) bias = c.biases[group];
  return F::open(scale, bias);
}

template <class F>
static inline int64_t bytes_of(const ProductArgs& a) { return a.depth / BLOCK * F::bytes; }

// What to ask for meanwhile: the columns after these, or later ones where rows are short. Processors look ahead
// themselves, but only within a page of one stream.
template <class F>
static inline int64_t columns_ahead(const ProductArgs& a) { return (AHEAD / bytes_of<F>(a) / NR + 1) * NR; }

// Ask for the memory at p, which may lie outside the weights: then nothing happens.
static inline void prefetch(uintptr_t p) { __builtin_prefetch(reinterpret_cast<const void*>(p)); }
static inline void prefetch(const void* p, int64_t bytes) {
  prefetch(reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes));
}

// One block of NR columns against M rows.
template <class F, int M>
INLINE void add_block(Column* c, const typename F::Group* group, const float* const* x, int64_t k, uintptr_t* ahead,
                      int64_t distance, vf (*acc)[NR]) {
  vf w[V][NR];
#pragma GCC unroll 4
  for (int n = 0; n < NR; n++) {
    vf block[V];
    F::decode(c[n].w, group[n], block);
    if constexpr (F::bytes >= LINE)
      for (int i = 0; i < F::bytes; i += LINE) prefetch(c[n].w + i, distance);
    c[n].w += F::bytes;
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) w[v][n] = block[v];
  }
  // NR columns lie behind each other: where a block is short, what comes after them is asked for in its order.
  if constexpr (F::bytes < LINE) {
    for (int i = 0; i < NR * F::bytes; i += LINE) prefetch(*ahead + i);
    *ahead += NR * F::bytes;
  }
#pragma GCC unroll 8
  for (int v = 0; v < V; v++) add_products<M>(x, k + v * W, w[v], acc);
}

// The whole depth of M rows and NR columns. BLOCKS blocks have a scale in common; 0: as many as `group` says.
template <class F, int M, int BLOCKS>
INLINE void decoding_tile(const ProductArgs& a, const float* const* x, Column* c, float* sums) {
  const int64_t group_depth = BLOCKS ? BLOCKS * BLOCK : a.group;
  const int64_t columns = columns_ahead<F>(a), scales = columns * groups_of(a) * sizeof(float);
  const int64_t distance = columns * bytes_of<F>(a);
  uintptr_t ahead = reinterpret_cast<uintptr_t>(c[0].w) + distance;
  vf acc[M][NR] = {};
  for (int64_t k = 0, g = 0; k < a.depth; g++) {
    typename F::Group group[NR];
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) {
      group[n] = open_group<F>(c[n], g);
      if constexpr (F::has_scale) prefetch(c[n].scales + g, scales);
      if constexpr (F::has_bias) prefetch(c[n].biases + g, scales);
    }
    const int64_t stop = k + group_depth;
    if constexpr (M <= 4) {
#pragma GCC unroll 4
      for (; k < stop; k += BLOCK) add_block<F, M>(c, group, x, k, &ahead, distance, acc);
    } else {
      for (; k < stop; k += BLOCK) add_block<F, M>(c, group, x, k, &ahead, distance, acc);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) sum_lanes(acc[m], sums + m * NR);
}

// At most M rows. What is missing for NR columns is a column once more.
template <class F, int M, int BLOCKS>
static void few_rows(const ProductArgs& a, int64_t row, int64_t begin, int64_t end, float* space) {
  const int64_t rows = a.rows - row < M ? a.rows - row : M;
  const float* x[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) x[m] = a.x + row_at(a.x_rows, row + (m < rows ? m : 0)) * a.depth;
  for (int64_t column = begin; column < end; column += NR) {
    const int64_t count = end - column < NR ? end - column : NR;
    float sums[M * NR];
    Column c[NR];
    for (int n = 0; n < NR; n++)
      c[n] = column_of<F>(a, column + (n < count ? n : 0), 0, a.depth, space + 2 * n * groups_of(a));
    decoding_tile<F, M, BLOCKS>(a, x, c, sums);
    for (int64_t m = 0; m < rows; m++) put(a, row + m, column, count, sums + m * NR);
  }
}

// Weights k to k + depth of one column, for tiles to come.
template <class F>
static void decode_column(const ProductArgs& a, int64_t column, int64_t k, int64_t depth, float* out, float* space) {
  Column c = column_of<F>(a, column, k, depth, space);
  const int64_t ahead = columns_ahead<F>(a) * bytes_of<F>(a);
  const bool asks = F::bytes < LINE || depth < a.depth;  // long columns are seen coming by the processor
  for (int64_t i = 0; i < depth; i += a.group) {
    const typename F::Group group = open_group<F>(c, i / a.group);
    const int64_t end = i + a.group < depth ? i + a.group : depth;
    for (int64_t at = i; at < end; at += BLOCK, c.w += F::bytes) {
      vf w[V];
      F::decode(c.w, group, w);
      for (int j = 0; asks && j < F::bytes; j += LINE) prefetch(c.w + j, ahead);
      for (int v = 0; v < V; v++) store(out + at + v * W, w[v]);
    }
  }
}

}  // namespace ISA
