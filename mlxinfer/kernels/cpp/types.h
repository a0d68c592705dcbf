#pragma once

#include <cstddef>
#include <cstdint>

namespace kernels {

enum Type : int { F32 = 0, F16 = 1, BF16 = 2 };

}  // namespace kernels
