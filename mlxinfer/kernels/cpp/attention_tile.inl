// The two products of attention as register tiles. Every element is one chain of multiply-adds, over the dimensions
// for a score and over the keys for an output, so its bits don't depend on the shape of the tile.
namespace ISA {

using kernels::ATTENTION_BLOCK;

// a0 b0 a1 b1 ...
static inline void zip(vf a, vf b, vf* low, vf* high) {
#if defined(__AVX512F__)
  *low = KERNELS_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  *high = KERNELS_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
  *low = KERNELS_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  *high = KERNELS_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  *low = KERNELS_SHUFFLE(a, b, 0, 4, 1, 5);
  *high = KERNELS_SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}

// [W, W] → its transpose, in registers. A round of zips rotates the bits of (vector, lane) by one place.
template <class T>
static inline void load_transposed(const T* from, int64_t stride, vf (&x)[W]) {
  vf y[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; i++, from += stride) x[i] = load(from);
#pragma GCC unroll 4
  for (int round = 1; round < W; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < W / 2; i++) zip(x[i], x[i + W / 2], &y[2 * i], &y[2 * i + 1]);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) x[i] = y[i];
  }
}

#if defined(__AVX512F__)
// Every fourth row's quarters meet in one register by loads alone, which leaves half of the shuffles.
static inline void load_transposed(const float* from, int64_t stride, vf (&x)[W]) {
  const float *r0 = from, *r4 = from + 4 * stride, *r8 = from + 8 * stride, *r12 = from + 12 * stride;
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    vf y[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const int64_t at = j * stride + 4 * c;
      __m512 z = _mm512_castps128_ps512(_mm_loadu_ps(r0 + at));
      z = _mm512_insertf32x4(z, _mm_loadu_ps(r4 + at), 1);
      z = _mm512_insertf32x4(z, _mm_loadu_ps(r8 + at), 2);
      y[j] = _mm512_insertf32x4(z, _mm_loadu_ps(r12 + at), 3);
    }
    __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(y[0], y[1])), b = _mm512_castps_pd(_mm512_unpacklo_ps(y[2], y[3]));
    __m512d e = _mm512_castps_pd(_mm512_unpackhi_ps(y[0], y[1])), f = _mm512_castps_pd(_mm512_unpackhi_ps(y[2], y[3]));
    x[4 * c] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    x[4 * c + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    x[4 * c + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(e, f));
    x[4 * c + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(e, f));
  }
}
#endif

template <class T>
static inline void transpose(const T* from, int64_t stride, float* to, int64_t to_stride) {
  vf x[W];
  load_transposed(from, stride, x);
#pragma GCC unroll 16
  for (int i = 0; i < W; i++, to += to_stride) store(to, x[i]);
}

// The same for a corner of [rows, columns]; [columns, W] comes out, with zeros in the missing rows' places.
template <class T>
static void transpose_part(const T* from, int64_t stride, int rows, int columns, float* to, int64_t to_stride) {
  for (int column = 0; column < columns; column++)
    for (int row = 0; row < W; row++)
      to[column * to_stride + row] = row < rows ? to_scalar(from[row * stride + column]) : 0.0f;
}

// [count, dim] rows → [dim, 64], zeros for the keys that aren't there.
template <class T>
static void pack_keys(const T* k, int64_t stride, int count, int64_t dim, float* out) {
  for (int key = 0; key < ATTENTION_BLOCK; key += W, k += W * stride, out += W) {
    const int rows = count - key < W ? count - key : W;
    for (int64_t d = 0; d < dim; d += W) {
      const int columns = dim - d < W ? static_cast<int>(dim - d) : W;
      if (rows == W && columns == W) {
        transpose(k + d, stride, out + d * ATTENTION_BLOCK, ATTENTION_BLOCK);
      } else {
        transpose_part(k + d, stride, rows, columns, out + d * ATTENTION_BLOCK, ATTENTION_BLOCK);
      }
    }
  }
}

// [rows, dim] as floats, rows `padded` apart and filled up with zeros.
template <class T>
static void copy_rows(const T* x, int64_t stride, int64_t rows, int64_t dim, float* out, int64_t padded) {
  const int64_t whole = dim / W * W;
  for (int64_t row = 0; row < rows; row++, x += stride, out += padded) {
    for (int64_t d = 0; d < whole; d += W) store(out + d, load(x + d));
    for (int64_t d = whole; d < dim; d++) out[d] = to_scalar(x[d]);
    for (int64_t d = dim; d < padded; d++) out[d] = 0;
  }
}

// Registers hold R x C sums: 24 where there are 32 registers, 12 where there are 16.
constexpr int MAX_R = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTER_TILE = 24;
#else
constexpr int REGISTER_TILE = 12;
#endif
// The most columns, in powers of two, that fit beside R rows.
constexpr int columns(int rows) {
  int c = 1;
  while (c * 2 * rows <= REGISTER_TILE && c * 2 * W <= ATTENTION_BLOCK && c < 8) c *= 2;
  return c;
}

// scores[r][key] = sum over d of q[r][d] * keys[d][key]
template <int R>
static void score_rows(const float* q, int64_t dim, const float* keys, float* scores) {
  constexpr int C = columns(R);
  for (int key = 0; key < ATTENTION_BLOCK; key += C * W) {
    vf sums[R][C] = {};
    const float* column = keys + key;
    for (int64_t d = 0; d < dim; d++, column += ATTENTION_BLOCK) {
      vf k[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) k[c] = load(column + c * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const vf x = splat(q[r * dim + d]);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sums[r][c] = fma(x, k[c], sums[r][c]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) store(scores + r * ATTENTION_BLOCK + key + c * W, sums[r][c]);
  }
}

// The same without packing, for the few rows of decoding, which would not pay for it: whole blocks and vectors only.
// Their time is that of memory: keys and values are asked for some rows ahead, past the end too, and into the second
// cache: the first has room for too few requests at a time (9 against 17 GB/s on one core of a Zen 4).
constexpr int FEW_QUERIES = 4;
constexpr int64_t PREFETCH_KEYS = 64;
template <class T>
static inline void prefetch(const T* x, int64_t elements) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(x) + elements * sizeof(T)), 0, 2);
}

template <class T, int R>
static void score_few(const float* q, int64_t dim, const T* k, int64_t stride, float* scores) {
  for (int key = 0; key < ATTENTION_BLOCK; key += W, k += W * stride) {
    vf sums[R] = {};
    for (int64_t d = 0; d < dim; d += W) {
      vf x[W];
      load_transposed(k + d, stride, x);
      for (int i = 0; i < W; i++) prefetch(k + d, (i + PREFETCH_KEYS) * stride);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r] = fma(splat(q[r * dim + d + i]), x[i], sums[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) store(scores + r * ATTENTION_BLOCK + key, sums[r]);
  }
}

template <int R, int C>
static inline void weigh_columns(
    const float* weights, const float* factor, const float* values, int64_t stride, int count, float* out,
    int64_t padded) {
  vf sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) sums[r][c] = load(out + r * padded + c * W) * factor[r];
  for (int key = 0; key < count; key++, values += stride) {
    for (int c = 0; R <= FEW_QUERIES && c < C; c++) prefetch(values + c * W, PREFETCH_KEYS * stride);
    vf v[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) v[c] = load(values + c * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vf x = splat(weights[r * ATTENTION_BLOCK + key]);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[r][c] = fma(x, v[c], sums[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(out + r * padded + c * W, sums[r][c]);
}

// out[r] = out[r] * factor[r] + sum over the keys of weights[r][key] * values[key]; `padded` columns, a multiple of W.
template <int R>
static void weigh_rows(
    const float* weights, const float* factor, const float* values, int64_t stride, int count, float* out,
    int64_t padded) {
  constexpr int C = columns(R);
  int64_t d = 0;
  for (; d + C * W <= padded; d += C * W)
    weigh_columns<R, C>(weights, factor, values + d, stride, count, out + d, padded);
  for (; d < padded; d += W) weigh_columns<R, 1>(weights, factor, values + d, stride, count, out + d, padded);
}

static void score_packed(const float* q, int64_t rows, int64_t dim, const float* keys, float* scores) {
  for (; rows > 0; rows -= MAX_R, q += MAX_R * dim, scores += MAX_R * ATTENTION_BLOCK) {
    switch (rows) {
      case 1: score_rows<1>(q, dim, keys, scores); break;
      case 2: score_rows<2>(q, dim, keys, scores); break;
      case 3: score_rows<3>(q, dim, keys, scores); break;
      case 4: score_rows<4>(q, dim, keys, scores); break;
      case 5: score_rows<5>(q, dim, keys, scores); break;
      default: score_rows<MAX_R>(q, dim, keys, scores);
    }
  }
}

// Scores of `count` keys for `rows` queries; `packed` is memory for [dim, 64].
template <class T>
static void score_block(
    const float* q, int64_t rows, int64_t dim, const T* k, int64_t stride, int count, float* packed, float* scores) {
  if (rows > FEW_QUERIES || count < ATTENTION_BLOCK || dim % W != 0) {
    pack_keys(k, stride, count, dim, packed);
    return score_packed(q, rows, dim, packed, scores);
  }
  switch (rows) {
    case 1: return score_few<T, 1>(q, dim, k, stride, scores);
    case 2: return score_few<T, 2>(q, dim, k, stride, scores);
    case 3: return score_few<T, 3>(q, dim, k, stride, scores);
    default: return score_few<T, FEW_QUERIES>(q, dim, k, stride, scores);
  }
}

static void weigh_block(
    const float* weights, const float* factor, int64_t rows, const float* values, int64_t stride, int count, float* out,
    int64_t padded) {
  for (; rows > 0; rows -= MAX_R, weights += MAX_R * ATTENTION_BLOCK, factor += MAX_R, out += MAX_R * padded) {
    switch (rows) {
      case 1: weigh_rows<1>(weights, factor, values, stride, count, out, padded); break;
      case 2: weigh_rows<2>(weights, factor, values, stride, count, out, padded); break;
      case 3: weigh_rows<3>(weights, factor, values, stride, count, out, padded); break;
      case 4: weigh_rows<4>(weights, factor, values, stride, count, out, padded); break;
      case 5: weigh_rows<5>(weights, factor, values, stride, count, out, padded); break;
      default: weigh_rows<MAX_R>(weights, factor, values, stride, count, out, padded);
    }
  }
}

}  // namespace ISA
