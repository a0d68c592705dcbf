#include "bindings.h"
#include "view.h"

namespace kernels {

static mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::StreamOrDevice s) {
  auto plain = [eps, s](const Arrays& in) -> Arrays {
    return {mx::fast::rms_norm(in[0], in.size() > 1 ? std::optional(in[1]) : std::nullopt, eps, s)};
  };
  Arrays inputs{x};
  if (weight) inputs.push_back(*weight);
  auto stream = cpu_stream(s);
  auto type = type_of(x.dtype());
  const bool fits =
      x.ndim() > 0 && x.size() > 0 &&
      (!weight || (weight->ndim() == 1 && weight->shape(0) == x.shape(-1) && weight->dtype() == x.dtype()));
  if (!stream || !type || !fits) return plain(inputs)[0];
  auto run = [eps, type = *type](const Arrays& in, Arrays& out) {
    const int64_t dim = in[0].shape(-1), rows = in[0].size() / dim;
    const RowView x(in[0]);
    std::optional<RowView> weight;
    if (in.size() > 1) weight.emplace(in[1]);
    NormArgs args{x.rows(), weight ? weight->rows().data : nullptr, out[0].data<void>(), dim, eps, type};
    // 5 us of work
    parallel_for(rows, 1 + 32768 / dim, [&](int64_t begin, int64_t end) { table().norm.rms_norm(args, begin, end); });
  };
  auto shapes = [](const Arrays& in) {
    if (in.size() > 1 && in[1].shape(0) != in[0].shape(-1)) no_longer_fits("rms_norm");
    return like_first(in);
  };
  return make(*stream, x.shape(), x.dtype(), {"RMSNormCPU", plain, run, {eps}, take_over_first, shapes}, inputs);
}

void bind_norm(nb::module_& m) {
  m.def("rms_norm", &rms_norm, nb::arg("x"), nb::arg("weight").none(), nb::arg("eps"), nb::kw_only(),
        nb::arg("stream") = nb::none());
}

}  // namespace kernels
