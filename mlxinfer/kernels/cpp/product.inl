// Products with quantized and half-precision weights, for one row of x and for many.
#include "product_formats.inl"
#include "product_tile.inl"

namespace ISA {

using kernels::BLOCK;
using kernels::PackArgs;
using kernels::ProductArgs;

constexpr int64_t ROW_BLOCK = 48;  // rows that share a stretch of decoded weights; a multiple of MR
constexpr int IN_REGISTERS = MR > 4 ? 4 : 2;  // rows for which weights are used as they are decoded
constexpr int64_t FEW_ROWS = MR > 4 ? 8 : 2;  // up to here that is faster, even when they are decoded twice
constexpr int64_t AHEAD = 4096;  // bytes to ask for before they are needed, at least
constexpr int64_t STRETCH = 640;  // the depth a tile runs over: (MR + NR) * STRETCH floats stay in the first cache
constexpr int64_t DECODED = 192 << 10;     // floats of decoded weights, in the second cache
constexpr int64_t FEW_WEIGHTS = 64 << 10;  // what it takes to make another thread worthwhile

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static inline int64_t row_at(const int64_t* rows, int64_t i) { return rows ? rows[i] : i; }

static inline int64_t stretch(int64_t depth) {
  const int64_t parts = (depth + STRETCH - 1) / STRETCH;
  return round_up((depth + parts - 1) / parts, 4 * BLOCK);
}

static int64_t column_block(const ProductArgs& a, int threads) {
  if (a.rows <= FEW_ROWS) return round_up(FEW_WEIGHTS / a.depth + 1, NR);
  const int64_t share = round_up(a.columns / (2 * threads) + 1, NR), room = DECODED / a.depth / NR * NR;
  const int64_t most = room < NR ? NR : room > 96 ? 96 : room;
  return share < most ? share : most;
}

static inline int64_t groups_of(const ProductArgs& a) {
  return a.scale_type == kernels::NO_SCALE ? 0 : a.depth / a.group;
}

static int64_t scratch(const ProductArgs& a, int64_t columns) {
  columns = columns < NR ? NR : round_up(columns, NR);
  return columns * (round_up(a.depth, 4 * BLOCK) + ROW_BLOCK * W) + 2 * NR * groups_of(a);
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

// ---- few rows: the weights are decoded into registers -------------------------------------------------------------

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

// Ask for the memory `bytes` behind p, which may lie outside the weights: then nothing happens.
static inline void prefetch(const void* p, int64_t bytes) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes)));
}

// One block of NR columns against M rows.
template <class F, int M>
static inline void add_block(Column* c, const typename F::Group* group, const float* const* x, int64_t k, int64_t ahead,
                             vf (*acc)[NR]) {
#pragma GCC unroll 4
  for (int n = 0; n < NR; n++) {
    vf w[V];
    F::decode(c[n].w, group[n], w);
    prefetch(c[n].w, ahead);
    c[n].w += F::bytes;
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) acc[m][n] = fma(w[v], load(x[m] + k + v * W), acc[m][n]);
  }
}

// At most M rows from `row` on. BLOCKS blocks have a scale in common; 0: as many as `group` says.
template <class F, int M, int BLOCKS>
static void few_rows(const ProductArgs& a, int64_t row, int64_t begin, int64_t end, float* space) {
  const int rows = a.rows - row < M ? static_cast<int>(a.rows - row) : M;
  const int64_t group_depth = BLOCKS ? BLOCKS * BLOCK : a.group;
  // The columns after these, or later ones where rows are short: processors look ahead within a page of one stream.
  const int64_t bytes = a.depth / BLOCK * F::bytes, columns_ahead = (AHEAD / bytes / NR + 1) * NR;
  const int64_t ahead = columns_ahead * bytes, scales_ahead = columns_ahead * groups_of(a) * sizeof(float);
  const float* x[M];
  for (int m = 0; m < M; m++) x[m] = a.x + row_at(a.x_rows, row + (m < rows ? m : 0)) * a.depth;
  for (int64_t column = begin; column < end; column += NR) {
    const int64_t count = end - column < NR ? end - column : NR;
    Column c[NR];
    for (int n = 0; n < NR; n++)
      c[n] = column_of<F>(a, column + (n < count ? n : 0), 0, a.depth, space + 2 * n * groups_of(a));
    vf acc[M][NR] = {};
    for (int64_t k = 0, g = 0; k < a.depth; g++) {
      typename F::Group group[NR];
#pragma GCC unroll 4
      for (int n = 0; n < NR; n++) {
        group[n] = open_group<F>(c[n], g);
        if constexpr (F::has_scale) prefetch(c[n].scales + g, scales_ahead);
        if constexpr (F::has_bias) prefetch(c[n].biases + g, scales_ahead);
      }
#pragma GCC unroll 4
      for (const int64_t stop = k + group_depth; k < stop; k += BLOCK) add_block<F, M>(c, group, x, k, ahead, acc);
    }
    for (int m = 0; m < rows; m++) {
      float sums[NR];
      sum_lanes(acc[m], sums);
      put(a, row + m, column, count, sums);
    }
  }
}

// ---- more rows: a block of columns is decoded once, then the tiles run over it ------------------------------------

// Weights k to k + depth of one column.
template <class F>
static void decode_column(const ProductArgs& a, int64_t column, int64_t k, int64_t depth, float* out, float* space) {
  Column c = column_of<F>(a, column, k, depth, space);
  for (int64_t i = 0; i < depth; i += a.group) {
    const typename F::Group group = open_group<F>(c, i / a.group);
    const int64_t end = i + a.group < depth ? i + a.group : depth;
    for (int64_t at = i; at < end; at += BLOCK, c.w += F::bytes) {
      vf w[V];
      F::decode(c.w, group, w);
      for (int v = 0; v < V; v++) store(out + at + v * W, w[v]);
    }
  }
}

using DecodeColumn = void (*)(const ProductArgs&, int64_t column, int64_t k, int64_t depth, float* out, float* space);

// Part of the depth, k to k + depth, for rows `row` to `row + rows` and `columns` columns from `column` on.
struct Part {
  int64_t row, rows, column, columns, k, depth;
  const float* w;
  float* partial;
};

static void run_tiles(const ProductArgs& a, const Part& p) {
  const int64_t tiles = (p.rows + MR - 1) / MR, wide = round_up(p.columns, NR);
  float sums[MR * NR];
  TileArgs t;
  t.stride = t.depth = p.depth;
  t.out = sums;
  t.first = p.k == 0;
  t.last = p.k + p.depth == a.depth;
  for (int64_t i = 0; i < tiles; i++) {
    const int64_t begin = i * p.rows / tiles, end = (i + 1) * p.rows / tiles;
    for (int64_t m = begin; m < end; m++) t.x[m - begin] = a.x + row_at(a.x_rows, p.row + m) * a.depth + p.k;
    for (int64_t n = 0; n < p.columns; n += NR) {
      t.w = p.w + n * p.depth;
      t.partial = p.partial + (begin * wide + n * (end - begin)) * W;
      run_tile(static_cast<int>(end - begin), t);
      if (!t.last) continue;
      const int64_t count = p.columns - n < NR ? p.columns - n : NR;
      for (int64_t m = begin; m < end; m++) put(a, p.row + m, p.column + n, count, sums + (m - begin) * NR);
    }
  }
}

static void many_rows(const ProductArgs& a, int64_t begin, int64_t end, float* memory, DecodeColumn decode) {
  const int64_t columns = end - begin, at_once = round_up(columns, NR), step = stretch(a.depth);
  float* weights = memory;
  float* partial = weights + at_once * round_up(a.depth, 4 * BLOCK);
  float* space = partial + at_once * ROW_BLOCK * W;
  for (int64_t row = 0; row < a.rows; row += ROW_BLOCK) {
    const int64_t rows = a.rows - row < ROW_BLOCK ? a.rows - row : ROW_BLOCK;
    for (int64_t k = 0; k < a.depth; k += step) {
      const int64_t depth = a.depth - k < step ? a.depth - k : step;
      float* w = weights + k * at_once;
      if (row == 0) {
        for (int64_t n = 0; n < columns; n++) decode(a, begin + n, k, depth, w + n * depth, space);
        memset(w + columns * depth, 0, (at_once - columns) * depth * sizeof(float));
      }
      run_tiles(a, {row, rows, begin, columns, k, depth, w, partial});
    }
  }
}

template <class F>
static void one_row(const ProductArgs& a, int64_t begin, int64_t end, float* memory) {
  constexpr bool affine = F::has_bias;
  if (affine && a.group == BLOCK) return few_rows<F, 1, affine ? 1 : 0>(a, 0, begin, end, memory);
  if (affine && a.group == 2 * BLOCK) return few_rows<F, 1, affine ? 2 : 0>(a, 0, begin, end, memory);
  few_rows<F, 1, 0>(a, 0, begin, end, memory);
}

template <class F>
static void multiply_format(const ProductArgs& a, int64_t begin, int64_t end, float* memory) {
  if (a.rows == 1) return one_row<F>(a, begin, end, memory);
  if (a.rows > FEW_ROWS) return many_rows(a, begin, end, memory, decode_column<F>);
  for (int64_t row = 0; row < a.rows; row += IN_REGISTERS) {
    if (a.rows - row <= 2)
      few_rows<F, 2, 0>(a, row, begin, end, memory);
    else
      few_rows<F, IN_REGISTERS, 0>(a, row, begin, end, memory);
  }
}

static void multiply(const ProductArgs& a, int64_t begin, int64_t end, float* memory) {
  switch (a.format) {
    case kernels::AFFINE2: return multiply_format<Affine<2>>(a, begin, end, memory);
    case kernels::AFFINE3: return multiply_format<Affine<3>>(a, begin, end, memory);
    case kernels::AFFINE4: return multiply_format<Affine<4>>(a, begin, end, memory);
    case kernels::AFFINE5: return multiply_format<Affine<5>>(a, begin, end, memory);
    case kernels::AFFINE6: return multiply_format<Affine<6>>(a, begin, end, memory);
    case kernels::AFFINE8: return multiply_format<Affine<8>>(a, begin, end, memory);
    case kernels::FP4: return multiply_format<Fp4>(a, begin, end, memory);
    case kernels::FP8: return multiply_format<Fp8>(a, begin, end, memory);
    case kernels::DENSE_F32: return multiply_format<Dense<float>>(a, begin, end, memory);
    case kernels::DENSE_F16: return multiply_format<Dense<half_t>>(a, begin, end, memory);
    case kernels::DENSE_BF16: return multiply_format<Dense<bfloat_t>>(a, begin, end, memory);
  }
}

// ---- x ------------------------------------------------------------------------------------------------------------

// Elements 0, 2, 4 ... of 2 W, then 1, 3, 5 ...: where formats of 4 bits have their low and high halves.
static inline void store_halves(float* out, vf a, vf b) {
#if defined(__AVX512F__)
  const __m512i even = reinterpret_cast<__m512i>(counting(0, 2));
  store(out, _mm512_permutex2var_ps(a, even, b));
  store(out + W, _mm512_permutex2var_ps(a, reinterpret_cast<__m512i>(counting(1, 2)), b));
#else
  float lanes[2 * W];
  store(lanes, a);
  store(lanes + W, b);
  for (int i = 0; i < W; i++) {
    out[i] = lanes[2 * i];
    out[W + i] = lanes[2 * i + 1];
  }
#endif
}

template <class T>
static void pack_rows(const PackArgs& a, int64_t begin, int64_t end) {
  const bool halves = a.format == kernels::AFFINE4 || a.format == kernels::FP4;
  const T* x = static_cast<const T*>(a.x);
  for (int64_t i = begin * a.depth; i < end * a.depth; i += 2 * W) {
    const vf first = load(x + i), second = load(x + i + W);
    if (halves) {
      store_halves(a.packed + i, first, second);
    } else {
      store(a.packed + i, first);
      store(a.packed + i + W, second);
    }
  }
}

static void pack(const PackArgs& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case kernels::F32: return pack_rows<float>(a, begin, end);
    case kernels::F16: return pack_rows<half_t>(a, begin, end);
    case kernels::BF16: return pack_rows<bfloat_t>(a, begin, end);
  }
}

static constexpr kernels::ProductTable product_table = {pack, column_block, scratch, multiply};

}  // namespace ISA
