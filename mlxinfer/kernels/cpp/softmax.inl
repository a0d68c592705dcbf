// Softmax and logsumexp of rows: spans of a row first, then the spans together, in their order.
namespace ISA {

// NaNs are passed over: they come out of the sum.
template <class T>
static inline float largest_of(const T* x, int64_t count) {
  const vf lowest = splat(-__builtin_inff());
  vf largest[4] = {lowest, lowest, lowest, lowest};
  int64_t i = 0;
  for (; i + 4 * W <= count; i += 4 * W)
    for (int k = 0; k < 4; k++) largest[k] = vmax(load(x + i + k * W), largest[k]);
  for (; i + W <= count; i += W) largest[0] = vmax(load(x + i), largest[0]);
  if (i < count) largest[1] = vmax(load_part(x + i, static_cast<int>(count - i), -__builtin_inff()), largest[1]);
  return max_of(vmax(vmax(largest[0], largest[1]), vmax(largest[2], largest[3])));
}

template <class T>
static inline float sum_of_exps(const T* x, int64_t count, float shift) {
  vf sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= count; i += 4 * W)
    for (int k = 0; k < 4; k++) sums[k] += vexp(load(x + i + k * W) - shift);
  for (; i + W <= count; i += W) sums[0] += vexp(load(x + i) - shift);
  if (i < count) sums[1] += vexp(load_part(x + i, static_cast<int>(count - i), -__builtin_inff()) - shift);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

static inline float finite_or_zero(float x) { return x - x == 0 ? x : 0; }

template <class T>
static void partials_of(const kernels::SoftmaxArgs& a, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; at++) {
    const int64_t row = at / a.spans, from = at % a.spans * kernels::SOFTMAX_SPAN, left = a.dim - from;
    const int64_t count = left < kernels::SOFTMAX_SPAN ? left : kernels::SOFTMAX_SPAN;
    const T* x = static_cast<const T*>(a.x.data) + row_start(a.x, row) + from;
    const float largest = largest_of(x, count);
    a.partials[at] = {largest, sum_of_exps(x, count, finite_or_zero(largest))};
  }
}

static inline kernels::Partial whole_row(const kernels::Partial* partials, int64_t spans) {
  kernels::Partial all = {partials[0].largest, 0};
  for (int64_t i = 1; i < spans; i++)
    if (partials[i].largest > all.largest) all.largest = partials[i].largest;
  for (int64_t i = 0; i < spans; i++) {
    // equal infinities have no difference
    const bool same = partials[i].largest == all.largest;
    all.sum += partials[i].sum * (same ? 1.0f : vexp(splat(partials[i].largest - all.largest))[0]);
  }
  return all;
}

template <class T>
static void logsumexp_of(const kernels::SoftmaxArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const kernels::Partial all = whole_row(a.partials + row * a.spans, a.spans);
    from_scalar(__builtin_logf(all.sum) + all.largest, static_cast<T*>(a.y) + row);
  }
}

static void combine(const kernels::SoftmaxArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++)
    a.partials[row * a.spans] = whole_row(a.partials + row * a.spans, a.spans);
}

template <class T>
static void softmax_of(const kernels::SoftmaxArgs& a, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; at++) {
    const int64_t row = at / a.spans, from = at % a.spans * kernels::SOFTMAX_SPAN, left = a.dim - from;
    const int64_t count = left < kernels::SOFTMAX_SPAN ? left : kernels::SOFTMAX_SPAN;
    const T* x = static_cast<const T*>(a.x.data) + row_start(a.x, row) + from;
    T* y = static_cast<T*>(a.y) + row * a.dim + from;
    const kernels::Partial all = a.partials[row * a.spans];
    // an infinite largest element has no differences: the row is NaN, as the formula gives
    const float factor = 1.0f / all.sum + (all.largest - all.largest);
    int64_t i = 0;
    for (; i + W <= count; i += W) store(y + i, vexp(load(x + i) - all.largest) * factor);
    if (const int part = static_cast<int>(count - i))
      store_part(y + i, vexp(load_part(x + i, part) - all.largest) * factor, part);
  }
}

#define FOR_TYPE(function)                                                       \
  [](const kernels::SoftmaxArgs& a, int64_t begin, int64_t end) {                \
    switch (a.type) {                                                            \
      case kernels::F32: return function<float>(a, begin, end);                  \
      case kernels::F16: return function<half_t>(a, begin, end);                 \
      case kernels::BF16: return function<bfloat_t>(a, begin, end);              \
    }                                                                            \
  }

static constexpr kernels::SoftmaxTable softmax_table = {
    FOR_TYPE(partials_of),
    FOR_TYPE(logsumexp_of),
    FOR_TYPE(softmax_of),
    combine,
};

#undef FOR_TYPE

}  // namespace ISA
