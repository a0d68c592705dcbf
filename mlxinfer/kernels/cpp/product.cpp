#include "product.h"

#include <memory>
#include <stdexcept>

#include "bindings.h"

namespace kernels {
namespace {

constexpr int64_t MIN_ELEMENTS_TO_SPLIT = 65536;  // elements of x from which on packing is worth another thread

// A row of x is read many times: not with vectors that lie across two lines of the cache, which costs two accesses.
constexpr size_t LINE = 64;

// Memory of this thread that grows to what was asked for and stays; for what is bounded.
float* working_memory(int64_t floats) {
  thread_local std::unique_ptr<float[]> memory;
  thread_local int64_t size = 0;
  if (floats > size) {
    memory.reset(new float[floats]);
    size = floats;
  }
  return memory.get();
}

std::optional<Format> affine_format(int bits) {
  switch (bits) {
    case 2: return AFFINE2;
    case 3: return AFFINE3;
    case 4: return AFFINE4;
    case 5: return AFFINE5;
    case 6: return AFFINE6;
    case 8: return AFFINE8;
  }
  return std::nullopt;
}

bool packs_halves(Format format) { return format == AFFINE4 || format == FP4; }

// The result's, of x times the transpose of w.
mx::Shape product_shape(const mx::array& x, const mx::array& w) {
  mx::Shape shape = x.shape();
  shape.back() = w.shape(0);
  return shape;
}

mx::array quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales,
                           const std::optional<mx::array>& biases, bool transpose, std::optional<int> group_size,
                           std::optional<int> bits, const std::string& mode, mx::StreamOrDevice s) {
  auto plan = plan_product(x, w, scales, biases, {group_size, bits, mode, transpose}, 2);
  auto plain = [=](const Arrays& in) -> Arrays {
    // mlx's own divides by the number of rows
    if (plan && in[0].size() == 0) return {mx::zeros(product_shape(in[0], in[1]), plan->dtype, s)};
    return {mx::quantized_matmul(in[0], in[1], in[2], in.size() > 3 ? std::optional(in[3]) : std::nullopt, transpose,
                                 group_size, bits, mode, s)};
  };
  Arrays inputs{x, w, scales};
  if (biases) inputs.push_back(*biases);
  auto stream = cpu_stream(s);
  if (!stream || !plan) return plain(inputs)[0];
  for (auto& a : inputs) a = rows_in_order(a, *stream);
  auto run = [plan = *plan](const Arrays& in, Arrays& out) {
    PackedRows rows(in[0], plan);
    ProductArgs args = product_args(plan, in[0], in[1], &in[2], in.size() > 3 ? &in[3] : nullptr, out[0]);
    args.x = rows.data();
    multiply(&args, 1);
  };
  const std::vector<double> key{double(plan->format), double(plan->group)};
  auto shapes = [fits = StillFits(inputs)](const Arrays& in) -> std::vector<mx::Shape> {
    if (!fits(in)) no_longer_fits("quantized_matmul");
    return {product_shape(in[0], in[1])};
  };
  return make(*stream, product_shape(x, w), plan->dtype, {"QuantizedMatmulCPU", plain, run, key, {}, shapes}, inputs);
}

mx::array half_matmul(const mx::array& x, const mx::array& w, mx::StreamOrDevice s) {
  auto plain = [s](const Arrays& in) -> Arrays {
    return {mx::matmul(in[0], mx::transpose(mx::astype(in[1], mx::float32, s), s), s)};
  };
  auto stream = cpu_stream(s);
  auto type = type_of(w.dtype());
  const bool fits = x.dtype() == mx::float32 && x.ndim() > 0 && x.size() > 0 && w.ndim() == 2 && w.size() > 0 &&
                    w.shape(1) == x.shape(-1) && w.shape(1) % BLOCK == 0;
  if (!stream || !type || !fits) return plain({x, w})[0];
  const Format format = *type == F32 ? DENSE_F32 : *type == F16 ? DENSE_F16 : DENSE_BF16;
  ProductPlan plan{format, NO_SCALE, w.shape(1), mx::float32};
  auto run = [plan](const Arrays& in, Arrays& out) {
    PackedRows rows(in[0], plan);
    ProductArgs args = product_args(plan, in[0], in[1], nullptr, nullptr, out[0]);
    args.x = rows.data();
    multiply(&args, 1);
  };
  Arrays inputs{rows_in_order(x, *stream), rows_in_order(w, *stream)};
  auto shapes = [fits = StillFits(inputs)](const Arrays& in) -> std::vector<mx::Shape> {
    if (!fits(in)) no_longer_fits("half_matmul");
    return {product_shape(in[0], in[1])};
  };
  return make(*stream, product_shape(x, w), mx::float32,
              {"HalfMatmulCPU", plain, run, {double(format)}, {}, shapes}, inputs);
}

}  // namespace

std::optional<ProductPlan> plan_product(const mx::array& x, const mx::array& w, const mx::array& scales,
                                        const std::optional<mx::array>& biases, const Quantization& how, int w_dims) {
  const bool affine = how.mode == "affine";
  if (!affine && how.mode != "mxfp4" && how.mode != "mxfp8") return std::nullopt;
  const int group = how.group_size.value_or(affine ? 64 : 32), bits = how.bits.value_or(how.mode == "mxfp8" ? 8 : 4);
  auto format = affine ? affine_format(bits) : std::optional(how.mode == "mxfp4" ? FP4 : FP8);
  if (!how.transpose || !format || (group != 32 && (!affine || (group != 64 && group != 128)))) return std::nullopt;
  if (!affine && bits != (*format == FP4 ? 4 : 8)) return std::nullopt;
  const int dims = static_cast<int>(w.ndim());
  if (x.ndim() == 0 || x.shape(-1) == 0 || dims != w_dims || w.size() == 0 || w.dtype() != mx::uint32)
    return std::nullopt;
  const int64_t depth = x.shape(-1);
  if (depth % group || int64_t{w.shape(-1)} * 32 != depth * bits) return std::nullopt;
  mx::Shape per_group = w.shape();
  per_group.back() = static_cast<int>(depth / group);
  if (scales.ndim() == w.ndim() && scales.shape(-1) == per_group.back() && scales.shape() != per_group)
    // mlx's own would read past their end
    throw std::invalid_argument("[quantized product] The weights have other rows than the scales");
  auto x_type = type_of(x.dtype()), scale_type = type_of(scales.dtype());
  if (!x_type || scales.shape() != per_group) return std::nullopt;
  if (!affine) {
    if (biases || scales.dtype() != mx::uint8) return std::nullopt;
    return ProductPlan{*format, SCALE_E8M0, group, x.dtype()};
  }
  if (!scale_type || !biases || biases->shape() != per_group || biases->dtype() != scales.dtype()) return std::nullopt;
  return ProductPlan{*format, static_cast<ScaleType>(*scale_type), group, mx::result_type(x, scales)};
}

StillFits::StillFits(const Arrays& inputs) {
  for (const auto& a : inputs) last_.push_back(a.shape(-1));
}

bool StillFits::operator()(const Arrays& inputs) const {
  const auto& w = inputs[1];
  for (size_t i = 0; i < last_.size(); i++) {
    if (inputs[i].ndim() == 0 || inputs[i].shape(-1) != last_[i]) return false;
    for (int axis = 0; i > 1 && axis + 1 < static_cast<int>(w.ndim()); axis++)
      if (inputs[i].shape(axis) != w.shape(axis)) return false;
  }
  return w.size() > 0;
}

ProductArgs product_args(const ProductPlan& plan, const mx::array& x, const mx::array& w, const mx::array* scales,
                         const mx::array* biases, mx::array& y) {
  ProductArgs args{};
  args.y = y.data<void>();
  args.w = w.data<void>();
  args.scales = scales ? scales->data<void>() : nullptr;
  args.biases = biases ? biases->data<void>() : nullptr;
  args.depth = x.shape(-1);
  args.rows = static_cast<int64_t>(x.size()) / args.depth;
  args.columns = w.shape(-2);
  args.group = plan.group;
  args.format = plan.format;
  args.scale_type = plan.scale_type;
  args.y_type = *type_of(plan.dtype);
  return args;
}

PackedRows::PackedRows(const mx::array& x, const ProductPlan& plan) {
  const int64_t depth = x.shape(-1), rows = static_cast<int64_t>(x.size()) / depth;
  const bool in_place = rows == 1 || reinterpret_cast<uintptr_t>(x.data<void>()) % LINE == 0;
  if (x.dtype() == mx::float32 && !packs_halves(plan.format) && in_place) {
    data_ = x.data<float>();
    return;
  }
  own_.reset(new float[x.size() + LINE / sizeof(float)]);
  float* packed = own_.get() + (-reinterpret_cast<uintptr_t>(own_.get()) % LINE) / sizeof(float);
  data_ = packed;
  PackArgs args{x.data<void>(), *type_of(x.dtype()), packed, depth, plan.format};
  parallel_for(rows, 1 + MIN_ELEMENTS_TO_SPLIT / depth,
               [&](int64_t begin, int64_t end) { table().product.pack(args, begin, end); });
}

void multiply(const ProductArgs* products, int64_t count) {
  if (count == 0) return;
  const ProductTable& product = table().product;
  ProductArgs largest = products[0];
  for (int64_t i = 1; i < count; i++)
    if (products[i].rows > largest.rows) largest.rows = products[i].rows;
  const int64_t columns = largest.columns, block = product.column_block(largest, threads());
  const int64_t memory = product.scratch(largest, block);
  if (count == 1) {
    parallel_for(columns, block, [&](int64_t begin, int64_t end) {
      float* scratch = working_memory(memory);
      for (int64_t at = begin; at < end; at += block)
        product.multiply(products[0], at, at + block < end ? at + block : end, scratch);
    });
    return;
  }
  const int64_t blocks = (columns + block - 1) / block;
  parallel_for(count * blocks, 1, [&](int64_t begin, int64_t end) {
    float* scratch = working_memory(memory);
    for (int64_t i = begin; i < end; i++) {
      const int64_t at = i % blocks * block;
      product.multiply(products[i / blocks], at, at + block < columns ? at + block : columns, scratch);
    }
  });
}

void bind_gather(nb::module_& m);

void bind_product(nb::module_& m) {
  m.def("quantized_matmul", &quantized_matmul, nb::arg(), nb::arg(), nb::arg("scales"), nb::arg("biases") = nb::none(),
        nb::arg("transpose") = true, nb::arg("group_size") = nb::none(), nb::arg("bits") = nb::none(),
        nb::arg("mode") = "affine", nb::kw_only(), nb::arg("stream") = nb::none());
  m.def("half_matmul", &half_matmul, nb::arg(), nb::arg(), nb::kw_only(), nb::arg("stream") = nb::none());
  bind_gather(m);
}

}  // namespace kernels
