// mx.fast.scaled_dot_product_attention.
#include <variant>

#include "attention_view.h"
#include "attention_work.h"
#include "bindings.h"

namespace kernels {
namespace {

using Mask = std::variant<std::monostate, std::string, mx::array>;

struct Options {
  float scale;
  bool causal, mask, sinks;
};

mx::array plain(const Arrays& in, const Options& o, mx::StreamOrDevice s) {
  return mx::fast::scaled_dot_product_attention(
      in[0], in[1], in[2], o.scale, o.causal ? "causal" : o.mask ? "array" : "",
      o.mask ? std::optional(in[3]) : std::nullopt, o.sinks ? std::optional(in.back()) : std::nullopt, false, s);
}

// Whether the shapes are as they should be, with no mask and no sinks where these are null.
bool shapes_fit(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array* mask,
                const mx::array* sinks) {
  for (const auto* a : {&q, &k, &v})
    if (a->ndim() != 4 || a->size() == 0 || a->shape(0) != q.shape(0)) return false;
  if (q.shape(3) != k.shape(3) || k.shape(1) != v.shape(1) || k.shape(2) != v.shape(2)) return false;
  if (q.shape(1) % k.shape(1) != 0) return false;
  if (sinks && (sinks->ndim() != 1 || sinks->shape(0) != q.shape(1))) return false;
  if (!mask) return true;
  if (mask->ndim() > 4) return false;
  const mx::Shape scores{q.shape(0), q.shape(1), q.shape(2), k.shape(2)};
  for (int i = 1; i <= static_cast<int>(mask->ndim()); i++)
    if (mask->shape(-i) != 1 && mask->shape(-i) != scores[4 - i]) return false;
  return true;
}

// Whether every shape and dtype is as it should be; else mlx has the word.
bool fits(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array* mask,
          const mx::array* sinks) {
  if (!shapes_fit(q, k, v, mask, sinks)) return false;
  const auto dtype = mx::result_type({q, k, v});
  if (!type_of(dtype)) return false;
  for (const auto* a : {mask, sinks})
    if (a && mx::promote_types(a->dtype(), dtype) != dtype) return false;
  return true;
}

// For a call compiled for any shape.
std::vector<mx::Shape> shapes(const Arrays& in, const Options& o) {
  if (!shapes_fit(in[0], in[1], in[2], o.mask ? &in[3] : nullptr, o.sinks ? &in.back() : nullptr))
    no_longer_fits("scaled_dot_product_attention");
  return {{in[0].shape(0), in[0].shape(1), in[0].shape(2), in[2].shape(3)}};
}

// The mask's stride along an axis of the scores, along which it may be repeated.
int64_t mask_stride(const mx::array& mask, int axis) {
  const int own = axis - 4 + static_cast<int>(mask.ndim());
  return own < 0 || mask.shape(own) == 1 ? 0 : mask.strides(own);
}

void run(const Arrays& in, mx::array& out, const Options& o) {
  const auto &q = in[0], &k = in[1], &v = in[2];
  const View queries(q), keys(k), values(v);
  const int size = q.itemsize();
  AttentionArgs args{};
  args.q_head = queries.strides[1], args.q_row = queries.strides[2];
  args.k_head = keys.strides[1], args.k_row = keys.strides[2];
  args.v_head = values.strides[1], args.v_row = values.strides[2];
  args.out_row = v.shape(3), args.out_head = args.out_row * q.shape(2);
  args.queries = q.shape(2), args.keys = k.shape(2), args.group = q.shape(1) / k.shape(1);
  args.dim = q.shape(3), args.v_dim = v.shape(3);
  args.causal = o.causal, args.first = args.keys - args.queries;
  args.scale = o.scale, args.type = *type_of(q.dtype());
  args.sinks = o.sinks ? in.back().data<float>() : nullptr;
  if (o.mask) {
    const auto& mask = in[3];
    args.mask_kind = mask.dtype() == mx::bool_ ? BOOL_MASK : ADDED_MASK;
    args.mask_head = mask_stride(mask, 1), args.mask_row = mask_stride(mask, 2), args.mask_key = mask_stride(mask, 3);
  }
  std::vector<Attention> all;
  for (int b = 0; b < q.shape(0); b++) {
    args.q = queries.at(b), args.k = keys.at(b), args.v = values.at(b);
    args.out = out.data<char>() + b * q.shape(1) * args.out_head * size;
    if (o.mask) args.mask = in[3].data<char>() + b * mask_stride(in[3], 0) * static_cast<int64_t>(in[3].itemsize());
    all.push_back({args, k.shape(1)});
  }
  attend_all(all);
}

mx::array attention(
    const mx::array& q, const mx::array& k, const mx::array& v, float scale, const Mask& mask,
    const std::optional<mx::array>& sinks, bool force_fused, mx::StreamOrDevice s) {
  const auto* name = std::get_if<std::string>(&mask);
  const auto* array = std::get_if<mx::array>(&mask);
  if (name && *name != "causal")
    throw std::invalid_argument(
        "[scaled_dot_product_attention] invalid mask option '" + *name + "'. Must be 'causal', or an array.");
  const Options options{scale, name != nullptr, array != nullptr, sinks.has_value()};
  auto stream = cpu_stream(s);
  if (!stream || force_fused || !fits(q, k, v, array, sinks ? &*sinks : nullptr))
    return mx::fast::scaled_dot_product_attention(
        q, k, v, scale, name ? "causal" : array ? "array" : "", array ? std::optional(*array) : std::nullopt, sinks,
        force_fused, s);
  const auto dtype = mx::result_type({q, k, v});
  Arrays inputs;
  for (const auto& a : {q, k, v}) inputs.push_back(mx::astype(a, dtype, *stream));
  if (array) inputs.push_back(array->dtype() == mx::bool_ ? *array : mx::astype(*array, dtype, *stream));
  // As float32, in order; the fallback takes them back, since mlx wants no wider type than that of the queries.
  if (sinks) inputs.push_back(rows_in_order(mx::astype(*sinks, mx::float32, *stream), *stream));
  auto fallback = [options, dtype, s](const Arrays& in) -> Arrays {
    Arrays typed = in;
    if (options.sinks) typed.back() = mx::astype(typed.back(), dtype, s);
    return {plain(typed, options, s)};
  };
  auto work = [options](const Arrays& in, Arrays& out) { run(in, out[0], options); };
  std::vector<double> key{scale, double(options.causal), double(options.mask), double(options.sinks)};
  auto infer = [options](const Arrays& in) { return shapes(in, options); };
  return make(*stream, infer(inputs)[0], dtype, {"AttentionCPU", fallback, work, key, {}, infer}, inputs);
}

}  // namespace

void bind_ragged_attention(nb::module_& m);

void bind_attention(nb::module_& m) {
  m.def("scaled_dot_product_attention", &attention, "q"_a, "k"_a, "v"_a, nb::kw_only(), "scale"_a,
        "mask"_a = nb::none(), "sinks"_a = nb::none(), "force_fused"_a = false, "stream"_a = nb::none());
  bind_ragged_attention(m);
}

}  // namespace kernels
