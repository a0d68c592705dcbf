// The inner product: every element of y is the sum of the lanes of one accumulator, which runs over the depth from
// front to back. All paths keep to this, so an element has the same bits whatever is computed beside it.
namespace ISA {

constexpr int NR = 4;  // columns side by side
constexpr int LINE = 64;  // bytes in a line of the cache
// Rows side by side: as many as leave their accumulators, the columns' weights and one x in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MR = 6;
#else
constexpr int MR = 3;
#endif

// out[i] = the sum of the lanes of x[i]: halves onto each other, four vectors at a time.
static inline void sum_lanes(const vf* x, float* out) {
#if defined(__AVX2__)
  __m128 quarter[NR];
  for (int i = 0; i < NR; i++) {
#if defined(__AVX512F__)
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x[i]), _mm512_extractf32x8_ps(x[i], 1));
#else
    __m256 half = x[i];
#endif
    quarter[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
  __m128 ab = _mm_add_ps(_mm_movelh_ps(quarter[0], quarter[1]), _mm_movehl_ps(quarter[1], quarter[0]));
  __m128 cd = _mm_add_ps(_mm_movelh_ps(quarter[2], quarter[3]), _mm_movehl_ps(quarter[3], quarter[2]));
  _mm_storeu_ps(out, _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd)));
#elif defined(__ARM_NEON) && defined(__aarch64__) && !defined(KERNELS_PLAIN)
  vst1q_f32(out, vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])));
#else
  for (int i = 0; i < NR; i++) out[i] = sum(x[i]);
#endif
}

// The accumulators are in the caller's registers, and have to stay there.
#define INLINE __attribute__((always_inline)) static inline

// One stretch of the depth for some rows of x and NR columns of decoded weights, `stride` floats apart.
struct TileArgs {
  const float* x[MR];
  const float* w;
  int64_t stride;
  int64_t depth;
  int64_t columns;  // of NR, those there are
  int64_t part, parts;  // of the tiles over these columns: each asks for its part of the next NR columns meanwhile
  float* partial;  // NR accumulators a row between stretches
  float* out;      // NR sums a row, after the last
  bool first, last;
};

template <int M>
INLINE void open_tile(const TileArgs& a, vf (*acc)[NR]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) acc[m][n] = a.first ? vf{} : load(a.partial + (m * NR + n) * W);
}

template <int M>
INLINE void close_tile(const TileArgs& a, const vf (*acc)[NR]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    if (a.last) {
      sum_lanes(acc[m], a.out + m * NR);
    } else {
#pragma GCC unroll 4
      for (int n = 0; n < NR; n++) store(a.partial + (m * NR + n) * W, acc[m][n]);
    }
  }
}

// Loaded once: compilers would rather give each use an operand in memory, and loads are what there are too many of.
INLINE void in_register(vf& x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__x86_64__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
}

// One vector of M rows, at x[m] + k, and of NR columns.
template <int M>
INLINE void add_products(const float* const* x, int64_t k, const vf* w, vf (*acc)[NR]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    vf value = load(x[m] + k);
    in_register(value);
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) acc[m][n] = fma(w[n], value, acc[m][n]);
  }
}

// Into the second cache, which many lines can be on their way to. `p` may lie outside the weights: then nothing happens.
INLINE void ask_for(uintptr_t p) { __builtin_prefetch(reinterpret_cast<const void*>(p), 0, 2); }

// IN_MATRIX: columns that there aren't are the first once more, and a part of the next is asked for, a line for each
// vector of the depth: all at once, they would be waited for.
template <int M, bool IN_MATRIX>
static void tile(const TileArgs& a) {
  vf acc[M][NR];
  open_tile<M>(a, acc);
  const float* x[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) x[m] = a.x[m];
  const float *w0 = a.w, *w1 = w0 + a.stride, *w2 = w1 + a.stride, *w3 = w2 + a.stride;
  if constexpr (IN_MATRIX) {
    if (a.columns < 2) w1 = w0;
    if (a.columns < 3) w2 = w0;
    if (a.columns < 4) w3 = w0;
  }
  int64_t k = 0;
  auto add = [&]() {
    const vf w[NR] = {load(w0 + k), load(w1 + k), load(w2 + k), load(w3 + k)};
    add_products<M>(x, k, w, acc);
  };
  auto ask_and_add = [&](uintptr_t column, uintptr_t other, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end && k < a.depth; at += LINE, k += W) {
      ask_for(column + at);
      if (other) ask_for(other + at);
      add();
    }
  };
  if constexpr (IN_MATRIX) {
    const int64_t bytes = a.depth * static_cast<int64_t>(sizeof(float));
    const int64_t begin = a.part * bytes / a.parts / LINE * LINE, end = (a.part + 1) * bytes / a.parts;
    const uintptr_t stride = a.stride * sizeof(float), next = reinterpret_cast<uintptr_t>(w0) + NR * stride;
    if (a.parts < NR)
      for (int n = 0; n < NR; n += 2) ask_and_add(next + n * stride, next + (n + 1) * stride, begin, end);
    else
      for (int n = 0; n < NR; n++) ask_and_add(next + n * stride, 0, begin, end);
  }
  for (; k < a.depth; k += W) add();
  close_tile<M>(a, acc);
}

template <bool IN_MATRIX>
static inline void run_tile(int rows, const TileArgs& a) {
  if constexpr (MR > 3) {
    if (rows == 6) return tile<6, IN_MATRIX>(a);
    if (rows == 5) return tile<5, IN_MATRIX>(a);
    if (rows == 4) return tile<4, IN_MATRIX>(a);
  }
  if (rows == 3) return tile<3, IN_MATRIX>(a);
  if (rows == 2) return tile<2, IN_MATRIX>(a);
  tile<1, IN_MATRIX>(a);
}

}  // namespace ISA
