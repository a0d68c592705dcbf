#include "kernel.h"

#include <algorithm>
#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/transforms.h"

namespace kernels {

void Kernel::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  if (call_.allocate) {
    call_.allocate(inputs, outputs);
  } else {
    for (auto& out : outputs) out.set_data(mx::allocator::malloc(out.nbytes()));
  }
  // Compiled calls may meet shapes that the bindings would not have handed to a kernel.
  if (std::all_of(outputs.begin(), outputs.end(), [](auto& a) { return a.size() == 0; })) return;
  Arrays in, out;
  in.reserve(inputs.size());
  out.reserve(outputs.size());
  // Weak copies, as mlx's own operations hold them: mlx keeps the data until the task has run.
  for (auto& a : inputs) in.push_back(mx::array::unsafe_weak_copy(a));
  for (auto& a : outputs) out.push_back(mx::array::unsafe_weak_copy(a));
  auto& encoder = mx::cpu::get_command_encoder(stream());
  encoder.dispatch(
      [run = call_.run, in = std::move(in), out = std::move(out)]() mutable { run(in, out); });
}

void Kernel::eval_gpu(const Arrays&, Arrays&) { throw std::runtime_error("mlxinfer's kernels run on the CPU only"); }

// The fallback as a function of the inputs in `argnums` alone: the others may be integers.
static std::function<Arrays(const Arrays&)> partial(
    const std::function<Arrays(const Arrays&)>& fallback, const Arrays& primals, const std::vector<int>& argnums) {
  return [fallback, primals, argnums](const Arrays& some) {
    Arrays all = primals;
    for (size_t i = 0; i < argnums.size(); i++) all[argnums[i]] = some[i];
    return fallback(all);
  };
}

static Arrays pick(const Arrays& all, const std::vector<int>& argnums) {
  Arrays out;
  for (int i : argnums) out.push_back(all[i]);
  return out;
}

Arrays Kernel::jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) {
  return mx::jvp(partial(call_.fallback, primals, argnums), pick(primals, argnums), tangents).second;
}

Arrays Kernel::vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums, const Arrays&) {
  return mx::vjp(partial(call_.fallback, primals, argnums), pick(primals, argnums), cotangents).second;
}

std::pair<Arrays, std::vector<int>> Kernel::vmap(const Arrays& inputs, const std::vector<int>& axes) {
  auto outputs = mx::vmap(call_.fallback, axes)(inputs);
  return {outputs, std::vector<int>(outputs.size(), 0)};
}

bool Kernel::is_equivalent(const mx::Primitive& other) const {
  auto* kernel = dynamic_cast<const Kernel*>(&other);
  return kernel && std::string(call_.name) == kernel->call_.name && call_.key == kernel->call_.key;
}

std::vector<mx::Shape> Kernel::output_shapes(const Arrays& inputs) {
  return call_.shapes ? call_.shapes(inputs) : Primitive::output_shapes(inputs);
}

void no_longer_fits(const char* what) {
  throw std::invalid_argument(std::string("[") + what + "] The inputs no longer fit the call that was compiled.");
}

mx::array make(mx::Stream stream, mx::Shape shape, mx::Dtype dtype, Call call, Arrays inputs) {
  return mx::array(std::move(shape), dtype, std::make_shared<Kernel>(stream, std::move(call)), std::move(inputs));
}

Arrays make_all(
    mx::Stream stream, std::vector<mx::Shape> shapes, std::vector<mx::Dtype> dtypes, Call call, Arrays inputs) {
  return mx::array::make_arrays(
      std::move(shapes), dtypes, std::make_shared<Kernel>(stream, std::move(call)), std::move(inputs));
}

std::optional<mx::Stream> cpu_stream(mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  if (stream.device != mx::Device::cpu) return std::nullopt;
  return stream;
}

std::optional<Type> type_of(mx::Dtype dtype) {
  if (dtype == mx::float32) return F32;
  if (dtype == mx::float16) return F16;
  if (dtype == mx::bfloat16) return BF16;
  return std::nullopt;
}

mx::array rows_in_order(const mx::array& a, mx::Stream stream) {
  // Weights are there already: no need to put an operation before every call.
  if (a.is_available() && a.data_shared_ptr() && a.flags().row_contiguous) return a;
  return mx::contiguous(a, false, stream);
}

}  // namespace kernels
