// logsumexp and softmax along the last axis.
#include <stdexcept>

#include "bindings.h"
#include "view.h"

namespace kernels {
namespace {

using Axes = std::variant<std::monostate, int, std::vector<int>>;

bool only_last(const Axes& axes, int ndim) {
  if (std::holds_alternative<std::monostate>(axes)) return ndim == 1;
  int axis;
  if (auto* one = std::get_if<int>(&axes)) {
    axis = *one;
  } else if (auto& some = std::get<std::vector<int>>(axes); some.size() == 1) {
    axis = some[0];
  } else {
    return false;
  }
  return ndim > 0 && (axis == -1 || axis == ndim - 1);
}

bool fits(const mx::array& a, const Axes& axes) {
  return type_of(a.dtype()) && a.size() > 0 && only_last(axes, static_cast<int>(a.ndim()));
}

// Runs the kernels over `in`. A row is split between threads by whole spans.
void run(bool logarithm, const mx::array& in, mx::array& out) {
  const RowView x(in);
  const int64_t dim = in.shape(-1), rows = static_cast<int64_t>(in.size()) / dim;
  const int64_t spans = (dim + SOFTMAX_SPAN - 1) / SOFTMAX_SPAN;
  std::vector<Partial> partials(rows * spans);
  const SoftmaxArgs args{x.rows(), out.data<void>(), partials.data(), dim, spans, *type_of(in.dtype())};
  const auto& kernel = table().softmax;
  auto in_parallel = [&](int64_t count, int64_t grain, auto function) {
    parallel_for(count, grain, [&](int64_t begin, int64_t end) { function(args, begin, end); });
  };
  // a span is 3 us of work, and so are this many rows of one
  const int64_t grain = spans > 1 ? 1 : 1 + SOFTMAX_SPAN / dim;
  in_parallel(rows * spans, grain, kernel.partials);
  if (logarithm) {
    in_parallel(rows, 256, kernel.logsumexp);
  } else {
    if (spans > 1) in_parallel(rows, 256, kernel.combine);
    in_parallel(rows * spans, grain, kernel.softmax);
  }
}

mx::array logsumexp(const mx::array& a, const Axes& axes, bool keepdims, mx::StreamOrDevice s) {
  auto stream = cpu_stream(s);
  if (!stream || !fits(a, axes)) {
    if (std::holds_alternative<std::monostate>(axes)) return mx::logsumexp(a, keepdims, s);
    if (auto* one = std::get_if<int>(&axes)) return mx::logsumexp(a, *one, keepdims, s);
    return mx::logsumexp(a, std::get<std::vector<int>>(axes), keepdims, s);
  }
  auto fallback = [keepdims, s](const Arrays& in) -> Arrays { return {mx::logsumexp(in[0], -1, keepdims, s)}; };
  auto evaluate = [](const Arrays& in, Arrays& out) { run(true, in[0], out[0]); };
  auto shapes = [keepdims](const Arrays& in) -> std::vector<mx::Shape> {
    if (in[0].size() == 0) throw std::invalid_argument("[logsumexp] Received empty array.");  // as mlx's own does
    auto shape = in[0].shape();
    shape.pop_back();
    if (keepdims) shape.push_back(1);
    return {shape};
  };
  return make(*stream, shapes({a})[0], a.dtype(), {"LogSumExpCPU", fallback, evaluate, {double(keepdims)}, {}, shapes},
              {a});
}

mx::array softmax(const mx::array& a, const Axes& axes, bool precise, mx::StreamOrDevice s) {
  auto stream = cpu_stream(s);
  if (!stream || !fits(a, axes)) {
    if (std::holds_alternative<std::monostate>(axes)) return mx::softmax(a, precise, s);
    if (auto* one = std::get_if<int>(&axes)) return mx::softmax(a, *one, precise, s);
    return mx::softmax(a, std::get<std::vector<int>>(axes), precise, s);
  }
  auto fallback = [precise, s](const Arrays& in) -> Arrays { return {mx::softmax(in[0], -1, precise, s)}; };
  auto evaluate = [](const Arrays& in, Arrays& out) { run(false, in[0], out[0]); };
  return make(*stream, a.shape(), a.dtype(),
              {"SoftmaxCPU", fallback, evaluate, {double(precise)}, take_over_first, like_first}, {a});
}

}  // namespace

void bind_softmax(nb::module_& m) {
  m.def("logsumexp", &logsumexp, nb::arg(), nb::arg("axis") = nb::none(), nb::arg("keepdims") = false, nb::kw_only(),
        nb::arg("stream") = nb::none());
  m.def("softmax", &softmax, nb::arg(), nb::arg("axis") = nb::none(), nb::kw_only(), nb::arg("precise") = false,
        nb::arg("stream") = nb::none());
}

}  // namespace kernels
