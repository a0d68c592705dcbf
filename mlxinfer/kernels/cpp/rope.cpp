#include <cmath>
#include <limits>
#include <memory>
#include <mutex>

#include "bindings.h"
#include "view.h"

namespace kernels {
namespace {

using Offset = std::variant<int, mx::array>;
using GivenOffset = std::variant<bool, int, double, mx::array>;

// What one position turns each pair by (see RopeArgs).
struct Frequencies {
  explicit Frequencies(int pairs)
      : turns((pairs + ROPE_PADDING - 1) / ROPE_PADDING * ROPE_PADDING), spoilt(turns.size()) {}

  void set(int pair, double inverse_frequency, double scale) {
    const double turn = inverse_frequency * scale / (2 * M_PI), part = turn - std::floor(turn);
    if (!std::isfinite(turn)) {
      spoilt[pair] = std::numeric_limits<float>::quiet_NaN();
      any_spoilt = true;
    } else if (part < 1) {  // a tiny negative turn is 1 away from -1, once rounded
      turns[pair] = static_cast<uint64_t>(part * 0x1p64);
    }
  }

  std::vector<uint64_t> turns;
  std::vector<float> spoilt;
  bool any_spoilt = false;
};

std::shared_ptr<const Frequencies> from_base(int dims, float base, float scale) {
  auto made = std::make_shared<Frequencies>(dims / 2);
  for (int i = 0; i < dims / 2; i++) made->set(i, std::pow(static_cast<double>(base), -2.0 * i / dims), scale);
  return made;
}

// The same again for every layer of a model: the last few are kept.
std::shared_ptr<const Frequencies> cached(int dims, float base, float scale) {
  struct Entry {
    int dims = 0;
    float base = 0, scale = 0;
    std::shared_ptr<const Frequencies> made;
  };
  static std::mutex mutex;
  static Entry entries[8];
  static int next = 0;
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& e : entries)
    if (e.dims == dims && e.base == base && e.scale == scale) return e.made;
  auto& e = entries[next++ % 8];
  e = {dims, base, scale, from_base(dims, base, scale)};
  return e.made;
}

Frequencies from_array(const mx::array& freqs, float scale) {
  Frequencies made(freqs.shape(0));
  for (int i = 0; i < freqs.shape(0); i++)
    made.set(i, 1.0 / static_cast<double>(freqs.data<float>()[i * freqs.strides(0)]), scale);
  return made;
}

struct Options {
  int dims;
  bool traditional;
  std::optional<float> base;
  float scale;
};

// Inputs are x, then the offsets where they are an array, then the frequencies where they are given.
mx::array plain(const Arrays& in, const Options& o, std::optional<int> offset, mx::StreamOrDevice s) {
  const size_t given = offset ? 1 : 2;
  auto freqs = in.size() > given ? std::optional(in[given]) : std::nullopt;
  if (offset) return mx::fast::rope(in[0], o.dims, o.traditional, o.base, o.scale, *offset, freqs, s);
  return mx::fast::rope(in[0], o.dims, o.traditional, o.base, o.scale, in[1], freqs, s);
}

bool fits(const mx::array& x, const Options& o, const Offset& offset, const std::optional<mx::array>& freqs) {
  if (x.ndim() < 3 || x.size() == 0 || !type_of(x.dtype())) return false;
  if (o.dims < 2 || o.dims % 2 || o.dims > x.shape(-1) || o.dims > MAX_ROPE_DIMS) return false;
  if (freqs.has_value() == o.base.has_value() || (o.base && !(*o.base > 0 && std::isfinite(*o.base)))) return false;
  if (freqs && (freqs->ndim() != 1 || freqs->shape(0) != o.dims / 2 || freqs->dtype() != mx::float32)) return false;
  if (auto* array = std::get_if<mx::array>(&offset)) {
    if (array->ndim() > 1 || (array->size() != 1 && array->size() != static_cast<size_t>(x.shape(0)))) return false;
    return array->dtype() == mx::int32 || (mx::issubdtype(array->dtype(), mx::integer) && array->itemsize() != 4);
  }
  return true;
}

// What a compiled call for any shape can change after `fits`.
std::vector<mx::Shape> shapes(const Arrays& in, const Options& o, bool offset_array, size_t freqs) {
  const bool enough = in[0].ndim() >= 3 && o.dims <= in[0].shape(-1) && (freqs == 0 || in.back().size() == freqs) &&
                      (!offset_array || in[1].size() == 1 || in[1].size() == static_cast<size_t>(in[0].shape(0)));
  if (!enough) no_longer_fits("rope");
  return like_first(in);
}

void run(const mx::array& x, const std::vector<int64_t>& offsets, const Options& o, const Frequencies& f,
         mx::array& y) {
  const int last = static_cast<int>(x.ndim()) - 1;
  // Heads in several axes, or elements apart from each other, are rare enough for a copy.
  const bool direct = x.ndim() <= 4 && (x.strides(last) == 1 || x.shape(last) == 1);
  std::optional<RowView> view;
  RopeArgs a;
  a.batch = x.shape(0);
  a.length = x.shape(last - 1);
  a.width = x.shape(last);
  a.heads = static_cast<int64_t>(x.size()) / (a.batch * a.length * a.width);
  if (direct) {
    a.x = x.data<void>();
    a.x_strides[0] = x.strides(0);
    a.x_strides[1] = x.ndim() == 4 ? x.strides(1) : 0;
    a.x_strides[2] = x.strides(last - 1);
  } else {
    view.emplace(x, RowView::Packed{});
    a.x = view->rows().data;
    a.x_strides[0] = a.heads * a.length * a.width;
    a.x_strides[1] = a.length * a.width;
    a.x_strides[2] = a.width;
  }
  a.y = y.data<void>();
  a.dims = o.dims;
  a.traditional = o.traditional;
  a.offsets = offsets.data();
  a.turns = f.turns.data();
  a.spoilt = f.any_spoilt ? f.spoilt.data() : nullptr;
  a.type = *type_of(x.dtype());
  // 5 us of work
  parallel_for(a.batch * a.length, 1 + 24576 / (a.heads * a.width),
               [&](int64_t begin, int64_t end) { table().rope.rope(a, begin, end); });
}

// mlx takes what isn't an int for an array, and refuses that by its dtype.
Offset as_offset(const GivenOffset& given) {
  if (auto* number = std::get_if<int>(&given)) return *number;
  if (auto* flag = std::get_if<bool>(&given)) return mx::array(*flag);
  if (auto* real = std::get_if<double>(&given)) return mx::array(static_cast<float>(*real));
  return std::get<mx::array>(given);
}

mx::array rope(const mx::array& x, int dims, bool traditional, std::optional<float> base, float scale,
               const GivenOffset& given, const std::optional<mx::array>& freqs, mx::StreamOrDevice s) {
  const Offset offset = as_offset(given);
  const Options o{dims, traditional, base, scale};
  const auto fixed = std::holds_alternative<int>(offset) ? std::optional(std::get<int>(offset)) : std::nullopt;
  Arrays inputs{x};
  if (!fixed) inputs.push_back(std::get<mx::array>(offset));
  if (freqs) inputs.push_back(*freqs);
  auto stream = cpu_stream(s);
  if (!stream || !fits(x, o, offset, freqs)) return plain(inputs, o, fixed, s);
  if (!fixed && inputs[1].dtype() != mx::int32) inputs[1] = mx::astype(inputs[1], mx::int32, *stream);
  std::shared_ptr<const Frequencies> shared = base ? cached(dims, *base, scale) : nullptr;
  auto evaluate = [o, fixed, shared](const Arrays& in, Arrays& out) {
    std::vector<int64_t> offsets(in[0].shape(0), fixed.value_or(0));
    if (!fixed)
      for (size_t i = 0; i < offsets.size(); i++)
        offsets[i] = in[1].data<int32_t>()[in[1].size() > 1 ? static_cast<int64_t>(i) * in[1].strides(0) : 0];
    run(in[0], offsets, o, shared ? *shared : from_array(in.back(), o.scale), out[0]);
  };
  auto infer = [o, fixed, pairs = freqs ? dims / 2 : 0](const Arrays& in) { return shapes(in, o, !fixed, pairs); };
  auto fallback = [o, fixed, s](const Arrays& in) -> Arrays { return {plain(in, o, fixed, s)}; };
  std::vector<double> key{double(dims), double(traditional), base.value_or(0), scale, double(fixed.value_or(0)),
                          double(fixed.has_value()), double(freqs.has_value())};
  return make(*stream, x.shape(), x.dtype(), {"RoPECPU", fallback, evaluate, key, {}, infer}, inputs);
}

}  // namespace

void bind_rope(nb::module_& m) {
  m.def("rope", &rope, nb::arg("a"), nb::arg("dims"), nb::kw_only(), nb::arg("traditional"), nb::arg("base").none(),
        nb::arg("scale"), nb::arg("offset"), nb::arg("freqs") = nb::none(), nb::arg("stream") = nb::none());
}

}  // namespace kernels
