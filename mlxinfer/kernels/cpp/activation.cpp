#include "bindings.h"
#include "view.h"

namespace kernels {
namespace {

// f(in[0]) * in[1] with mlx's operations, as mlx.nn and mlx_lm write them.
Arrays plain_silu_mul(const Arrays& in, mx::StreamOrDevice s) {
  return {mx::multiply(mx::multiply(in[0], mx::sigmoid(in[0], s), s), in[1], s)};
}

Arrays plain_gelu_mul(const Arrays& in, mx::StreamOrDevice s) {
  const auto& g = in[0];
  auto number = [&](float value) { return mx::array(value, g.dtype()); };
  auto cubic = mx::multiply(number(0.044715f), mx::multiply(g, mx::multiply(g, g, s), s), s);
  auto inner = mx::tanh(mx::multiply(number(0.7978845608f), mx::add(g, cubic, s), s), s);
  auto gelu = mx::multiply(mx::multiply(number(0.5f), g, s), mx::add(number(1), inner, s), s);
  return {mx::multiply(gelu, in[1], s)};
}

using Plain = Arrays (*)(const Arrays&, mx::StreamOrDevice);
using Gate = void (*)(const GateArgs&, int64_t, int64_t);

mx::array gate(const char* name, const mx::array& g, const mx::array& x, Plain plain, Gate ActivationTable::*kernel,
               mx::StreamOrDevice s) {
  auto stream = cpu_stream(s);
  auto type = type_of(g.dtype());
  const bool fits = g.ndim() > 0 && g.size() > 0 && g.shape() == x.shape() && g.dtype() == x.dtype();
  if (!stream || !type || !fits) return plain({g, x}, s)[0];
  auto run = [kernel, type = *type](const Arrays& in, Arrays& out) {
    const RowView g(in[0]), x(in[1]);
    const int64_t size = in[0].size();
    const bool flat = in[0].flags().row_contiguous && in[1].flags().row_contiguous;
    GateArgs args{g.rows(), x.rows(), out[0].data<void>(), flat ? size : in[0].shape(-1), type};
    // 5 us of work
    parallel_for(size, 16384, [&](int64_t begin, int64_t end) { (table().activation.*kernel)(args, begin, end); });
  };
  auto fallback = [plain, s](const Arrays& in) { return plain(in, s); };
  auto shapes = [name](const Arrays& in) {
    if (in[0].shape() != in[1].shape()) no_longer_fits(name);
    return like_first(in);
  };
  return make(*stream, g.shape(), g.dtype(), {name, fallback, run, {}, take_over_first, shapes}, {g, x});
}

mx::array silu_mul(const mx::array& g, const mx::array& x, mx::StreamOrDevice s) {
  return gate("SiluMulCPU", g, x, plain_silu_mul, &ActivationTable::silu_mul, s);
}

mx::array gelu_mul(const mx::array& g, const mx::array& x, mx::StreamOrDevice s) {
  return gate("GeluMulCPU", g, x, plain_gelu_mul, &ActivationTable::gelu_mul, s);
}

}  // namespace

void bind_activation(nb::module_& m) {
  m.def("silu_mul", &silu_mul, nb::arg("gate"), nb::arg("x"), nb::kw_only(), nb::arg("stream") = nb::none(),
        "silu(gate) * x.");
  m.def("gelu_mul", &gelu_mul, nb::arg("gate"), nb::arg("x"), nb::kw_only(), nb::arg("stream") = nb::none(),
        "gelu(gate) * x, by the approximation with tanh.");
}

}  // namespace kernels
