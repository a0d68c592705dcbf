// Vectors of the instruction set this file is compiled for: 16 floats with AVX-512, 8 with AVX2, 4 with NEON or in
// plain C++.
//
// Included only by isa.cpp, which is compiled once per instruction set, each time in a namespace of its own (ISA).
// Nothing under isa.cpp may use a container or another template of the standard library: the linker keeps one copy of
// such a function for the whole extension, and it could be the one with instructions this processor doesn't have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && !defined(KERNELS_PLAIN)
#include <arm_neon.h>
#endif

#include "tables.h"

namespace ISA {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef float vf_any __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(W * 4), aligned(1), may_alias));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef uint16_t vh_any __attribute__((vector_size(W * 2), aligned(2), may_alias));

static inline vf splat(float x) { return x - vf{}; }
static inline vu splat_u(uint32_t x) { return x - vu{}; }
static inline vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
static inline void store(float* p, vf x) { *reinterpret_cast<vf_any*>(p) = x; }
static inline vu load_u(const void* p) { return *reinterpret_cast<const vu_any*>(p); }
static inline vf as_float(vu x) { return reinterpret_cast<vf>(x); }
static inline vu as_bits(vf x) { return reinterpret_cast<vu>(x); }
static inline vi as_signed(vu x) { return reinterpret_cast<vi>(x); }
static inline vf to_float(vu x) { return __builtin_convertvector(reinterpret_cast<vi>(x), vf); }
static inline vf select(vi yes, vf a, vf b) { return yes ? a : b; }
static inline vu select(vi yes, vu a, vu b) { return yes ? a : b; }
// The larger; b where either is NaN. With what was found so far as b, NaNs in a are passed over.
static inline vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return select(a > b, a, b);
#endif
}
// The smaller; b where either is NaN.
static inline vf vmin(vf a, vf b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return select(a < b, a, b);
#endif
}

// a * b + c. The compiler contracts it where the instruction set can.
static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON) && !defined(KERNELS_PLAIN)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// The sum of the lanes, always in the same order: halves onto each other.
static inline float sum(vf x) {
  float lanes[W];
  store(lanes, x);
  for (int width = W / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

#if defined(__clang__) || __GNUC__ >= 12
#define KERNELS_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define KERNELS_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

// The largest lane. NaNs may be passed over or come out: look for them elsewhere.
static inline float max_of(vf x) {
  vf y = x;
#if defined(__AVX512F__)
  y = KERNELS_SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x = y > x ? y : x;
  y = KERNELS_SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x = y > x ? y : x;
  y = KERNELS_SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  x = y > x ? y : x;
  y = KERNELS_SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#elif defined(__AVX2__)
  y = KERNELS_SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
  x = y > x ? y : x;
  y = KERNELS_SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
  x = y > x ? y : x;
  y = KERNELS_SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
#else
  y = KERNELS_SHUFFLE(x, x, 2, 3, 0, 1);
  x = y > x ? y : x;
  y = KERNELS_SHUFFLE(x, x, 1, 0, 3, 2);
#endif
  x = y > x ? y : x;
  return x[0];
}

// e^x to 2 ulp where that is a normal number; anything elsewhere.
static inline vf exp_normal(vf x) {
  // n = round(x / ln 2), by the rounding of an addition at 1.5 * 2^23, which leaves n in the last bits of `shifted`
  const vf magic = splat(12582912.0f);
  const vf shifted = fma(x, splat(1.44269504f), magic);
  const vf n = shifted - magic;
  vf r = fma(n, splat(-0.693145752f), x);
  r = fma(n, splat(-1.42860677e-6f), r);
  vf p = splat(1.98756910e-4f);
  p = fma(p, r, splat(1.39819994e-3f));
  p = fma(p, r, splat(8.33345205e-3f));
  p = fma(p, r, splat(4.16657962e-2f));
  p = fma(p, r, splat(1.66666657e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r * r, r + 1.0f);
  // p * 2^n by way of the exponent
  return as_float(as_bits(p) + (as_bits(shifted) << 23));
}

// e^x to 2 ulp. -inf gives 0, +inf and what overflows inf, NaN NaN; results below 2^-126 are 0.
static inline vf vexp(vf x) {
  const vf low = splat(-87.33654f), high = splat(88.72283f);
  vf y = exp_normal(vmin(vmax(x, low), high));  // NaN becomes low
  y = select(x > high, splat(__builtin_inff()), y);
  y = select(x < low, vf{}, y);
  return select(x == x, y, x);
}

// ---- half precision -----------------------------------------------------------------------------------------

struct half_t { uint16_t bits; };
struct bfloat_t { uint16_t bits; };

static inline float to_scalar(float x) { return x; }
static inline float to_scalar(bfloat_t x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
static inline float to_scalar(half_t x) {
  uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  float out;
  if (rest >= 0x7c00) {
    uint32_t bits = sign | 0x7f800000 | (rest << 13 & 0x7fffff);
    memcpy(&out, &bits, 4);
    return out;
  }
  // exact for subnormals too: the exponent is moved by a multiplication
  uint32_t bits = rest << 13;
  memcpy(&out, &bits, 4);
  out *= 0x1p112f;
  memcpy(&bits, &out, 4);
  bits |= sign;
  memcpy(&out, &bits, 4);
  return out;
}

static inline void from_scalar(float x, float* out) { *out = x; }
static inline void from_scalar(float x, bfloat_t* out) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  out->bits = x == x ? static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)
                     : static_cast<uint16_t>(bits >> 16 | 0x40);
}
static inline void from_scalar(float x, half_t* out) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) {
    out->bits = static_cast<uint16_t>(sign | 0x7e00);
  } else if (rest >= 0x47800000) {
    out->bits = static_cast<uint16_t>(sign | 0x7c00);
  } else if (rest < 0x38800000) {
    // subnormal: the addition rounds at the place of its last bit
    float value;
    memcpy(&value, &rest, 4);
    value += 0.5f;
    memcpy(&rest, &value, 4);
    out->bits = static_cast<uint16_t>(sign | (rest - 0x3f000000));
  } else {
    uint32_t rounded = rest + 0xfff + (rest >> 13 & 1);
    out->bits = static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
  }
}

static inline vu load_wide(const void* p) {
  return __builtin_convertvector(vh(*static_cast<const vh_any*>(p)), vu);
}
static inline void store_narrow(void* p, vu x) { *static_cast<vh_any*>(p) = __builtin_convertvector(x, vh); }

static inline vf load(const bfloat_t* p) { return as_float(load_wide(p) << 16); }
static inline void store(bfloat_t* p, vf x) {
  vu bits = as_bits(x);
  store_narrow(p, select(x == x, bits + 0x7fff + (bits >> 16 & 1), bits | 0x400000) >> 16);
}
static inline vf load(const half_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__ARM_NEON) && !defined(KERNELS_PLAIN)
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
#else
  vu wide = load_wide(p), rest = wide & 0x7fff, sign = (wide & 0x8000) << 16;
  vu finite = as_bits(as_float(rest << 13) * 0x1p112f);
  return as_float(sign | select(as_signed(rest) >= 0x7c00, rest << 13 | 0x7f800000, finite));
#endif
}
static inline void store(half_t* p, vf x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__ARM_NEON) && !defined(KERNELS_PLAIN)
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x)));
#else
  vu bits = as_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  // as from_scalar does it
  vu small = as_bits(as_float(rest) + 0.5f) - 0x3f000000;
  vu normal = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
  vu out = select(as_signed(rest) < 0x38800000, small, normal);
  out = select(as_signed(rest) >= 0x47800000, splat_u(0x7c00), out);
  out = select(as_signed(rest) > 0x7f800000, splat_u(0x7e00), out);
  store_narrow(p, sign | out);
#endif
}

// ---- parts of a vector: `count` < W elements, the other lanes are `rest` --------------------------------------

#if defined(__AVX512F__)
static inline vf load_part(const float* p, int count, float rest = 0) {
  return _mm512_mask_loadu_ps(splat(rest), static_cast<__mmask16>((1u << count) - 1), p);
}
static inline void store_part(float* p, vf x, int count) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), x);
}
#endif
template <class T>
static inline vf load_part(const T* p, int count, float rest = 0) {
  float lanes[W];
  for (int i = 0; i < W; i++) lanes[i] = i < count ? to_scalar(p[i]) : rest;
  return load(lanes);
}
template <class T>
static inline void store_part(T* p, vf x, int count) {
  float lanes[W];
  store(lanes, x);
  for (int i = 0; i < count; i++) from_scalar(lanes[i], p + i);
}

}  // namespace ISA
