// Products with quantized and half-precision weights, for one row of x and for many.
#include "product_tile.inl"
#include "product_decode.inl"

namespace ISA {

using kernels::BLOCK;
using kernels::PackArgs;
using kernels::ProductArgs;

constexpr int64_t IN_PLACE = 64;   // rows up to which weights that need no decoding are used where they are
constexpr int64_t ROW_BLOCK = 48;  // rows that share a stretch of decoded weights; a multiple of MR
constexpr int64_t FEW_ROWS = MR > 4 ? 8 : 2;  // for which weights are used as they are decoded, be it more than once
constexpr int64_t NARROW = 48;  // rows up to which NR decoded columns stay in the first cache, and x streams past them
constexpr int64_t STRETCH = 640;  // the depth a tile runs over: (MR + NR) * STRETCH floats stay in the first cache
constexpr int64_t DECODED = 192 << 10;     // floats of decoded weights, in the second cache
constexpr int64_t BLOCKS_PER_THREAD = 4;   // so that a thread that is held up leaves some to the others
constexpr int64_t FEW_WEIGHTS = 64 << 10;  // what it takes to make another thread worthwhile

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static inline int64_t stretch(int64_t depth) {
  const int64_t parts = (depth + STRETCH - 1) / STRETCH;
  return round_up((depth + parts - 1) / parts, 4 * BLOCK);
}

// Blocks for `threads` threads, a multiple of NR each, of about the same size, so that no thread has one more to do.
static int64_t column_block(const ProductArgs& a, int threads) {
  int64_t most = a.columns;
  if (a.rows > FEW_ROWS) {
    most = DECODED / a.depth / NR * NR;
    most = most < NR ? NR : most > 96 ? 96 : most;
  }
  const int64_t shares = BLOCKS_PER_THREAD * threads, each = a.rows > FEW_ROWS ? FEW_WEIGHTS / 4 : FEW_WEIGHTS;
  const int64_t worthwhile = 1 + a.columns * a.depth / each;
  int64_t blocks = worthwhile < shares ? worthwhile : shares;
  if (blocks > threads) blocks -= blocks % threads;
  const int64_t block = round_up((a.columns + blocks - 1) / blocks, NR);
  return block < most ? block : most;
}

static int64_t scratch(const ProductArgs& a, int64_t columns) {
  if (a.format == kernels::DENSE_F32 && a.rows <= IN_PLACE) return a.rows * NR * W;
  if (a.rows <= FEW_ROWS) return 2 * NR * groups_of(a);
  columns = columns < NR ? NR : round_up(columns, NR);
  return columns * (round_up(a.depth, 4 * BLOCK) + ROW_BLOCK * W) + 2 * NR * groups_of(a) + LINE;
}

// ---- more rows: columns are decoded, then the tiles run over them -------------------------------------------

using DecodeColumn = void (*)(const ProductArgs&, int64_t column, int64_t k, int64_t depth, float* out, float* space);

// Part of the depth, k to k + depth, for rows `row` to `row + rows` and `columns` columns from `column` on, whose weights
// are `stride` floats apart.
struct Part {
  int64_t row, rows, column, columns, k, depth;
  const float* w;
  int64_t stride;
  float* partial;
};

// IN_MATRIX: the weights are where the matrix has them, with the next columns behind them and nothing after the last.
template <bool IN_MATRIX>
static void run_tiles(const ProductArgs& a, const Part& p) {
  const int64_t tiles = (p.rows + MR - 1) / MR, wide = round_up(p.columns, NR);
  float sums[MR * NR];
  TileArgs t{};
  t.stride = p.stride;
  t.depth = p.depth;
  t.out = sums;
  t.first = p.k == 0;
  t.last = p.k + p.depth == a.depth;
  for (int64_t i = 0; i < tiles; i++) {
    const int64_t begin = i * p.rows / tiles, end = (i + 1) * p.rows / tiles;
    t.part = i;
    t.parts = tiles;
    for (int64_t m = begin; m < end; m++) t.x[m - begin] = a.x + row_at(a.x_rows, p.row + m) * a.depth + p.k;
    for (int64_t n = 0; n < p.columns; n += NR) {
      t.w = p.w + n * p.stride;
      t.columns = IN_MATRIX && p.columns - n < NR ? p.columns - n : NR;
      t.partial = p.partial + (begin * wide + n * (end - begin)) * W;
      run_tile<IN_MATRIX>(static_cast<int>(end - begin), t);
      if (!t.last) continue;
      const int64_t count = p.columns - n < NR ? p.columns - n : NR;
      for (int64_t m = begin; m < end; m++) put(a, p.row + m, p.column + n, count, sums + (m - begin) * NR);
    }
  }
}

static void many_rows(const ProductArgs& a, int64_t begin, int64_t end, float* memory, DecodeColumn decode) {
  const int64_t columns = end - begin, at_once = round_up(columns, NR), step = stretch(a.depth);
  // Dense weights are read faster a long piece at a time.
  const bool narrow = a.rows <= NARROW && (a.format < kernels::DENSE_F32 || a.depth > STRETCH);
  const int64_t wide = narrow ? NR : columns;
  // To whole lines of the cache: a vector across two costs two accesses, and a store more.
  float* weights = memory + (-reinterpret_cast<uintptr_t>(memory) % LINE) / sizeof(float);
  float* partial = weights + at_once * round_up(a.depth, 4 * BLOCK);
  float* space = partial + at_once * ROW_BLOCK * W;
  for (int64_t row = 0; row < a.rows; row += ROW_BLOCK) {
    const int64_t rows = a.rows - row < ROW_BLOCK ? a.rows - row : ROW_BLOCK;
    for (int64_t k = 0; k < a.depth; k += step) {
      const int64_t depth = a.depth - k < step ? a.depth - k : step;
      // Only further blocks of rows need all of the depth again.
      float* w = a.rows > ROW_BLOCK ? weights + k * at_once : weights;
      for (int64_t n = 0; n < columns; n += wide) {
        const int64_t count = columns - n < wide ? columns - n : wide, padded = round_up(count, NR);
        if (row == 0) {
          for (int64_t i = 0; i < count; i++) decode(a, begin + n + i, k, depth, w + i * depth, space);
          memset(w + count * depth, 0, (padded - count) * depth * sizeof(float));
        }
        run_tiles<false>(a, {row, rows, begin + n, count, k, depth, w, depth, partial + n * ROW_BLOCK * W});
      }
    }
  }
}

// Weights that need no decoding, NR columns at a time: the first tile has them come, the others find them in the cache.
static void dense_rows(const ProductArgs& a, int64_t begin, int64_t end, float* partial) {
  const float* w = static_cast<const float*>(a.w);
  const int64_t step = stretch(a.depth);
  for (int64_t n = begin; n < end; n += NR) {
    const int64_t count = end - n < NR ? end - n : NR;
    for (int64_t k = 0; k < a.depth; k += step) {
      const int64_t depth = a.depth - k < step ? a.depth - k : step;
      run_tiles<true>(a, {0, a.rows, n, count, k, depth, w + n * a.depth + k, a.depth, partial});
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

// MR rows at once, else four at a time.
template <class F>
static void some_rows(const ProductArgs& a, int64_t begin, int64_t end, float* memory) {
  constexpr bool affine = F::has_bias;
  constexpr int most = MR > 4 ? 4 : 2;
  if constexpr (MR > 4) {
    if (a.rows > 4 && a.rows <= MR && affine && a.group == BLOCK)
      return few_rows<F, MR, affine ? 1 : 0>(a, 0, begin, end, memory);
    if (a.rows > 4 && a.rows <= MR) return few_rows<F, MR, 0>(a, 0, begin, end, memory);
  }
  for (int64_t row = 0; row < a.rows; row += most) {
    if (a.rows - row <= 2)
      few_rows<F, 2, 0>(a, row, begin, end, memory);
    else if (affine && a.group == BLOCK)
      few_rows<F, most, affine ? 1 : 0>(a, row, begin, end, memory);
    else
      few_rows<F, most, 0>(a, row, begin, end, memory);
  }
}

template <class F>
static void multiply_format(const ProductArgs& a, int64_t begin, int64_t end, float* memory) {
  if (a.rows == 1) return one_row<F>(a, begin, end, memory);
  if (a.format == kernels::DENSE_F32 && a.rows > MR && a.rows <= IN_PLACE) return dense_rows(a, begin, end, memory);
  if (a.rows <= FEW_ROWS) return some_rows<F>(a, begin, end, memory);
  many_rows(a, begin, end, memory, decode_column<F>);
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
