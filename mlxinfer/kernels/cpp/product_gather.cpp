// Products with one of several matrices per entry: the experts of a mixture.
#include <cmath>
#include <limits>

#include "bindings.h"
#include "product.h"

namespace kernels {
namespace {

// The rows of x and y that belong to one matrix after another: those of matrix e are first[e] to first[e + 1].
struct Assignment {
  std::vector<int64_t> first, x_rows, y_rows;
  std::vector<int64_t> invalid;  // rows of y whose indices point outside
};

Assignment assign(const mx::array& lhs, const mx::array& rhs, int64_t batches, int64_t rows, int64_t matrices) {
  const uint32_t* left = lhs.data<uint32_t>();
  const uint32_t* right = rhs.data<uint32_t>();
  const int64_t entries = rhs.size();
  Assignment out{std::vector<int64_t>(matrices + 1), {}, {}, {}};
  auto valid = [&](int64_t i) { return left[i] < batches && right[i] < matrices; };
  for (int64_t i = 0; i < entries; i++)
    if (valid(i)) out.first[right[i] + 1] += rows;
  for (int64_t e = 0; e < matrices; e++) out.first[e + 1] += out.first[e];
  out.x_rows.resize(out.first.back());
  out.y_rows.resize(out.first.back());
  std::vector<int64_t> next = out.first;
  for (int64_t i = 0; i < entries; i++) {
    for (int64_t row = 0; row < rows; row++) {
      if (!valid(i)) {
        out.invalid.push_back(i * rows + row);
        continue;
      }
      const int64_t at = next[right[i]]++;
      out.x_rows[at] = left[i] * rows + row;
      out.y_rows[at] = i * rows + row;
    }
  }
  return out;
}

void fill_with_nan(const ProductArgs& args, const std::vector<int64_t>& rows) {
  for (int64_t row : rows) {
    for (int64_t i = row * args.columns; i < (row + 1) * args.columns; i++) {
      switch (args.y_type) {
        case F32: static_cast<float*>(args.y)[i] = std::numeric_limits<float>::quiet_NaN(); break;
        case F16: static_cast<uint16_t*>(args.y)[i] = 0x7e00; break;
        case BF16: static_cast<uint16_t*>(args.y)[i] = 0x7fc0; break;
      }
    }
  }
}

// Inputs are x, w, scales, lhs_indices, rhs_indices and, if there are any, biases.
void run_gathered(const ProductPlan& plan, const Arrays& in, Arrays& out) {
  const mx::array &x = in[0], &w = in[1], &scales = in[2];
  const int64_t rows = x.shape(-2), matrices = w.shape(0);
  const Assignment assigned =
      assign(in[3], in[4], static_cast<int64_t>(x.size()) / (rows * x.shape(-1)), rows, matrices);
  PackedRows packed(x, plan);
  ProductArgs all = product_args(plan, x, w, &scales, in.size() > 5 ? &in[5] : nullptr, out[0]);
  all.x = packed.data();
  std::vector<ProductArgs> products;
  for (int64_t e = 0; e < matrices; e++) {
    const int64_t first = assigned.first[e], count = assigned.first[e + 1] - first;
    if (count == 0) continue;
    ProductArgs one = all;
    auto part = [e, matrices](const mx::array& a, const void* data) {
      return static_cast<const char*>(data) + static_cast<int64_t>(a.nbytes()) / matrices * e;
    };
    one.w = part(w, all.w);
    one.scales = part(scales, all.scales);
    if (all.biases) one.biases = part(in[5], all.biases);
    one.x_rows = assigned.x_rows.data() + first;
    one.y_rows = assigned.y_rows.data() + first;
    one.rows = count;
    products.push_back(one);
  }
  multiply(products.data(), static_cast<int64_t>(products.size()));
  fill_with_nan(all, assigned.invalid);
}

// One index per batch of `a`, in the shape of its batch dimensions.
mx::array all_batches(const mx::array& a, mx::Stream stream) {
  mx::Shape shape(a.shape().begin(), a.shape().end() - 2);
  int count = 1;
  for (int n : shape) count *= n;
  return mx::reshape(mx::arange(0, count, mx::uint32, stream), shape, stream);
}

// As uint32; what it can't hold becomes its largest number, which is an index of nothing.
mx::array narrow(const mx::array& indices, mx::Stream stream) {
  if (indices.itemsize() < 8) return mx::astype(indices, mx::uint32, stream);
  const mx::array outside(int64_t{UINT32_MAX}, indices.dtype());
  auto within = mx::minimum(indices, outside, stream);
  if (indices.dtype() == mx::int64)
    within = mx::where(mx::less(indices, mx::array(int64_t{0}), stream), outside, within, stream);
  return mx::astype(within, mx::uint32, stream);
}

mx::Shape gathered_shape(const mx::array& x, const mx::array& w, const mx::array& indices) {
  mx::Shape shape = indices.shape();
  shape.push_back(x.shape(-2));
  shape.push_back(w.shape(-2));
  return shape;
}

mx::array gather_qmm(const mx::array& x, const mx::array& w, const mx::array& scales,
                     const std::optional<mx::array>& biases, const std::optional<mx::array>& lhs_indices,
                     const std::optional<mx::array>& rhs_indices, bool transpose, std::optional<int> group_size,
                     std::optional<int> bits, const std::string& mode, const std::optional<mx::array>& global_scale,
                     bool sorted_indices, mx::StreamOrDevice s) {
  auto stream = cpu_stream(s);
  auto plan = plan_product(x, w, scales, biases, {group_size, bits, mode, transpose}, 3);
  auto whole = [](const std::optional<mx::array>& a) { return !a || mx::issubdtype(a->dtype(), mx::integer); };
  if (!stream || !plan || x.ndim() < 2 || global_scale || (!lhs_indices && !rhs_indices) || !whole(lhs_indices) ||
      !whole(rhs_indices))
    return mx::gather_qmm(x, w, scales, biases, lhs_indices, rhs_indices, transpose, group_size, bits, mode,
                          global_scale, sorted_indices, s);
  auto indices_of = [&](const std::optional<mx::array>& given, const mx::array& a) {
    return given ? narrow(*given, *stream) : all_batches(a, *stream);
  };
  auto indices = mx::broadcast_arrays({indices_of(lhs_indices, x), indices_of(rhs_indices, w)}, *stream);
  auto plain = [=, dtype = plan->dtype](const Arrays& in) -> Arrays {
    // mlx's own divides by the number of rows
    if (in[0].size() == 0) return {mx::full(gathered_shape(in[0], in[1], in[3]), NAN, dtype, s)};
    return {mx::gather_qmm(in[0], in[1], in[2], in.size() > 5 ? std::optional(in[5]) : std::nullopt, in[3], in[4],
                           transpose, group_size, bits, mode, std::nullopt, sorted_indices, s)};
  };
  Arrays inputs{x, w, scales, indices[0], indices[1]};
  if (biases) inputs.push_back(*biases);
  auto weights_of = [](const Arrays& in) {
    Arrays out{in[0], in[1], in[2]};
    if (in.size() > 5) out.push_back(in[5]);
    return out;
  };
  auto shapes = [weights_of, fits = StillFits(weights_of(inputs))](const Arrays& in) -> std::vector<mx::Shape> {
    if (!fits(weights_of(in)) || in[3].shape() != in[4].shape()) no_longer_fits("gather_qmm");
    return {gathered_shape(in[0], in[1], in[3])};
  };
  for (auto& a : inputs) a = rows_in_order(a, *stream);
  auto run = [plan = *plan](const Arrays& in, Arrays& out) { run_gathered(plan, in, out); };
  const std::vector<double> key{double(plan->format), double(plan->group)};
  return make(*stream, gathered_shape(x, w, indices[0]), plan->dtype,
              {"GatherQMMCPU", plain, run, key, {}, shapes}, inputs);
}

}  // namespace

void bind_gather(nb::module_& m) {
  m.def("gather_qmm", &gather_qmm, nb::arg(), nb::arg(), nb::arg("scales"), nb::arg("biases") = nb::none(),
        nb::arg("lhs_indices") = nb::none(), nb::arg("rhs_indices") = nb::none(), nb::arg("transpose") = true,
        nb::arg("group_size") = nb::none(), nb::arg("bits") = nb::none(), nb::arg("mode") = "affine",
        nb::arg("global_scale") = nb::none(), nb::kw_only(), nb::arg("sorted_indices") = false,
        nb::arg("stream") = nb::none());
}

}  // namespace kernels
