// The contract of every op that has kernel rows: arguments, row tables, packed layouts. docs/ops.md holds the
// arithmetic and its order; every row gives the reference's bits (rows marked `relaxed` alone are exempt).
// Included by kernel folders: plain structs only, nothing with a linkage of its own.
#pragma once

#include <cstddef>
#include <cstdint>

namespace neoserve {

enum class WeightKind : uint8_t { kF32, kBf16, kInt8Channel, kInt8Group, kInt4Group };
enum class ScaleType : uint8_t { kF16, kF32 };
enum class Offset : uint8_t { kNone, kZero, kMinimum };

struct WeightFormat {
  WeightKind kind;
  ScaleType scale_type;  // of scales and minimums; kF32 for int8 per channel
  Offset offset;
  int32_t group;  // values of K per scale; 0 for kinds without groups
};

// Where value (n, k) of a weight lies. Outputs come in blocks of 16, padded with zeros; K is padded with zeros.
// The suffix is the number of consecutive k held together per output.
//   k1: f32 [N/16][K][16]
//   k2: bf16 [N/16][K/2][16][2]
//   k4: int8 [N/16][K/4][16][4];   int4: bytes [N/16][K/8][16][4], low nibble k..k+3, high nibble k+4..k+7
//   k8: int8 [N/16][K/8][16][8];   int4: bytes [N/16][K/16][16][8], low nibble k..k+7, high nibble k+8..k+15
// Group scales, minimums (scale_type) and zeros (uint8): [N/16][K/group][16]. Channel scales: f32 [N/16][16].
enum class Layout : uint8_t { kK1, kK2, kK4, kK8 };

constexpr int kBlock = 16;       // outputs per block, tokens per tile, lanes of every fixed-shape reduction
constexpr int kPartition = 256;  // absolute positions per attention partition
constexpr float kSmallestQuantized =
    1e-36f;  // int8: a largest value below it quantises to zeros, since 127 / largest overflows

struct LinearArgs {
  WeightFormat format;
  const void* x;          // [rows][k] f32, bf16 or int8
  size_t x_stride;        // bytes from row to row
  const float* x_scales;  // [rows] or [rows][groups]; null for f32 and bf16
  const int32_t* x_sums;  // sums of the quantised x, same shape
  size_t x_groups;        // scales per row
  const void* weights;
  const void* scales;
  const void* offsets;  // minimums or zeros, or null
  const float* bias;    // [n] or null
  float* out;           // [rows][out_stride]
  size_t out_stride;
  int32_t rows, n, k;  // k as padded in the layout
  int32_t block_begin, block_end;
  bool accumulate;
};

struct RmsNormArgs {
  const float* x;
  size_t x_stride;
  const float* weight;  // [width]
  float* out;
  size_t out_stride;
  int32_t row_begin, row_end, columns, width;
  float epsilon;
};

struct QuantizeArgs {
  const float* x;
  size_t x_stride;
  void* out;          // bf16 or int8
  size_t out_stride;  // bytes
  float* scales;
  int32_t* sums;
  size_t groups;  // scales per row
  int32_t row_begin, row_end, columns, padded_columns;
  int32_t group;  // int8: values per scale (= columns: per token); unused for bf16
};

struct RopeArgs {
  float* x;
  size_t x_stride;
  const float* table;  // [rows][dim]: dim / 2 cosines, then dim / 2 sines
  int32_t row_begin, row_end, heads, head_dim, dim;
};

struct GatedArgs {  // silu_mul, gelu_tanh_mul
  const float* x;   // [rows][2 * columns]: gate, then up
  size_t x_stride;
  float* out;
  size_t out_stride;
  int32_t row_begin, row_end, columns;
};

struct AddArgs {
  float* x;
  size_t x_stride;
  const float* y;
  size_t y_stride;
  int32_t row_begin, row_end, columns;
};

// One layer's K and V inside the pages of a group (docs/ops.md, "The page").
struct KvLayerArgs {
  uint8_t* pages;
  size_t page_stride;          // bytes from page to page
  size_t layer_offset;         // bytes of the layer's first K inside a page
  const int32_t* block_table;  // pages of one sequence
  int32_t page_size, kv_heads, head_dim;
};

struct KvWriteArgs {
  KvLayerArgs kv;
  const float* k;  // rows of one sequence: row i is position `position` + i
  const float* v;
  size_t stride;
  int32_t position, rows;
};

// Query rows [0, rows) of one sequence at positions position + i, the heads of one KV head.
struct AttentionArgs {
  KvLayerArgs kv;
  const float* q;  // first query row, first head of the group
  size_t q_stride;
  float* out;
  size_t out_stride;
  float* scratch;          // attention_scratch_floats(rows * heads, head_dim)
  int32_t kv_head, heads;  // query heads that share the KV head
  int32_t position, rows;
  int32_t window;  // 0: none
  float scale;
};

// Floats of scratch that an attention row may use for `query_rows` (token, head) pairs.
static constexpr size_t attention_scratch_floats(size_t query_rows, size_t head_dim) {
  return query_rows * (2 * head_dim + kPartition + 4) + 64;
}

// Ceilings of the machine: `amount` int8 or f32 multiply-accumulates on registers, or bytes read from `data`.
// `sink` keeps the compiler from dropping the work.
struct MeasureArgs {
  const void* data;
  size_t amount;
  float* sink;
};

enum class Op : uint8_t {
  kLinear,
  kRmsNorm,
  kQuantizeBf16,
  kQuantizeInt8,
  kRope,
  kSiluMul,
  kGeluTanhMul,
  kAdd,
  kKvWriteF32,
  kKvWriteBf16,
  kAttentionF32,
  kAttentionBf16,
  kMeasureInt8,
  kMeasureF32,
  kMeasureRead,
};

union RowFunction {
  void (*linear)(const LinearArgs&);
  void (*rms_norm)(const RmsNormArgs&);
  void (*quantize)(const QuantizeArgs&);
  void (*rope)(const RopeArgs&);
  void (*gated)(const GatedArgs&);
  void (*add)(const AddArgs&);
  void (*kv_write)(const KvWriteArgs&);
  void (*attention)(const AttentionArgs&);
  void (*measure)(const MeasureArgs&);
};

// One implementation of one op. `kind` and `layout` matter for linear only.
struct Row {
  Op op;
  WeightKind kind;
  Layout layout;
  bool relaxed;       // float rounding inside the instruction: exempt from bit equality
  uint64_t features;  // all of these bits (core/features.h) must be present
  const char* name;   // op, format, feature set
  RowFunction run;
};

struct RowTable {
  const char* folder;  // feature set, as the force knob names it
  const Row* rows;
  size_t count;
};

}  // namespace neoserve
