#pragma once

#include "types.h"

namespace kernels {

struct AttentionTable {};

}  // namespace kernels
