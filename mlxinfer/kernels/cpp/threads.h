// A persistent pool that splits a range over the cores.
#pragma once

#include <cstdint>

namespace kernels {

// How many threads work on one kernel, the calling one included: MLXINFER_THREADS, else the cores this process may use.
int threads();

using RangeFunction = void (*)(const void* context, int64_t begin, int64_t end);

void run_in_parallel(RangeFunction function, const void* context, int64_t count, int64_t grain);

// Call f(begin, end) for pieces of [0, count), each a multiple of `grain` long but the last. Which thread gets which
// piece is left open, so nothing may be summed across pieces. Runs on the calling thread alone when the pool is taken,
// and when there is one piece. f must not throw. A grain is well chosen at 5 us of work.
template <class F>
void parallel_for(int64_t count, int64_t grain, const F& f) {
  run_in_parallel(
      [](const void* context, int64_t begin, int64_t end) { (*static_cast<const F*>(context))(begin, end); }, &f, count,
      grain);
}

}  // namespace kernels
