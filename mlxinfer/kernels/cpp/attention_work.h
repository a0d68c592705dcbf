// How attention is split over the threads.
#pragma once

#include <vector>

#include "attention_table.h"

namespace kernels {

// One sequence with all its heads of keys.
struct Attention {
  AttentionArgs args;
  int64_t kv_heads;
};

// Computes all of them. The split into tiles and spans follows the work; results don't depend on it.
void attend_all(const std::vector<Attention>& all);

}  // namespace kernels
