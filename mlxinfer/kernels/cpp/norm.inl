// RMS norm.
namespace ISA {

template <class T>
static inline float sum_of_squares(const T* x, int64_t dim) {
  // four sums, for the latency of the additions
  vf squares[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= dim; i += 4 * W)
    for (int k = 0; k < 4; k++) {
      vf v = load(x + i + k * W);
      squares[k] = fma(v, v, squares[k]);
    }
  for (; i + W <= dim; i += W) {
    vf v = load(x + i);
    squares[0] = fma(v, v, squares[0]);
  }
  if (i < dim) {
    vf v = load_part(x + i, static_cast<int>(dim - i));
    squares[1] = fma(v, v, squares[1]);
  }
  return sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
}

template <class T>
static void rms_norm_rows(const kernels::NormArgs& a, int64_t begin, int64_t end) {
  const int64_t whole = a.dim / W * W;
  const int part = static_cast<int>(a.dim - whole);
  const T* weight = static_cast<const T*>(a.weight);
  for (int64_t row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(a.x.data) + row_start(a.x, row);
    T* y = static_cast<T*>(a.y) + row * a.dim;
    const float factor = 1.0f / __builtin_sqrtf(sum_of_squares(x, a.dim) / static_cast<float>(a.dim) + a.eps);
    for (int64_t i = 0; i < whole; i += W) {
      vf v = load(x + i) * factor;
      store(y + i, weight ? v * load(weight + i) : v);
    }
    if (part) {
      vf v = load_part(x + whole, part) * factor;
      store_part(y + whole, weight ? v * load_part(weight + whole, part) : v, part);
    }
  }
}

static void rms_norm(const kernels::NormArgs& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case kernels::F32: return rms_norm_rows<float>(a, begin, end);
    case kernels::F16: return rms_norm_rows<half_t>(a, begin, end);
    case kernels::BF16: return rms_norm_rows<bfloat_t>(a, begin, end);
  }
}

static constexpr kernels::NormTable norm_table = {rms_norm};

}  // namespace ISA
