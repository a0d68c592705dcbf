#include "tables.h"

#include <cstdlib>
#include <cstring>

namespace kernels {

#if defined(__x86_64__)
extern const Table table_avx512, table_avx2, table_base;
#elif defined(__aarch64__)
extern const Table table_neon, table_base;
#else
extern const Table table_base;
#endif

namespace {

bool has(const char* name) {
#if defined(__x86_64__)
  if (!std::strcmp(name, "avx512"))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!std::strcmp(name, "avx2"))
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
  return true;
}

const Table& choose() {
#if defined(__x86_64__)
  const Table* all[] = {&table_avx512, &table_avx2, &table_base};
#elif defined(__aarch64__)
  const Table* all[] = {&table_neon, &table_base};
#else
  const Table* all[] = {&table_base};
#endif
  const char* wanted = std::getenv("MLXINFER_KERNELS_ISA");
  for (const Table* one : all)
    if (wanted && !std::strcmp(wanted, one->name) && has(one->name)) return *one;
  for (const Table* one : all)
    if (has(one->name)) return *one;
  return table_base;
}

}  // namespace

const Table& table() {
  static const Table& chosen = choose();
  return chosen;
}

}  // namespace kernels
