// Decoders: 32 weights of one row into vectors of float32.
//
// Each format has the memory of 32 weights (`bytes`), whether they have scales and biases, what the weights of a group
// share (`Group`, made by `open`), and `decode`. w = fma(q, scale, bias) in float32 whichever way it is found.
namespace ISA {

constexpr int V = kernels::BLOCK / W;  // vectors in a block

typedef uint8_t vb __attribute__((vector_size(W)));

// W bytes, each in a lane of its own.
static inline vu load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<vu>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<vu>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  vb bytes;
  memcpy(&bytes, p, W);
  return __builtin_convertvector(bytes, vu);
#endif
}

// `start` + lane * `step`, lane by lane.
static inline vu counting(int start, int step) {
  vu out;
  for (int i = 0; i < W; i++) out[i] = static_cast<uint32_t>(start + i * step);
  return out;
}

// COUNT bytes, as two loads at most: a number put together in memory would have to wait for its parts to arrive there.
template <int COUNT>
static inline uint64_t read_bytes(const uint8_t* p) {
  if constexpr (COUNT >= 4) {
    uint32_t low;
    memcpy(&low, p, 4);
    if constexpr (COUNT == 4) return low;
    return low | read_bytes<COUNT - 4>(p + 4) << 32;
  } else if constexpr (COUNT >= 2) {
    uint16_t low;
    memcpy(&low, p, 2);
    if constexpr (COUNT == 2) return low;
    return low | static_cast<uint64_t>(p[2]) << 16;
  } else {
    return p[0];
  }
}

// The bits of 32 quants as they come, BITS each from the low bits on: lane i of q[v] has quant v * W + i, and above its
// BITS bits whatever lies behind them.
template <int BITS>
static inline void load_quants(const uint8_t* p, vu* q) {
#if defined(__AVX512F__)
  // Two 16-bit words hold any quant: one permutation brings them into its lane, one shift puts them in place.
  __m512i all = _mm512_maskz_loadu_epi32((1 << BITS) - 1, p);
  for (int v = 0; v < V; v++) {
    vu bit = counting(v * W * BITS, BITS);
    vu words = (bit >> 4) | (((bit >> 4) + 1) << 16);
    __m512i pairs = _mm512_permutexvar_epi16(reinterpret_cast<__m512i>(words), all);
    q[v] = reinterpret_cast<vu>(pairs) >> (bit & 15);
  }
#elif defined(__AVX2__)
  // Eight quants are BITS bytes; the bytes from a quant's first on come into its lane, one shift puts them in place.
  for (int v = 0; v < V; v++) {
    const uint64_t bytes = read_bytes<BITS>(p + v * BITS);
    vu bit = counting(0, BITS), first = bit >> 3;
    vu choice = first | ((first + 1) << 8) | splat_u(0x80800000);
    __m256i all = _mm256_set1_epi64x(static_cast<int64_t>(bytes));
    q[v] = reinterpret_cast<vu>(_mm256_shuffle_epi8(all, reinterpret_cast<__m256i>(choice))) >> (bit & 7);
  }
#else
  uint32_t words[BITS], lanes[kernels::BLOCK];
  memcpy(words, p, sizeof words);
  for (int i = 0; i < kernels::BLOCK; i++) {
    const int word = i * BITS / 32, bit = i * BITS % 32;
    lanes[i] = words[word] >> bit;
    if (bit + BITS > 32) lanes[i] |= words[word + 1] << (32 - bit);
  }
  for (int v = 0; v < V; v++) q[v] = load_u(lanes + v * W);
#endif
}

#if defined(__AVX512F__)
// Up to 5 bits the weights of a group are looked up in its table of 16 or 32 floats: a permutation reads only the low
// bits of an index, so quants need no mask.
template <int BITS>
struct Levels {
  vf low, high;
  static inline Levels open(float scale, float bias) {
    vf s = splat(scale), b = splat(bias);
    constexpr int mask = BITS < 4 ? (1 << BITS) - 1 : 15;
    vf index = to_float(counting(0, 1) & static_cast<uint32_t>(mask));
    return {fma(index, s, b), BITS > 4 ? fma(index + 16.0f, s, b) : vf{}};
  }
  inline vf at(vu q) const {
    __m512i index = reinterpret_cast<__m512i>(q);
    if constexpr (BITS > 4) return _mm512_permutex2var_ps(low, index, high);
    return _mm512_permutexvar_ps(index, low);
  }
};
#endif

template <int BITS>
struct Line {
  vf scale, bias;
  static inline Line open(float scale, float bias) { return {splat(scale), splat(bias)}; }
  inline vf at(vu q) const { return fma(to_float(q & ((1u << BITS) - 1)), scale, bias); }
};

template <bool FIRST, class A, class B>
struct Pick { using type = A; };
template <class A, class B>
struct Pick<false, A, B> { using type = B; };

template <int BITS>
struct Affine {
  static constexpr int bytes = 4 * BITS;
  static constexpr bool has_scale = true, has_bias = true;
#if defined(__AVX512F__)
  using Group = typename Pick<(BITS <= 5), Levels<BITS>, Line<BITS>>::type;
#else
  using Group = Line<BITS>;
#endif
  static inline Group open(float scale, float bias) { return Group::open(scale, bias); }
  static inline void decode(const uint8_t* p, const Group& group, vf* w) {
    vu q[V];
    load_quants<BITS>(p, q);
    for (int v = 0; v < V; v++) w[v] = group.at(q[v]);
  }
};

// Quants of 4 bits come as W low and W high halves of W bytes: `pack` brings x into that order.
template <class G>
static inline void decode_halves(const uint8_t* p, const G& group, vf* w) {
  for (int v = 0; v < V; v += 2) {
    vu both = load_bytes(p + v / 2 * W);
    w[v] = group.at(both);
    w[v + 1] = group.at(both >> 4);
  }
}

template <>
inline void Affine<4>::decode(const uint8_t* p, const Group& group, vf* w) {
  decode_halves(p, group, w);
}

template <>
inline void Affine<8>::decode(const uint8_t* p, const Group& group, vf* w) {
  for (int v = 0; v < V; v++) w[v] = group.at(load_bytes(p + v * W));
}

// E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
struct Fp4 {
  static constexpr int bytes = 16;
  static constexpr bool has_scale = true, has_bias = false;
  struct Group {
    vf scale;
    inline vf at(vu q) const {
#if defined(__AVX512F__)
      return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(q), scale);
#else
      // Twice the magnitudes, as digits.
      vf twice = to_float(splat_u(0xc8643210) >> ((q & 7) << 2) & 15);
      return as_float(as_bits(twice) | (q & 8) << 28) * scale;
#endif
    }
  };
  static inline Group open(float scale, float) {
#if defined(__AVX512F__)
    const vf levels = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return {levels * scale};
#else
    return {splat(scale * 0.5f)};
#endif
  }
  static inline void decode(const uint8_t* p, const Group& group, vf* w) { decode_halves(p, group, w); }
};

// W bytes of E4M3 as floats. There is no infinity; the largest exponent with all mantissa bits is NaN.
static inline vf load_e4m3(const uint8_t* p) {
#if defined(__AVX2__)
  // In a half's place they are worth 2^-8 of it, and its conversion takes subnormals without delay.
  typedef uint16_t vh __attribute__((vector_size(W * 2)));
#if defined(__AVX512F__)
  vh q = reinterpret_cast<vh>(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  vh q = reinterpret_cast<vh>(_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#endif
  vh magnitude = q & 0x7f;
  vh half = magnitude << 7 | (q & 0x80) << 8 | (reinterpret_cast<vh>(magnitude == 0x7f) & 0x7fff);
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(reinterpret_cast<__m256i>(half)) * 256.0f;
#else
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(half)) * 256.0f;
#endif
#else
  vu q = load_bytes(p), magnitude = q & 0x7f;
  vf value = as_float(magnitude << 20 | (q & 0x80) << 24) * 0x1p120f;
  return select(magnitude == 0x7f, splat(__builtin_nanf("")), value);
#endif
}

struct Fp8 {
  static constexpr int bytes = 32;
  static constexpr bool has_scale = true, has_bias = false;
  struct Group {
    vf scale;
  };
  static inline Group open(float scale, float) { return {splat(scale)}; }
  static inline void decode(const uint8_t* p, const Group& group, vf* w) {
    for (int v = 0; v < V; v++) w[v] = load_e4m3(p + v * W) * group.scale;
  }
};

template <class T>
struct Dense {
  static constexpr int bytes = kernels::BLOCK * sizeof(T);
  static constexpr bool has_scale = false, has_bias = false;
  struct Group {};
  static inline Group open(float, float) { return {}; }
  static inline void decode(const uint8_t* p, const Group&, vf* w) {
    for (int v = 0; v < V; v++) w[v] = load(reinterpret_cast<const T*>(p) + v * W);
  }
};

template <class T>
static const float* converted(const T* p, int64_t count, float* space) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(space + i, load(p + i));
  for (; i < count; i++) space[i] = to_scalar(p[i]);
  return space;
}

// `count` scales from `first` on as float32: themselves where they are, else converted into `space`.
static inline const float* scales_from(const void* all, kernels::ScaleType type, int64_t first, int64_t count,
                                       float* space) {
  switch (type) {
    case kernels::SCALE_F32: return static_cast<const float*>(all) + first;
    case kernels::SCALE_F16: return converted(static_cast<const half_t*>(all) + first, count, space);
    case kernels::SCALE_BF16: return converted(static_cast<const bfloat_t*>(all) + first, count, space);
    case kernels::SCALE_E8M0: {
      const uint8_t* p = static_cast<const uint8_t*>(all) + first;
      for (int64_t i = 0; i < count; i++) {
        // 2^(e - 127): a float's own exponent but for the smallest, which is subnormal.
        const uint32_t bits = p[i] ? static_cast<uint32_t>(p[i]) << 23 : 0x400000;
        memcpy(space + i, &bits, 4);
      }
      return space;
    }
    case kernels::NO_SCALE: break;
  }
  return nullptr;
}

}  // namespace ISA
