// An mlx primitive around a kernel, and what the bindings share.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "tables.h"
#include "threads.h"

namespace kernels {

namespace mx = mlx::core;
using Arrays = std::vector<mx::array>;

// What one call needs. `run` gets evaluated inputs and allocated outputs, on mlx's thread of the stream.
// `fallback` computes the same with mlx's own operations: gradients and vmap go through it.
// `key` tells calls of one name apart, where mx.compile looks for equal ones.
struct Call {
  const char* name;
  std::function<Arrays(const Arrays&)> fallback;
  std::function<void(const Arrays& inputs, Arrays& outputs)> run;
  std::vector<double> key;
  // Optional: gives the outputs their memory, instead of malloc for each; for an output that takes over an input.
  std::function<void(const Arrays& inputs, Arrays& outputs)> allocate = {};
  // What a call compiled for any shape gives for these inputs; throws where they no longer fit. mlx asks before it runs
  // one, and nothing else looks at sizes then: `run` takes them from the arrays, and trusts them.
  std::function<std::vector<mx::Shape>(const Arrays& inputs)> shapes = {};
};

// For `Call::shapes`.
[[noreturn]] void no_longer_fits(const char* what);
inline std::vector<mx::Shape> like_first(const Arrays& inputs) { return {inputs[0].shape()}; }

class Kernel : public mx::Primitive {
 public:
  Kernel(mx::Stream stream, Call call) : Primitive(stream), call_(std::move(call)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override;
  const char* name() const override { return call_.name; }
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override;

 private:
  Call call_;
};

// One output.
mx::array make(mx::Stream stream, mx::Shape shape, mx::Dtype dtype, Call call, Arrays inputs);
// Several.
Arrays make_all(mx::Stream stream, std::vector<mx::Shape> shapes, std::vector<mx::Dtype> dtypes, Call call, Arrays inputs);

// The stream, where it is one of the CPU's; nullopt: the kernels have nothing to do with this call.
std::optional<mx::Stream> cpu_stream(mx::StreamOrDevice s);

// float32, float16 or bfloat16; nullopt for another dtype.
std::optional<Type> type_of(mx::Dtype dtype);

// `a` itself where its elements lie in row order, else a copy that is made when it is evaluated.
mx::array rows_in_order(const mx::array& a, mx::Stream stream);

}  // namespace kernels
