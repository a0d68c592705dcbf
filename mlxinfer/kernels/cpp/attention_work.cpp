#include "attention_work.h"

#include <algorithm>
#include <memory>

#include "tables.h"
#include "threads.h"

namespace kernels {
namespace {

// Work is counted in multiply-adds. Fewer rows than this take as long: the keys and values have to be loaded anyway.
constexpr int64_t LEAST_ROWS = 4;
// Some 4 µs: less isn't worth another thread.
constexpr int64_t LEAST_WORK = 128 * 1024;
constexpr int64_t PARTS_PER_THREAD = 4;
// Tiles of more rows than this are never split by spans, so that the states of all spans stay small.
constexpr int64_t SPLIT_ROWS = 64;

constexpr int64_t ONE_PASS = -1;

struct Item {
  const AttentionArgs* args;
  AttentionTile tile;
  int64_t span;  // or ONE_PASS
  int64_t state;  // where its state lies among the states
  int64_t work;
};

struct Split {
  const AttentionArgs* args;
  AttentionTile tile;
  int64_t spans, state;
};

int64_t rows_of(const AttentionTile& tile) { return tile.end - tile.begin; }

int64_t work_of(const AttentionArgs& a, const AttentionTile& tile, int64_t keys) {
  return std::max(rows_of(tile), LEAST_ROWS) * keys * (a.dim + a.v_dim);
}

// A thread's own memory, kept for its next tile.
float* scratch_of(int64_t floats) {
  static thread_local std::unique_ptr<float[]> memory;
  static thread_local int64_t size = 0;
  constexpr int64_t line = 16;
  if (size < floats) {
    memory.reset(new float[floats + line]);
    size = floats;
  }
  auto at = reinterpret_cast<uintptr_t>(memory.get());
  return memory.get() + (64 - at % 64) % 64 / sizeof(float);
}

void run_item(const Item& item, std::vector<float>& states) {
  const auto& kernel = table().attention;
  float* scratch = scratch_of(kernel.scratch(*item.args, rows_of(item.tile)));
  if (item.span == ONE_PASS) {
    kernel.attend(*item.args, item.tile, scratch);
  } else {
    kernel.attend_span(*item.args, item.tile, item.span, states.data() + item.state, scratch);
  }
}

struct Plan {
  std::vector<Item> items;
  std::vector<Split> splits;
  int64_t states = 0;  // floats

  void add_tile(const AttentionArgs& a, const AttentionTile& tile, int64_t total_work) {
    const int64_t from = seen_from(a, tile.begin / a.group), to = seen_to(a, (tile.end - 1) / a.group);
    const int64_t first = from / ATTENTION_SPAN, last = (to + ATTENTION_SPAN - 1) / ATTENTION_SPAN;
    const int64_t work = work_of(a, tile, std::max<int64_t>(to - from, 1));
    const bool large = threads() > 1 && work * 2 * threads() > total_work && work > LEAST_WORK;
    if (!large || rows_of(tile) > SPLIT_ROWS || last - first < 2) {
      items.push_back({&a, tile, ONE_PASS, 0, work});
      return;
    }
    const int64_t size = table().attention.state(a, rows_of(tile));
    splits.push_back({&a, tile, last - first, states});
    for (int64_t span = first; span < last; span++, states += size)
      items.push_back({&a, tile, span, states, work / (last - first)});
  }
};

template <class F>
void for_each_tile(const std::vector<Attention>& all, const F& f) {
  for (const auto& one : all) {
    const int64_t rows = one.args.queries * one.args.group;
    for (int64_t head = 0; head < one.kv_heads; head++)
      for (int64_t row = 0; row < rows; row += ATTENTION_ROWS)
        f(one.args, AttentionTile{head, row, std::min(rows, row + ATTENTION_ROWS)});
  }
}

// Where to cut the items into runs of about equal work.
std::vector<int64_t> cuts(const std::vector<Item>& items, int64_t total_work) {
  const int64_t parts = std::clamp<int64_t>(total_work / LEAST_WORK, 1, threads() * PARTS_PER_THREAD);
  std::vector<int64_t> out{0};
  int64_t done = 0;
  for (size_t i = 0; i < items.size(); i++) {
    done += items[i].work;
    if (done * parts >= total_work * static_cast<int64_t>(out.size())) out.push_back(i + 1);
  }
  if (out.back() < static_cast<int64_t>(items.size())) out.push_back(items.size());
  return out;
}

}  // namespace

void attend_all(const std::vector<Attention>& all) {
  int64_t total_work = 0;
  for_each_tile(all, [&](const AttentionArgs& a, const AttentionTile& tile) {
    const int64_t from = seen_from(a, tile.begin / a.group), to = seen_to(a, (tile.end - 1) / a.group);
    total_work += work_of(a, tile, std::max<int64_t>(to - from, 1));
  });
  Plan plan;
  for_each_tile(all, [&](const AttentionArgs& a, const AttentionTile& tile) { plan.add_tile(a, tile, total_work); });
  std::vector<float> states(plan.states);
  const auto cut = cuts(plan.items, total_work);
  parallel_for(static_cast<int64_t>(cut.size()) - 1, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = cut[begin]; i < cut[end]; i++) run_item(plan.items[i], states);
  });
  for (const auto& split : plan.splits) {
    float* scratch = scratch_of(table().attention.scratch(*split.args, rows_of(split.tile)));
    table().attention.combine(*split.args, split.tile, split.spans, states.data() + split.state, scratch);
  }
}

}  // namespace kernels
