// Paged attention and KV writes over any folder's simd.h, f32 and bf16 (docs/ops.md, "attention" and "The page").
#pragma once

#include "kernels/shared/rowwise.h"

namespace {

using neoserve::AttentionArgs;
using neoserve::kPartition;
using neoserve::KvLayerArgs;

constexpr int kTiles = kPartition / kBlock;

template <class Element>
struct Pages {
  const KvLayerArgs& kv;
  size_t tile_k(int32_t head, int32_t slot) const {  // first element of the K tile that holds `slot`
    return (static_cast<size_t>(head) * static_cast<size_t>(kv.page_size) +
            static_cast<size_t>(slot / kBlock * kBlock)) *
           static_cast<size_t>(kv.head_dim);
  }
  size_t row_v(int32_t head, int32_t slot) const {
    return (static_cast<size_t>(kv.kv_heads + head) * static_cast<size_t>(kv.page_size) + static_cast<size_t>(slot)) *
           static_cast<size_t>(kv.head_dim);
  }
  Element* base(int32_t position) const {
    const size_t page = static_cast<size_t>(kv.block_table[position / kv.page_size]);
    return reinterpret_cast<Element*>(kv.pages + page * kv.page_stride + kv.layer_offset);
  }
};

static inline void put_v(float* p, F32 x) {
  store(p, x);
}
static inline void put_v(uint16_t* p, F32 x) {
  store_bf16(p, x);
}
static inline F32 get_v(const float* p) {
  return load(p);
}
static inline F32 get_v(const uint16_t* p) {
  return load_bf16(p);
}

template <class Element>
static inline void kv_write_rows(const neoserve::KvWriteArgs& a) {
  const Pages<Element> pages{a.kv};
  const int32_t dim = a.kv.head_dim;
  constexpr size_t run = sizeof(Element) == 2 ? 2 : 1;
  for (int32_t i = 0; i < a.rows; ++i) {
    const int32_t slot = (a.position + i) % a.kv.page_size;
    Element* base = pages.base(a.position + i);
    for (int32_t head = 0; head < a.kv.kv_heads; ++head) {
      const size_t from = static_cast<size_t>(i) * a.stride + static_cast<size_t>(head) * static_cast<size_t>(dim);
      Element* k = base + pages.tile_k(head, slot) + static_cast<size_t>(slot % kBlock) * run;
      Element* v = base + pages.row_v(head, slot);
      for (int32_t d = 0; d < dim; d += kBlock) {
        put_v(v + d, load(a.v + from + static_cast<size_t>(d)));
        Element lanes[kBlock];
        put_v(lanes, load(a.k + from + static_cast<size_t>(d)));
        for (size_t j = 0; j < kBlock; ++j) {
          const size_t at = static_cast<size_t>(d) + j;
          k[at / run * run * kBlock + at % run] = lanes[j];
        }
      }
    }
  }
}

// scores[m][0..16) = scale * q[m] . K of one tile.
template <int M>
static inline void tile_scores(const float* const* q, const float* k, int32_t dim, F32 (&acc)[M]) {
  for (int m = 0; m < M; ++m) acc[m] = zero_f32();
  for (int32_t d = 0; d < dim; ++d) {
    const F32 kd = load(k + static_cast<size_t>(d) * kBlock);
    for (int m = 0; m < M; ++m) acc[m] = fma(set1(q[m][d]), kd, acc[m]);
  }
}

template <int M>
static inline void tile_scores(const float* const* q, const uint16_t* k, int32_t dim, F32 (&acc)[M]) {
  for (int m = 0; m < M; ++m) acc[m] = zero_f32();
  for (int32_t d = 0; d < dim; d += 2) {
    F32 even, odd;
    load_bf16_pairs(k + static_cast<size_t>(d) * kBlock, even, odd);
    for (int m = 0; m < M; ++m) {
      acc[m] = fma(set1(q[m][d]), even, acc[m]);
      acc[m] = fma(set1(q[m][d + 1]), odd, acc[m]);
    }
  }
}

// The visible positions [first, last] of one query row, and its running softmax state.
struct QueryRow {
  const float* q;  // rounded, in scratch
  float* o;        // accumulated output, in scratch
  float* part;     // one partition's output, in scratch
  float* e;        // [kPartition] scores, then exponentials
  int32_t first, last;
  float m, l;
  bool started;
};

template <class Element, int M>
static __attribute__((noinline)) void score_rows(const Element* const* tiles, int first_tile, int end_tile,
                                                 const QueryRow* rows, int32_t dim, float scale) {
  const float* q[M];
  for (int m = 0; m < M; ++m) q[m] = rows[m].q;
  for (int t = first_tile; t < end_tile; ++t) {
    F32 acc[M];
    tile_scores<M>(q, tiles[t], dim, acc);
    for (int m = 0; m < M; ++m) store(rows[m].e + t * kBlock, mul(set1(scale), acc[m]));
  }
}

// part[m] += sum over positions [begin, end) of the partition, in order, of e[m][i] * V[i]; `start`: part[m] is 0
// before.
template <class Element, int M>
static __attribute__((noinline)) void weigh_rows(const Element* const* tiles, int begin, int end, const QueryRow* rows,
                                                 int32_t dim, bool start) {
  for (int32_t d = 0; d < dim; d += kBlock) {
    F32 acc[M];
    for (int m = 0; m < M; ++m) acc[m] = start ? zero_f32() : load(rows[m].part + d);
    for (int i = begin; i < end; ++i) {
      const F32 v = get_v(tiles[i / kBlock] + static_cast<size_t>(i % kBlock) * static_cast<size_t>(dim) + d);
      for (int m = 0; m < M; ++m) acc[m] = fma(set1(rows[m].e[i]), v, acc[m]);
    }
    for (int m = 0; m < M; ++m) store(rows[m].part + d, acc[m]);
  }
}

// weigh_rows over what each row sees, [begin[m], end[m]), and nothing else: a weight of zero would not keep a V that is
// not finite from a row that must not see it. What all rows see goes M at a time, the rest of each row before and
// after.
template <class Element, int M>
static void weigh_visible(const Element* const* tiles, const int (&begin)[M], const int (&end)[M], const QueryRow* rows,
                          int32_t dim) {
  int first = begin[0], last = end[0];
  for (int m = 1; m < M; ++m) {
    first = begin[m] > first ? begin[m] : first;
    last = end[m] < last ? end[m] : last;
  }
  if (first >= last) {
    for (int m = 0; m < M; ++m) weigh_rows<Element, 1>(tiles, begin[m], end[m], rows + m, dim, true);
    return;
  }
  bool start = true;
  for (int m = 0; m < M; ++m) start = start && begin[m] == first;
  for (int m = 0; m < M && !start; ++m) weigh_rows<Element, 1>(tiles, begin[m], first, rows + m, dim, true);
  weigh_rows<Element, M>(tiles, first, last, rows, dim, start);
  for (int m = 0; m < M; ++m) {
    if (last < end[m]) weigh_rows<Element, 1>(tiles, last, end[m], rows + m, dim, false);
  }
}

// Softmax numerators of one row over its visible part [begin, end) of a partition; zero elsewhere in [low, high).
static inline void soften(QueryRow& row, int begin, int end, int low, int high, float& largest, float& sum) {
  const F32 nothing = set1(-__builtin_inff());
  F32 top = nothing;
  for (int t = begin / kBlock; t * kBlock < end; ++t) {
    const F32 s = keep_lanes(load(row.e + t * kBlock), nothing, begin - t * kBlock, end - t * kBlock);
    top = max(top, s);
  }
  largest = largest_lane(top);
  F32 total = zero_f32();
  for (int t = low / kBlock; t * kBlock < high; ++t) {
    const F32 raised = exp(sub(load(row.e + t * kBlock), set1(largest)));
    const F32 kept = keep_lanes(raised, zero_f32(), begin - t * kBlock, end - t * kBlock);
    total = add(total, kept);
    store(row.e + t * kBlock, kept);
  }
  sum = sum_tree(total);
}

static inline void merge(QueryRow& row, float m, float l, int32_t dim) {
  if (!row.started) {
    row.m = m, row.l = l, row.started = true;
    for (int32_t d = 0; d < dim; d += kBlock) store(row.o + d, load(row.part + d));
    return;
  }
  const float n = row.m > m ? row.m : m;
  float weights[kBlock];
  store(weights, exp(sub(load_some(&row.m, 1), set1(n))));
  const float old_weight = weights[0];
  store(weights, exp(sub(load_some(&m, 1), set1(n))));
  const float new_weight = weights[0];
  row.l = __builtin_fmaf(row.l, old_weight, l * new_weight);
  for (int32_t d = 0; d < dim; d += kBlock) {
    store(row.o + d, fma(load(row.o + d), set1(old_weight), mul(load(row.part + d), set1(new_weight))));
  }
  row.m = n;
}

// One partition for M query rows; rows that see nothing of it are left alone.
template <class Element, int M>
static void partition_rows(const AttentionArgs& a, const Element* const* k_tiles, const Element* const* v_tiles,
                           int32_t start, QueryRow* rows) {
  int low = kPartition, high = 0, begin[M], end[M];
  for (int m = 0; m < M; ++m) {
    begin[m] = rows[m].first > start ? rows[m].first - start : 0;
    end[m] = rows[m].last + 1 - start < kPartition ? rows[m].last + 1 - start : kPartition;
    if (begin[m] >= end[m]) continue;
    low = begin[m] < low ? begin[m] : low;
    high = end[m] > high ? end[m] : high;
  }
  if (low >= high) return;
  score_rows<Element, M>(k_tiles, low / kBlock, (high + kBlock - 1) / kBlock, rows, a.kv.head_dim, a.scale);
  float largest[M], sum[M];
  for (int m = 0; m < M; ++m) {
    if (begin[m] < end[m]) soften(rows[m], begin[m], end[m], low, high, largest[m], sum[m]);
  }
  weigh_visible<Element, M>(v_tiles, begin, end, rows, a.kv.head_dim);
  for (int m = 0; m < M; ++m) {
    if (begin[m] < end[m]) merge(rows[m], largest[m], sum[m], a.kv.head_dim);
  }
}

template <class Element>
static inline void prepare_row(const AttentionArgs& a, int32_t index, float* scratch, QueryRow& row) {
  const int32_t dim = a.kv.head_dim, token = index / a.heads, head = index % a.heads;
  const float* q = a.q + static_cast<size_t>(token) * a.q_stride + static_cast<size_t>(head) * static_cast<size_t>(dim);
  float* copy = scratch;
  for (int32_t d = 0; d < dim; d += kBlock) {
    if constexpr (sizeof(Element) == 2) {
      uint16_t rounded[kBlock];
      store_bf16(rounded, load(q + d));
      store(copy + d, load_bf16(rounded));
    } else {
      store(copy + d, load(q + d));
    }
  }
  row.q = copy;
  row.part = scratch + dim;
  row.e = scratch + 2 * dim;
  row.o = a.out + static_cast<size_t>(token) * a.out_stride + static_cast<size_t>(head) * static_cast<size_t>(dim);
  row.last = a.position + token;
  row.first = a.window > 0 && row.last - a.window + 1 > 0 ? row.last - a.window + 1 : 0;
  row.m = row.l = 0;
  row.started = false;
}

template <class Element>
static inline void attention_rows(const AttentionArgs& a) {
  const Pages<Element> pages{a.kv};
  const int32_t dim = a.kv.head_dim, count = a.rows * a.heads;
  const size_t row_floats = static_cast<size_t>(2 * dim + kPartition);
  for (int32_t base = 0; base < count; base += kTileRows) {
    const int32_t group = count - base < kTileRows ? count - base : kTileRows;
    QueryRow rows[kTileRows];
    for (int32_t i = 0; i < group; ++i)
      prepare_row<Element>(a, base + i, a.scratch + static_cast<size_t>(i) * row_floats, rows[i]);
    const int32_t first = rows[0].first, last = rows[group - 1].last;  // positions ascend with the row
    for (int32_t start = first / kPartition * kPartition; start <= last; start += kPartition) {
      const Element *k_tiles[kTiles] = {}, *v_tiles[kTiles] = {};
      const int32_t from = first > start ? (first - start) / kBlock : 0;
      for (int32_t t = from; t < kTiles && start + t * kBlock <= last; ++t) {
        const int32_t position = start + t * kBlock, slot = position % a.kv.page_size;
        const Element* page = pages.base(position);
        k_tiles[t] = page + pages.tile_k(a.kv_head, slot);
        v_tiles[t] = page + pages.row_v(a.kv_head, slot);
      }
      if (group == kTileRows) {
        partition_rows<Element, kTileRows>(a, k_tiles, v_tiles, start, rows);
      } else {
        for (int32_t i = 0; i < group; ++i) partition_rows<Element, 1>(a, k_tiles, v_tiles, start, rows + i);
      }
    }
    for (int32_t i = 0; i < group; ++i) {
      for (int32_t d = 0; d < dim; d += kBlock) store(rows[i].o + d, div(load(rows[i].o + d), set1(rows[i].l)));
    }
  }
}

}  // namespace
