// The helpers of simd.h by themselves.
namespace ISA {

static void probe_exp(const float* x, float* y, int64_t count) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store(y + i, vexp(load(x + i)));
  if (i < count) store_part(y + i, vexp(load_part(x + i, static_cast<int>(count - i))), static_cast<int>(count - i));
}

template <class T>
static void widen(const T* x, float* y, int64_t count, bool lanes) {
  int64_t i = 0;
  if (lanes)
    for (; i + W <= count; i += W) store(y + i, load(x + i));
  for (; i < count; i++) y[i] = to_scalar(x[i]);
}

template <class T>
static void narrow(const float* x, T* y, int64_t count, bool lanes) {
  int64_t i = 0;
  if (lanes)
    for (; i + W <= count; i += W) store(y + i, load(x + i));
  for (; i < count; i++) from_scalar(x[i], y + i);
}

static void probe_widen(kernels::Type type, const void* x, float* y, int64_t count, bool lanes) {
  if (type == kernels::F16) widen(static_cast<const half_t*>(x), y, count, lanes);
  if (type == kernels::BF16) widen(static_cast<const bfloat_t*>(x), y, count, lanes);
}

static void probe_narrow(kernels::Type type, const float* x, void* y, int64_t count, bool lanes) {
  if (type == kernels::F16) narrow(x, static_cast<half_t*>(y), count, lanes);
  if (type == kernels::BF16) narrow(x, static_cast<bfloat_t*>(y), count, lanes);
}

static float probe_sum(const float* x) { return sum(load(x)); }
static float probe_largest(const float* x) { return max_of(load(x)); }

static constexpr kernels::ProbeTable probe_table = {probe_exp, probe_widen, probe_narrow, probe_sum, probe_largest};

}  // namespace ISA
