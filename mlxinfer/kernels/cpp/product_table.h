#pragma once

#include "types.h"

namespace kernels {

struct ProductTable {};

}  // namespace kernels
