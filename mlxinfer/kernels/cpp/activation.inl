// Gated activations: f(gate) * x.
namespace ISA {

// g * sigmoid(u), with NaN for g = u = -inf as the product has it.
static inline vf times_sigmoid(vf g, vf u) { return g / (vexp(-u) + 1.0f); }

struct Silu {
  static inline vf of(vf g) { return times_sigmoid(g, g); }
};

// The tanh approximation: (1 + tanh(u)) / 2 is the sigmoid of 2u, with u = sqrt(2 / pi) * (g + 0.044715 g^3).
struct Gelu {
  static inline vf of(vf g) { return times_sigmoid(g, g * fma(g * g, splat(0.0713548163f), splat(1.59576912f))); }
};

template <class F, class T>
static void gate_elements(const kernels::GateArgs& a, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end;) {
    const int64_t row = at / a.dim, column = at % a.dim;
    const int64_t count = a.dim - column < end - at ? a.dim - column : end - at;
    const T* gate = static_cast<const T*>(a.gate.data) + row_start(a.gate, row) + column;
    const T* x = static_cast<const T*>(a.x.data) + row_start(a.x, row) + column;
    T* y = static_cast<T*>(a.y) + at;
    int64_t i = 0;
    for (; i + W <= count; i += W) store(y + i, F::of(load(gate + i)) * load(x + i));
    if (const int part = static_cast<int>(count - i))
      store_part(y + i, F::of(load_part(gate + i, part)) * load_part(x + i, part), part);
    at += count;
  }
}

template <class F>
static void gate_of(const kernels::GateArgs& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case kernels::F32: return gate_elements<F, float>(a, begin, end);
    case kernels::F16: return gate_elements<F, half_t>(a, begin, end);
    case kernels::BF16: return gate_elements<F, bfloat_t>(a, begin, end);
  }
}

static constexpr kernels::ActivationTable activation_table = {gate_of<Silu>, gate_of<Gelu>};

}  // namespace ISA
