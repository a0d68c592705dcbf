#pragma once

#include "types.h"

namespace kernels {

struct ActivationTable {};

}  // namespace kernels
