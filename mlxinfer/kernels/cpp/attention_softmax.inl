// The softmax of attention: which keys a query sees, the weights of a block, and running sums put together.
#include "attention_tile.inl"

namespace ISA {

using kernels::seen_from;
using kernels::seen_to;

// Per row: out [padded] and sum, both relative to e^maximum. The sum lies in W lanes, which are added at the end only.
struct Running {
  float* out;
  float* maximum;
  float* sum;
};
constexpr int64_t LANES = 16;

static void clear(const Running& r, int64_t rows, int64_t padded) {
  for (int64_t i = 0; i < rows * padded; i++) r.out[i] = 0;
  for (int64_t i = 0; i < rows; i++) r.maximum[i] = -__builtin_inff();
  for (int64_t i = 0; i < rows * LANES; i++) r.sum[i] = 0;
}

// A sink is a logit with a value of zero. NaN or +inf makes the row NaN.
static void begin_with_sinks(
    const kernels::AttentionArgs& a, const kernels::AttentionTile& t, const Running& r, int64_t padded) {
  clear(r, t.end - t.begin, padded);
  if (!a.sinks) return;
  for (int64_t row = t.begin; row < t.end; row++) {
    const float sink = a.sinks[t.head * a.group + row % a.group];
    if (sink == -__builtin_inff()) continue;
    r.maximum[row - t.begin] = sink;
    r.sum[(row - t.begin) * LANES] = 1.0f + (sink - sink);
  }
}

static inline int64_t mask_at(const kernels::AttentionArgs& a, int64_t head, int64_t query, int64_t key) {
  return head * a.mask_head + query * a.mask_row + key * a.mask_key;
}

static bool visible_between(const kernels::AttentionArgs& a, int64_t head, int64_t query, int64_t begin, int64_t end) {
  const uint8_t* mask = static_cast<const uint8_t*>(a.mask) + mask_at(a, head, query, 0);
  for (int64_t key = begin; key < end; key++)
    if (mask[key * a.mask_key]) return true;
  return false;
}

static bool sees_nothing(const kernels::AttentionArgs& a, int64_t head, int64_t query) {
  if (a.mask_kind == kernels::BOOL_MASK) return !visible_between(a, head, query, 0, a.keys);
  return seen_to(a, query) <= seen_from(a, query);
}

static bool any_visible(const kernels::AttentionArgs& a, const kernels::AttentionTile& t, int64_t block, int count) {
  for (int64_t row = t.begin; row < t.end; row++)
    if (visible_between(a, t.head * a.group + row % a.group, row / a.group, block, block + count)) return true;
  return false;
}

// Add the mask to a row of scores, -inf for keys of the block that are hidden; `hidden`, where asked for, says which.
template <class T>
static void apply_mask(
    const kernels::AttentionArgs& a, int64_t head, int64_t query, int64_t block, int count, float* scores,
    uint8_t* hidden) {
  const float none = -__builtin_inff();
  const int64_t from = seen_from(a, query) - block, to = seen_to(a, query) - block;
  if (hidden)
    for (int key = 0; key < count; key++) hidden[key] = key < from || key >= to;
  if (a.mask_kind == kernels::BOOL_MASK) {
    const uint8_t* mask = static_cast<const uint8_t*>(a.mask) + mask_at(a, head, query, block);
    const int64_t stride = a.mask_key;
    if (stride == 1) {
      for (int key = 0; key < count; key++) scores[key] = mask[key] ? scores[key] : none;
    } else {
      for (int key = 0; key < count; key++) scores[key] = mask[key * stride] ? scores[key] : none;
    }
    for (int key = 0; hidden && key < count; key++) hidden[key] = !mask[key * stride];
  } else if (a.mask_kind == kernels::ADDED_MASK) {
    const T* mask = static_cast<const T*>(a.mask) + mask_at(a, head, query, block);
    for (int key = 0; key < count; key++) scores[key] += to_scalar(mask[key * a.mask_key]);
  }
  for (int64_t key = 0; key < from && key < ATTENTION_BLOCK; key++) scores[key] = none;
  for (int64_t key = to > 0 ? to : 0; key < ATTENTION_BLOCK; key++) scores[key] = none;
}

// e^x of a score less the maximum: x is at most 0, or NaN. 2 ulp, and 0 below 2^-125; e^0 is 1.
static inline vf exp_down(vf x) { return x < splat(-86.6f) ? vf{} : exp_normal(x) + (x - x); }

// e^(x - shift) and 1 where they are equal, which it would be but for infinities.
static inline float shrink(float x, float shift) { return x == shift ? 1.0f : exp_down(splat(x - shift))[0]; }

// One row of scores → weights, in place. The running maximum and sum move on; returns by what the running output has
// to be multiplied.
static inline float exponentiate_row(float* scores, float* running_maximum, float* running_sum) {
  vf most = splat(-__builtin_inff());
#pragma GCC unroll 4
  for (int key = 0; key < ATTENTION_BLOCK; key += W) {
    const vf x = load(scores + key);
    most = x > most ? x : most;  // never NaN
  }
  const float before = *running_maximum, here = max_of(most), maximum = here > before ? here : before;
  // -inf - -inf: nothing seen so far, or only scores of -inf
  const float shift = maximum == -__builtin_inff() ? 0.0f : maximum;
  const float factor = shrink(before, shift);
  vf total = load(running_sum) * factor;
#pragma GCC unroll 4
  for (int key = 0; key < ATTENTION_BLOCK; key += W) {
    const vf weight = exp_down(load(scores + key) - shift);
    total += weight;
    store(scores + key, weight);
  }
  store(running_sum, total);
  *running_maximum = maximum;
  return factor;
}

// Scores of a block → weights, with `factor` by what each row's running output has to be multiplied.
template <class T>
static __attribute__((noinline)) void exponentiate(
    const kernels::AttentionArgs& a, const kernels::AttentionTile& t, int64_t block, int count, float* scores,
    float* factor, const Running& r, uint8_t* hidden) {
  int64_t query = t.begin / a.group, head = t.begin % a.group;
  for (int64_t at = 0; at < t.end - t.begin; at++, scores += ATTENTION_BLOCK) {
    apply_mask<T>(a, t.head * a.group + head, query, block, count, scores, hidden);
    factor[at] = exponentiate_row(scores, r.maximum + at, r.sum + at * LANES);
    if (++head == a.group) head = 0, query++;
  }
}

// total = total and part together.
static __attribute__((noinline)) void merge(const Running& total, const Running& part, int64_t rows, int64_t padded) {
  for (int64_t row = 0; row < rows; row++) {
    const float x = total.maximum[row], y = part.maximum[row], maximum = y > x ? y : x;
    const float shift = maximum == -__builtin_inff() ? 0.0f : maximum;
    const vf keep = splat(shrink(x, shift)), take = splat(shrink(y, shift));
    float *out = total.out + row * padded, *sum = total.sum + row * LANES;
    for (int64_t d = 0; d < padded; d += W)
      store(out + d, fma(load(part.out + row * padded + d), take, load(out + d) * keep));
    store(sum, fma(load(part.sum + row * LANES), take, load(sum) * keep));
    total.maximum[row] = maximum;
  }
}

}  // namespace ISA
