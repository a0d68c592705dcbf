// RMS norm.
namespace ISA {

template <class T>
static void rms_norm_rows(const kernels::NormArgs& a, int64_t begin, int64_t end) {
  const int64_t whole = a.dim / W * W;
  const int part = static_cast<int>(a.dim - whole);
  const T* weight = static_cast<const T*>(a.weight);
  for (int64_t row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(a.x) + row * a.dim;
    T* y = static_cast<T*>(a.y) + row * a.dim;
    vf squares = {};
    for (int64_t i = 0; i < whole; i += W) {
      vf v = load(x + i);
      squares = fma(v, v, squares);
    }
    if (part) {
      vf v = load_part(x + whole, part);
      squares = fma(v, v, squares);
    }
    const float factor = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(a.dim) + a.eps);
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
