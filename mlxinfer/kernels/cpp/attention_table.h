#pragma once

#include "types.h"

namespace kernels {

// Keys are taken in blocks of 64 and spans of 256, both counted from key 0 of the array: a row's sums run within a
// block, over the blocks of a span, then over the spans, whatever rows it is computed with and however it is split.
constexpr int64_t ATTENTION_BLOCK = 64;
constexpr int64_t ATTENTION_SPAN = 256;
// Rows that share the loads of keys and values.
constexpr int64_t ATTENTION_ROWS = 96;

enum MaskKind : int { NO_MASK, BOOL_MASK, ADDED_MASK };

// softmax(q k^T * scale + mask) v for one sequence. Strides are in elements; the last axis of q, k, v and out has none.
// What lies in hidden keys and their values, NaN and infinity too, has no part in the result.
struct AttentionArgs {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  const void* mask;    // bool, or `type`
  const float* sinks;  // one logit per query head, or null
  int64_t q_head, q_row, k_head, k_row, v_head, v_row, out_head, out_row;
  int64_t mask_head, mask_row, mask_key;
  int64_t queries, keys, group;  // group: query heads per head of keys
  int64_t dim, v_dim;
  bool causal;
  int64_t first;   // where causal: the position of query 0 among the keys; negative where there are fewer keys
  int64_t window;  // where causal: how many keys up to its own a query sees; 0: all
  float scale;
  MaskKind mask_kind;
  Type type;  // of q, k, v and out
};

// The keys [seen_from, seen_to) that a query sees, the mask array aside.
static inline int64_t seen_from(const AttentionArgs& a, int64_t query) {
  if (!a.causal || a.window == 0) return 0;
  const int64_t from = a.first + query + 1 - a.window;
  return from > 0 ? from : 0;
}
static inline int64_t seen_to(const AttentionArgs& a, int64_t query) {
  if (!a.causal) return a.keys;
  const int64_t to = a.first + query + 1;
  return to < 0 ? 0 : to < a.keys ? to : a.keys;
}

// Rows begin to end of one head of keys: row = query * group + query head within the group.
struct AttentionTile {
  int64_t head, begin, end;
};

struct AttentionTable {
  // How many floats of scratch a tile takes, and how many the state of one span.
  int64_t (*scratch)(const AttentionArgs&, int64_t rows);
  int64_t (*state)(const AttentionArgs&, int64_t rows);
  // The whole of a tile, into out.
  void (*attend)(const AttentionArgs&, const AttentionTile&, float* scratch);
  // One span of it, into a state; and the states of the first `spans` spans, in order, into out.
  void (*attend_span)(const AttentionArgs&, const AttentionTile&, int64_t span, float* state, float* scratch);
  void (*combine)(const AttentionArgs&, const AttentionTile&, int64_t spans, float* states, float* scratch);
};

}  // namespace kernels
