// The engine's attention step: the new tokens of all sequences, of different lengths, over their own keys.
#include <algorithm>
#include <cstring>
#include <string>

#include "attention_view.h"
#include "attention_work.h"
#include "bindings.h"

#include <nanobind/stl/pair.h>

namespace kernels {
namespace {

using Pair = std::pair<mx::array, mx::array>;

struct Steps {
  std::vector<int> held, lengths;
  float scale;
  int window;  // 0: none
  bool sinks;

  // Inputs are q, k, v, the sinks where there are any, and keys and values of every sequence.
  size_t buffers() const { return sinks ? 4 : 3; }
};

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("[ragged_attention] " + what); }

std::string text(const mx::array& a) {
  std::string out = "(";
  for (int i = 0; i < static_cast<int>(a.ndim()); i++) out += (i ? ", " : "") + std::to_string(a.shape(i));
  return out + ")";
}

void check_rows(const mx::array& q, const mx::array& k, const mx::array& v, const std::optional<mx::array>& sinks) {
  for (const auto* a : {&q, &k, &v}) {
    if (a->ndim() != 4 || a->size() == 0 || a->shape(2) != 1 || a->shape(0) != q.shape(0))
      refuse("q, k and v must be [rows, heads, 1, dim] of the same number of rows, got " + text(q) + ", " + text(k) +
             " and " + text(v));
    if (a->dtype() != q.dtype() || !type_of(a->dtype()))
      refuse("q, k and v must have one dtype: float32, float16 or bfloat16");
  }
  if (q.shape(3) != k.shape(3)) refuse("q and k must have one head dim, got " + text(q) + " and " + text(k));
  if (k.shape(1) != v.shape(1) || q.shape(1) % k.shape(1) != 0)
    refuse("the heads of q must be a multiple of those of k, and v's the same as k's, got " + text(q) + ", " + text(k) +
           " and " + text(v));
  if (sinks && (sinks->ndim() != 1 || sinks->shape(0) != q.shape(1) || !mx::issubdtype(sinks->dtype(), mx::floating)))
    refuse("sinks must be floating [" + std::to_string(q.shape(1)) + "], got " + text(*sinks));
}

void check_buffer(const mx::array& buffer, const mx::array& rows, int held, int length) {
  const bool shape = buffer.ndim() == 4 && buffer.shape(0) == 1 && buffer.shape(1) == rows.shape(1) &&
                     buffer.shape(3) == rows.shape(3);
  if (!shape || buffer.dtype() != rows.dtype())
    refuse("a buffer must be [1, " + std::to_string(rows.shape(1)) + ", capacity, " + std::to_string(rows.shape(3)) +
           "] of the dtype of q, got " + text(buffer));
  if (buffer.shape(2) - held < length)
    refuse("a buffer of " + std::to_string(buffer.shape(2)) + " tokens that holds " + std::to_string(held) +
           " has no room for " + std::to_string(length));
}

void check(const mx::array& q, const mx::array& k, const mx::array& v, const std::vector<Pair>& buffers,
           const std::vector<int>& held, const std::vector<int>& lengths, const std::optional<int>& window,
           const std::optional<mx::array>& sinks) {
  check_rows(q, k, v, sinks);
  if (buffers.size() != lengths.size() || held.size() != lengths.size())
    refuse("buffers, held and lengths must be of one length, got " + std::to_string(buffers.size()) + ", " +
           std::to_string(held.size()) + " and " + std::to_string(lengths.size()));
  if (window && *window < 1) refuse("window must be at least 1, got " + std::to_string(*window));
  int64_t rows = 0;
  for (size_t i = 0; i < lengths.size(); i++) {
    if (lengths[i] < 1) refuse("a sequence must have at least 1 row, got " + std::to_string(lengths[i]));
    if (held[i] < 0) refuse("held must not be negative, got " + std::to_string(held[i]));
    check_buffer(buffers[i].first, k, held[i], lengths[i]);
    check_buffer(buffers[i].second, v, held[i], lengths[i]);
    rows += lengths[i];
  }
  if (rows != q.shape(0))
    refuse("lengths sum to " + std::to_string(rows) + ", but there are " + std::to_string(q.shape(0)) + " rows");
}

// The outputs' shapes. A call compiled for any shape may meet buffers of another capacity, all else has to be the same.
std::vector<mx::Shape> output_shapes(const Arrays& in, const Steps& steps) {
  std::vector<Pair> buffers;
  for (size_t i = steps.buffers(); i + 1 < in.size(); i += 2) buffers.emplace_back(in[i], in[i + 1]);
  check(in[0], in[1], in[2], buffers, steps.held, steps.lengths, std::nullopt,
        steps.sinks ? std::optional(in[3]) : std::nullopt);
  std::vector<mx::Shape> shapes{{in[0].shape(0), in[0].shape(1), 1, in[2].shape(3)}};
  for (size_t i = steps.buffers(); i < in.size(); i++) shapes.push_back(in[i].shape());
  return shapes;
}

// ---- with mlx's operations -------------------------------------------------------------------------------------

// [rows, heads, 1, dim] → [1, heads, rows, dim] of one sequence.
mx::array sequence_of(const mx::array& a, int begin, int length, mx::Stream s) {
  const auto rows = mx::slice(a, {begin, 0, 0, 0}, {begin + length, a.shape(1), 1, a.shape(3)}, s);
  return mx::transpose(rows, {2, 1, 0, 3}, s);
}

mx::array append(const mx::array& buffer, const mx::array& rows, int held, mx::Stream s) {
  const mx::Shape stop{1, buffer.shape(1), held + rows.shape(2), buffer.shape(3)};
  return mx::slice_update(buffer, rows, {0, 0, held, 0}, stop, s);
}

mx::array head_of(const mx::array& buffer, int length, mx::Stream s) {
  return mx::slice(buffer, {0, 0, 0, 0}, {1, buffer.shape(1), length, buffer.shape(3)}, s);
}

mx::array visible(int held, int length, int window, mx::Stream s) {
  const auto queries = mx::expand_dims(mx::arange(held, held + length, s), 1, s);
  const auto keys = mx::expand_dims(mx::arange(0, held + length, s), 0, s);
  const auto causal = mx::less_equal(keys, queries, s);
  if (window == 0) return causal;
  return mx::logical_and(causal, mx::greater(keys, mx::subtract(queries, mx::array(window), s), s), s);
}

Arrays with_mlx(const Arrays& in, const Steps& steps, mx::Stream s) {
  Arrays outs, buffers;
  std::optional<mx::array> sinks;
  if (steps.sinks) sinks = mx::astype(in[3], in[0].dtype(), s);
  int begin = 0;
  for (size_t i = 0; i < steps.lengths.size(); i++) {
    const int length = steps.lengths[i], held = steps.held[i], end = held + length;
    const size_t at = steps.buffers() + 2 * i;
    const auto keys = append(in[at], sequence_of(in[1], begin, length, s), held, s);
    const auto values = append(in[at + 1], sequence_of(in[2], begin, length, s), held, s);
    const auto out = mx::fast::scaled_dot_product_attention(
        sequence_of(in[0], begin, length, s), head_of(keys, end, s), head_of(values, end, s), steps.scale, "array",
        visible(held, length, steps.window, s), sinks, false, s);
    outs.push_back(mx::transpose(out, {2, 1, 0, 3}, s));
    buffers.push_back(keys);
    buffers.push_back(values);
    begin += length;
  }
  Arrays all{mx::concatenate(outs, 0, s)};
  all.insert(all.end(), buffers.begin(), buffers.end());
  return all;
}

// ---- as one kernel ---------------------------------------------------------------------------------------------

// A buffer that nobody else holds is taken over, else copied by `run`: the others go on seeing what they saw.
void allocate(const Arrays& in, Arrays& out, size_t first) {
  // mlx gives every output of a primitive a list of its inputs and clears them once all are evaluated. Until then the
  // lists hold the inputs, and none could be taken over. `in` is the list of the output that mlx goes by.
  const bool listed = std::any_of(out.begin(), out.end(), [&](auto& a) { return &a.inputs() == &in; });
  if (listed && !out[0].is_tracer())
    for (auto& a : out)
      if (&a.inputs() != &in) a.inputs().clear();
  out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
  for (size_t i = 1; i < out.size(); i++) {
    const auto& buffer = in[first + i - 1];
    if (buffer.is_donatable() && buffer.flags().row_contiguous) {
      out[i].copy_shared_buffer(buffer);
    } else {
      out[i].set_data(mx::allocator::malloc(out[i].nbytes()));
    }
  }
}

// Rows [begin, begin + length) → the buffer, from `held` on.
void write_rows(const View& rows, int begin, int length, int held, mx::array& buffer) {
  const int64_t capacity = buffer.shape(2), size = buffer.itemsize(), bytes = buffer.shape(3) * size;
  for (int64_t head = 0; head < buffer.shape(1); head++)
    for (int64_t i = 0; i < length; i++)
      std::memcpy(buffer.data<char>() + (head * capacity + held + i) * bytes,
                  rows.at(begin + i) + head * rows.strides[1] * size, bytes);
}

void update_buffers(const Arrays& in, Arrays& out, const Steps& steps, const View& k, const View& v) {
  const size_t first = steps.buffers();
  std::vector<size_t> copies;
  for (size_t i = 1; i < out.size(); i++)
    if (out[i].data<char>() != in[first + i - 1].data<char>()) copies.push_back(i);
  parallel_for(copies.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) copy_in_order(in[first + copies[i] - 1], out[copies[i]].data<char>());
  });
  int begin = 0;
  for (size_t i = 0; i < steps.lengths.size(); begin += steps.lengths[i++]) {
    write_rows(k, begin, steps.lengths[i], steps.held[i], out[1 + 2 * i]);
    write_rows(v, begin, steps.lengths[i], steps.held[i], out[2 + 2 * i]);
  }
}

void run(const Arrays& in, Arrays& out, const Steps& steps) {
  const View q(in[0]), k(in[1]), v(in[2]);
  update_buffers(in, out, steps, k, v);
  const int64_t heads = in[0].shape(1), kv_heads = in[1].shape(1), size = in[0].itemsize();
  AttentionArgs args{};
  args.dim = in[0].shape(3), args.v_dim = in[2].shape(3), args.group = heads / kv_heads;
  args.q_head = q.strides[1], args.q_row = q.strides[0];
  args.out_head = args.v_dim, args.out_row = heads * args.v_dim;
  args.k_row = args.dim, args.v_row = args.v_dim;
  args.causal = true, args.window = steps.window;
  args.scale = steps.scale, args.type = *type_of(in[0].dtype());
  args.sinks = steps.sinks ? in[3].data<float>() : nullptr;
  std::vector<Attention> all;
  int begin = 0;
  for (size_t i = 0; i < steps.lengths.size(); begin += steps.lengths[i++]) {
    const auto &keys = out[1 + 2 * i], &values = out[2 + 2 * i];
    args.q = q.at(begin), args.out = out[0].data<char>() + begin * args.out_row * size;
    args.k = keys.data<char>(), args.v = values.data<char>();
    args.k_head = keys.shape(2) * args.dim, args.v_head = values.shape(2) * args.v_dim;
    args.queries = steps.lengths[i], args.first = steps.held[i], args.keys = args.first + args.queries;
    all.push_back({args, kv_heads});
  }
  attend_all(all);
}

std::pair<mx::array, std::vector<Pair>> ragged_attention(
    const mx::array& q, const mx::array& k, const mx::array& v, const std::vector<Pair>& buffers,
    const std::vector<int>& held, const std::vector<int>& lengths, float scale, const std::optional<int>& window,
    const std::optional<mx::array>& sinks, mx::StreamOrDevice s) {
  check(q, k, v, buffers, held, lengths, window, sinks);
  const auto stream = mx::to_stream(s);
  const Steps steps{held, lengths, scale, window.value_or(0), sinks.has_value()};
  Arrays inputs{q, k, v};
  if (sinks) inputs.push_back(mx::astype(*sinks, mx::float32, stream));
  for (const auto& [keys, values] : buffers) inputs.insert(inputs.end(), {keys, values});
  Arrays out;
  if (stream.device != mx::Device::cpu) {
    out = with_mlx(inputs, steps, stream);
  } else {
    if (sinks) inputs[3] = rows_in_order(inputs[3], stream);
    const auto shapes = output_shapes(inputs, steps);
    std::vector<double> key{scale, double(steps.window), double(steps.sinks)};
    key.insert(key.end(), held.begin(), held.end());
    key.insert(key.end(), lengths.begin(), lengths.end());
    Call call{"RaggedAttentionCPU",
              [steps, stream](const Arrays& in) { return with_mlx(in, steps, stream); },
              [steps](const Arrays& in, Arrays& out) { run(in, out, steps); },
              key,
              [first = steps.buffers()](const Arrays& in, Arrays& out) { allocate(in, out, first); },
              [steps](const Arrays& in) { return output_shapes(in, steps); }};
    out = make_all(stream, shapes, std::vector<mx::Dtype>(shapes.size(), q.dtype()), call, inputs);
  }
  std::vector<Pair> taken;
  for (size_t i = 1; i + 1 < out.size(); i += 2) taken.emplace_back(out[i], out[i + 1]);
  return {out[0], taken};
}

}  // namespace

void bind_ragged_attention(nb::module_& m) {
  m.def("ragged_attention", &ragged_attention, nb::arg(), nb::arg(), nb::arg(), "buffers"_a, "held"_a, "lengths"_a,
        nb::kw_only(), "scale"_a, "window"_a = nb::none(), "sinks"_a = nb::none(), "stream"_a = nb::none(),
        "One step of a batch of sequences: rows of one token each, [R, H, 1, D], lengths[i] of sequence i after the\n"
        "held[i] tokens that its buffers, keys and values of [1, KH, capacity, D], already hold. Returns the outputs\n"
        "and the buffers with the new tokens, in the memory of the old ones where nobody else holds these.");
}

}  // namespace kernels
