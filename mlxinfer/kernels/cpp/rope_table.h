#pragma once

#include "types.h"

namespace kernels {

struct RopeTable {};

}  // namespace kernels
