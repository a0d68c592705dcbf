// What the bindings of products share: checking arguments, and running the kernel over them.
#pragma once

#include <memory>

#include "kernel.h"

namespace kernels {

// How mlx's arguments name a quantized product.
struct Quantization {
  std::optional<int> group_size, bits;
  std::string mode;
  bool transpose;
};

// A product the kernels can compute: the weights' format and what the result is.
struct ProductPlan {
  Format format;
  ScaleType scale_type;
  int group;
  mx::Dtype dtype;
};

// nullopt: mlx's own operation has to take the call, or to refuse it. `w` has `w_dims` dimensions.
std::optional<ProductPlan> plan_product(const mx::array& x, const mx::array& w, const mx::array& scales,
                                        const std::optional<mx::array>& biases, const Quantization& how, int w_dims);

// Whether the inputs x, w and, where there are any, scales and biases of a call compiled for any shape still go
// together: only the rows of x, and those of w and what belongs to it, may be others than when the call was planned.
class StillFits {
 public:
  explicit StillFits(const Arrays& inputs);
  bool operator()(const Arrays& inputs) const;

 private:
  std::vector<int> last_;  // every input's last axis
};

// Pointers and sizes of evaluated arrays; the rows of x are still to be packed.
ProductArgs product_args(const ProductPlan& plan, const mx::array& x, const mx::array& w, const mx::array* scales,
                         const mx::array* biases, mx::array& y);

// Rows of x as the kernel reads them: x itself or, where they have to be brought into another order or place, a copy.
class PackedRows {
 public:
  PackedRows(const mx::array& x, const ProductPlan& plan);
  const float* data() const { return data_; }

 private:
  std::unique_ptr<float[]> own_;
  const float* data_;
};

// One matrix of weights or several, as arguments that agree but for the matrix and the rows.
void multiply(const ProductArgs* products, int64_t count);

}  // namespace kernels
