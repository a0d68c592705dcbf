// Bindings for the tests of simd.h: eager, over flat arrays.
#include <stdexcept>

#include "bindings.h"

namespace kernels {
namespace {

// Evaluated, flat, of `dtype` and in order; raises for another dtype.
mx::array flat(const mx::array& a, mx::Dtype dtype) {
  if (a.dtype() != dtype) throw std::invalid_argument("an array of another dtype is needed");
  auto in_order = mx::contiguous(mx::flatten(a));
  in_order.eval();
  return in_order;
}

Type half_type(mx::Dtype dtype) {
  auto type = type_of(dtype);
  if (!type || *type == F32) throw std::invalid_argument("float16 or bfloat16 is needed");
  return *type;
}

mx::array exp_of(const mx::array& a) {
  auto x = flat(a, mx::float32);
  std::vector<float> y(x.size());
  table().probe.exp(x.data<float>(), y.data(), y.size());
  return mx::array(y.data(), {static_cast<int>(y.size())}, mx::float32);
}

mx::array widen(const mx::array& bits, mx::Dtype dtype, bool lanes) {
  auto x = flat(bits, mx::uint16);
  std::vector<float> y(x.size());
  table().probe.widen(half_type(dtype), x.data<void>(), y.data(), y.size(), lanes);
  return mx::array(y.data(), {static_cast<int>(y.size())}, mx::float32);
}

mx::array narrow(const mx::array& a, mx::Dtype dtype, bool lanes) {
  auto x = flat(a, mx::float32);
  std::vector<uint16_t> y(x.size());
  table().probe.narrow(half_type(dtype), x.data<float>(), y.data(), y.size(), lanes);
  return mx::array(y.data(), {static_cast<int>(y.size())}, mx::uint16);
}

float over_lanes(const mx::array& a, float (*function)(const float*)) {
  auto x = flat(a, mx::float32);
  if (x.size() != static_cast<size_t>(table().width)) throw std::invalid_argument("one vector is needed");
  return function(x.data<float>());
}

}  // namespace

void bind_probe(nb::module_& m) {
  m.def("lanes", [] { return table().width; }, "How many floats a vector has.");
  m.def("exp_of", &exp_of, "For tests: e^x by the kernels' own function.");
  m.def("widen", &widen, "For tests: uint16 bits of a half type as float32.");
  m.def("narrow", &narrow, "For tests: float32 rounded to the uint16 bits of a half type.");
  m.def("sum_of_lanes", [](const mx::array& a) { return over_lanes(a, table().probe.sum); }, "For tests.");
  m.def("largest_lane", [](const mx::array& a) { return over_lanes(a, table().probe.largest); }, "For tests.");
}

}  // namespace kernels
