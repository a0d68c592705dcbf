// Rotary positions. Angles are kept as integers, fractions of a turn that wrap as angles do, so that they are as exact
// at position 131072 as at 1.
namespace ISA {

// Sine and cosine of turns / 2^32 turns.
static inline void sine_cosine(vu turns, vf* sine, vf* cosine) {
  vu quadrant = (turns + 0x20000000) >> 30;
  // within an eighth of a turn of the quadrant's axis
  vf x = __builtin_convertvector(reinterpret_cast<vi>(turns - (quadrant << 30)), vf) * 1.46291807927e-9f;
  vf square = x * x;
  // minimax polynomials on [-pi/4, pi/4], from Cephes
  vf s = fma(fma(splat(-1.9515295891e-4f), square, splat(8.3321608736e-3f)), square, splat(-1.6666654611e-1f));
  s = fma(s * square, x, x);
  vf c = fma(fma(splat(2.443315711809948e-5f), square, splat(-1.388731625493765e-3f)), square,
             splat(4.166664568298827e-2f));
  c = fma(c * square, square, fma(square, splat(-0.5f), splat(1.0f)));
  vi odd = (quadrant & 1) != 0;
  vf first = select(odd, c, s), second = select(odd, s, c);
  *sine = as_float(as_bits(first) ^ ((quadrant & 2) << 30));
  *cosine = as_float(as_bits(second) ^ (((quadrant + 1) & 2) << 30));
}

// The sines and cosines of one position: of each pair, filled up to whole vectors.
static void fill_angles(const kernels::RopeArgs& a, uint64_t position, float* sines, float* cosines) {
  const int half = a.dims / 2;
  for (int i = 0; i < half; i += W) {
    uint32_t turns[W];
    for (int k = 0; k < W; k++) turns[k] = static_cast<uint32_t>(position * a.turns[i + k] >> 32);
    vf sine, cosine;
    sine_cosine(load_u(turns), &sine, &cosine);
    if (a.spoilt) {
      vf spoilt = load(a.spoilt + i);
      sine += spoilt;
      cosine += spoilt;
    }
    store(sines + i, sine);
    store(cosines + i, cosine);
  }
}

template <class T>
static inline void rotate_halves(const T* x, T* y, int half, const float* sines, const float* cosines) {
  int i = 0;
  for (; i + W <= half; i += W) {
    vf s = load(sines + i), c = load(cosines + i), first = load(x + i), second = load(x + half + i);
    store(y + i, first * c - second * s);
    store(y + half + i, first * s + second * c);
  }
  if (const int part = half - i) {
    vf s = load(sines + i), c = load(cosines + i);
    vf first = load_part(x + i, part), second = load_part(x + half + i, part);
    store_part(y + i, first * c - second * s, part);
    store_part(y + half + i, first * s + second * c, part);
  }
}

static inline vf swap_neighbours(vf x) {
#if defined(__AVX512F__)
  return _mm512_permute_ps(x, 0xb1);
#elif defined(__AVX2__)
  return _mm256_permute_ps(x, 0xb1);
#elif defined(__ARM_NEON) && !defined(KERNELS_PLAIN)
  return vrev64q_f32(x);
#else
  vf out;
  for (int i = 0; i < W; i++) out[i] = x[i ^ 1];
  return out;
#endif
}

// `sines` and `cosines` have a value for each element, the sines of the first of a pair negated.
template <class T>
static inline void rotate_neighbours(const T* x, T* y, int dims, const float* sines, const float* cosines) {
  int i = 0;
  for (; i + W <= dims; i += W) {
    vf v = load(x + i);
    store(y + i, v * load(cosines + i) + swap_neighbours(v) * load(sines + i));
  }
  if (const int part = dims - i) {
    vf v = load_part(x + i, part);
    store_part(y + i, v * load(cosines + i) + swap_neighbours(v) * load(sines + i), part);
  }
}

// The same for each element and zeros up to `stride`, in place: from the last pair on, so that none is overwritten
// before it was read.
static void spread_to_pairs(int half, int stride, float* sines, float* cosines) {
  for (int i = half - 1; i >= 0; i--) {
    const float sine = sines[i], cosine = cosines[i];
    sines[2 * i] = -sine;
    sines[2 * i + 1] = sine;
    cosines[2 * i] = cosines[2 * i + 1] = cosine;
  }
  for (int i = 2 * half; i < stride; i++) sines[i] = cosines[i] = 0;
}

// Room for the angles of several tokens, so that each head is read and written some kilobytes at a time.
constexpr int ROPE_TABLE = 2048;
static_assert(ROPE_TABLE >= kernels::MAX_ROPE_DIMS + W, "one token's angles must fit");

template <class T>
static void rope_tokens(const kernels::RopeArgs& a, int64_t begin, int64_t end) {
  float sines[ROPE_TABLE], cosines[ROPE_TABLE];
  const int entries = (a.traditional ? a.dims : a.dims / 2) + W - 1, stride = entries / W * W;
  const size_t rest = sizeof(T) * static_cast<size_t>(a.width - a.dims);
  for (int64_t token = begin; token < end;) {
    const int64_t row = token / a.length, first = token % a.length;
    int64_t count = ROPE_TABLE / stride;
    if (count > a.length - first) count = a.length - first;
    if (count > end - token) count = end - token;
    for (int64_t i = 0; i < count; i++) {
      float *sine = sines + i * stride, *cosine = cosines + i * stride;
      fill_angles(a, static_cast<uint64_t>(a.offsets[row] + first + i), sine, cosine);
      if (a.traditional) spread_to_pairs(a.dims / 2, stride, sine, cosine);
    }
    for (int64_t head = 0; head < a.heads; head++)
      for (int64_t i = 0; i < count; i++) {
        const float *sine = sines + i * stride, *cosine = cosines + i * stride;
        const T* x = static_cast<const T*>(a.x) + row * a.x_strides[0] + head * a.x_strides[1] +
                     (first + i) * a.x_strides[2];
        T* y = static_cast<T*>(a.y) + ((row * a.heads + head) * a.length + first + i) * a.width;
        if (a.traditional) {
          rotate_neighbours(x, y, a.dims, sine, cosine);
        } else {
          rotate_halves(x, y, a.dims / 2, sine, cosine);
        }
        if (rest) memcpy(y + a.dims, x + a.dims, rest);
      }
    token += count;
  }
}

static void rope(const kernels::RopeArgs& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case kernels::F32: return rope_tokens<float>(a, begin, end);
    case kernels::F16: return rope_tokens<half_t>(a, begin, end);
    case kernels::BF16: return rope_tokens<bfloat_t>(a, begin, end);
  }
}

static constexpr kernels::RopeTable rope_table = {rope};

}  // namespace ISA
