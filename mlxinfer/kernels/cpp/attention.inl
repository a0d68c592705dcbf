// Attention over blocks of keys with a running maximum and sum (online softmax).
#include "attention_softmax.inl"

namespace ISA {

static inline int64_t padded_dim(int64_t dim) { return (dim + 15) / 16 * 16; }

// What a tile works in.
struct Scratch {
  float* q;        // [rows, dim], times the scale
  float* keys;     // [dim, 64]
  float* values;   // [64, padded]
  float* weights;  // [rows, 64]
  float* factor;   // [rows]
  Running span, total;
};

static int64_t attention_state(const kernels::AttentionArgs& a, int64_t rows) {
  return rows * (padded_dim(a.v_dim) + 1 + LANES);
}

static int64_t attention_scratch(const kernels::AttentionArgs& a, int64_t rows) {
  return rows * (a.dim + ATTENTION_BLOCK + 1) + (a.dim + padded_dim(a.v_dim)) * ATTENTION_BLOCK +
         2 * attention_state(a, rows);
}

static Running running(const kernels::AttentionArgs& a, int64_t rows, float* p) {
  float* maximum = p + rows * padded_dim(a.v_dim);
  return {p, maximum, maximum + rows};
}

static Scratch carve(const kernels::AttentionArgs& a, int64_t rows, float* p) {
  Scratch s;
  s.keys = p;
  s.values = s.keys + a.dim * ATTENTION_BLOCK;
  s.weights = s.values + padded_dim(a.v_dim) * ATTENTION_BLOCK;
  s.span = running(a, rows, s.weights + rows * ATTENTION_BLOCK);
  s.total = running(a, rows, s.span.out + attention_state(a, rows));
  s.factor = s.total.out + attention_state(a, rows);
  s.q = s.factor + rows;
  return s;
}

template <class T>
static void take_queries(const kernels::AttentionArgs& a, const kernels::AttentionTile& t, float* q) {
  for (int64_t row = t.begin; row < t.end; row++, q += a.dim) {
    const T* x = static_cast<const T*>(a.q) + (t.head * a.group + row % a.group) * a.q_head + row / a.group * a.q_row;
    copy_rows(x, 0, 1, a.dim, q, a.dim);
    for (int64_t d = 0; d < a.dim; d++) q[d] *= a.scale;
  }
}

// The block's values as floats in whole vectors: where they lie, or copied. `hidden` is of a tile of one row.
template <class T>
static const float* take_values(
    const kernels::AttentionArgs& a, const T* v, int count, const uint8_t* hidden, float* copy, int64_t* stride) {
  bool whole = a.v_dim == padded_dim(a.v_dim);
  for (int key = 0; hidden && key < count; key++) whole = whole && !hidden[key];
  if constexpr (sizeof(T) == sizeof(float)) {
    *stride = a.v_row;
    if (whole) return v;
  }
  *stride = padded_dim(a.v_dim);
  copy_rows(v, a.v_row, count, a.v_dim, copy, *stride);
  for (int key = 0; hidden && key < count; key++)
    for (int64_t d = 0; hidden[key] && d < a.v_dim; d++) copy[key * *stride + d] = 0;
  return copy;
}

// One span into s.span. A row alone takes zeros for hidden values; rows of a tile, which hide different keys, multiply
// them by a weight of zero, which is the same but for inf and NaN: finish sees to these.
template <class T>
static __attribute__((noinline)) void span_rows(
    const kernels::AttentionArgs& a, const kernels::AttentionTile& t, int64_t span, const Scratch& s) {
  const int64_t rows = t.end - t.begin;
  clear(s.span, rows, padded_dim(a.v_dim));
  const int64_t begin = span * kernels::ATTENTION_SPAN, end = begin + kernels::ATTENTION_SPAN;
  const int64_t from = seen_from(a, t.begin / a.group), to = seen_to(a, (t.end - 1) / a.group);
  for (int64_t block = begin; block < end; block += ATTENTION_BLOCK) {
    if (block + ATTENTION_BLOCK <= from || block >= to) continue;
    const int count = static_cast<int>(a.keys - block < ATTENTION_BLOCK ? a.keys - block : ATTENTION_BLOCK);
    if (a.mask_kind == kernels::BOOL_MASK && !any_visible(a, t, block, count)) continue;
    const T* k = static_cast<const T*>(a.k) + t.head * a.k_head + block * a.k_row;
    score_block(s.q, rows, a.dim, k, a.k_row, count, s.keys, s.weights);
    uint8_t hidden[ATTENTION_BLOCK];
    exponentiate<T>(a, t, block, count, s.weights, s.factor, s.span, rows == 1 ? hidden : nullptr);
    int64_t stride;
    const T* v = static_cast<const T*>(a.v) + t.head * a.v_head + block * a.v_row;
    const float* values = take_values(a, v, count, rows == 1 ? hidden : nullptr, s.values, &stride);
    weigh_block(s.weights, s.factor, rows, values, stride, count, s.span.out, padded_dim(a.v_dim));
  }
}

// What mlx gives for a query that sees nothing: equal weights on every value.
template <class T>
static void mean_of_values(const kernels::AttentionArgs& a, int64_t head, T* out) {
  const T* v = static_cast<const T*>(a.v) + head * a.v_head;
  for (int64_t d = 0; d < a.v_dim; d++) {
    float total = 0;
    for (int64_t key = 0; key < a.keys; key++) total += to_scalar(v[key * a.v_row + d]);
    from_scalar(total / static_cast<float>(a.keys), out + d);
  }
}

// Divide by the sums, into out. False: row `row` has a NaN or infinity that may come from a hidden value.
template <class T>
static __attribute__((noinline)) bool finish_row(
    const kernels::AttentionArgs& a, const kernels::AttentionTile& t, int64_t row, const Running& r) {
  const int64_t at = row - t.begin, query = row / a.group, head = t.head * a.group + row % a.group;
  T* out = static_cast<T*>(a.out) + head * a.out_head + query * a.out_row;
  const float total = sum(load(r.sum + at * LANES));
  if (r.maximum[at] == -__builtin_inff() && total == 0 && sees_nothing(a, head, query)) {
    mean_of_values(a, t.head, out);
    return true;
  }
  const float* x = r.out + at * padded_dim(a.v_dim);
  const float factor = 1.0f / total;
  const int64_t whole = a.v_dim / W * W;
  vf difference = {};
  for (int64_t d = 0; d < whole; d += W) {
    const vf y = load(x + d) * factor;
    difference += y - y;
    store(out + d, y);
  }
  float rest = sum(difference);
  for (int64_t d = whole; d < a.v_dim; d++) {
    const float y = x[d] * factor;
    rest += y - y;
    from_scalar(y, out + d);
  }
  return rest == 0;
}

template <class T>
static void attend_rows(const kernels::AttentionArgs& a, const kernels::AttentionTile& t, float* scratch);

template <class T>
static void finish(const kernels::AttentionArgs& a, const kernels::AttentionTile& t, const Running& r, float* after) {
  for (int64_t row = t.begin; row < t.end; row++)
    if (!finish_row<T>(a, t, row, r) && t.end - t.begin > 1) attend_rows<T>(a, {t.head, row, row + 1}, after);
}

template <class T>
static void attend_rows(const kernels::AttentionArgs& a, const kernels::AttentionTile& t, float* scratch) {
  const int64_t rows = t.end - t.begin;
  const Scratch s = carve(a, rows, scratch);
  take_queries<T>(a, t, s.q);
  begin_with_sinks(a, t, s.total, padded_dim(a.v_dim));
  const int64_t from = seen_from(a, t.begin / a.group), to = seen_to(a, (t.end - 1) / a.group);
  for (int64_t span = from / kernels::ATTENTION_SPAN; span * kernels::ATTENTION_SPAN < to; span++) {
    span_rows<T>(a, t, span, s);
    merge(s.total, s.span, rows, padded_dim(a.v_dim));
  }
  finish<T>(a, t, s.total, scratch + attention_scratch(a, rows));
}

template <class T>
static void combine_rows(
    const kernels::AttentionArgs& a, const kernels::AttentionTile& t, int64_t spans, float* states,
    float* scratch) {
  const int64_t rows = t.end - t.begin;
  const Running total = running(a, rows, scratch);
  begin_with_sinks(a, t, total, padded_dim(a.v_dim));
  for (int64_t i = 0; i < spans; i++)
    merge(total, running(a, rows, states + i * attention_state(a, rows)), rows, padded_dim(a.v_dim));
  finish<T>(a, t, total, scratch + attention_scratch(a, rows));
}

template <class T>
static void attend_one_span(
    const kernels::AttentionArgs& a, const kernels::AttentionTile& t, int64_t span, float* state, float* scratch) {
  Scratch s = carve(a, t.end - t.begin, scratch);
  s.span = running(a, t.end - t.begin, state);
  take_queries<T>(a, t, s.q);
  span_rows<T>(a, t, span, s);
}

static void attend(const kernels::AttentionArgs& a, const kernels::AttentionTile& t, float* scratch) {
  switch (a.type) {
    case kernels::F32: return attend_rows<float>(a, t, scratch);
    case kernels::F16: return attend_rows<half_t>(a, t, scratch);
    case kernels::BF16: return attend_rows<bfloat_t>(a, t, scratch);
  }
}

static void attend_span(
    const kernels::AttentionArgs& a, const kernels::AttentionTile& t, int64_t span, float* state, float* scratch) {
  switch (a.type) {
    case kernels::F32: return attend_one_span<float>(a, t, span, state, scratch);
    case kernels::F16: return attend_one_span<half_t>(a, t, span, state, scratch);
    case kernels::BF16: return attend_one_span<bfloat_t>(a, t, span, state, scratch);
  }
}

static void combine(
    const kernels::AttentionArgs& a, const kernels::AttentionTile& t, int64_t spans, float* states,
    float* scratch) {
  switch (a.type) {
    case kernels::F32: return combine_rows<float>(a, t, spans, states, scratch);
    case kernels::F16: return combine_rows<half_t>(a, t, spans, states, scratch);
    case kernels::BF16: return combine_rows<bfloat_t>(a, t, spans, states, scratch);
  }
}

// With room for a row that is computed again on its own.
static int64_t attention_scratch_in_all(const kernels::AttentionArgs& a, int64_t rows) {
  return attention_scratch(a, rows) + attention_scratch(a, 1);
}

static constexpr kernels::AttentionTable attention_table = {
    attention_scratch_in_all, attention_state, attend, attend_span, combine,
};

}  // namespace ISA
