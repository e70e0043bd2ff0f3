// A bound program: instructions over one arena, replayed by a thread pool. No ISA here.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/memory.h"
#include "core/thread_pool.h"
#include "exec/registry.h"
#include "exec/sampler.h"
#include "ops/contract.h"
#include "ops/packed_weight.h"

namespace neoserve {

enum class Symbol : uint8_t { kTokens, kRows };
enum class ActivationKind : uint8_t { kF32, kBf16, kInt8 };

// A view of an activation buffer; offsets are from the start of the arena.
struct ViewOperand {
  size_t offset = 0;
  int32_t buffer_columns = 0, column = 0, columns = 0;
  ActivationKind kind = ActivationKind::kF32;
  int32_t group = 0;  // int8: columns per scale
  Symbol symbol = Symbol::kTokens;
};

struct ModelLimits {
  int32_t max_tokens, max_sequences, max_rows, max_pages_per_sequence, page_size;
  bool kv_bf16;
};

// Pages of the layers with one attention span (docs/ops.md, "The page").
struct KvGroup {
  int32_t layers, kv_heads, head_dim, num_pages;
  size_t layer_bytes, page_stride;
  Memory pages;
  std::vector<int32_t> block_tables;  // [max_sequences][max_pages_per_sequence]
};

// The step's inputs, filled in place by the engine.
struct StepArrays {
  std::vector<int32_t> token_ids, positions, query_start, context_len, logit_rows;
};

enum class OpCode : uint8_t {
  kEmbed,
  kRmsNorm,
  kQuantize,
  kLinear,
  kRopeTable,
  kRope,
  kKvWrite,
  kAttention,
  kGated,
  kAdd,
  kGatherRows,
};

struct Instruction {
  OpCode code;
  const Row* row = nullptr;  // null for ops that only move data
  ViewOperand out, in, second;
  std::shared_ptr<PackedWeight> weight;
  int32_t vector = -1;  // norm weight, bias or frequencies
  int32_t group = -1, layer = -1;
  bool accumulate = false;
  bool joins = false;  // runs in the previous instruction's phase (neoserve/program/phases.py)
  float scale = 1, epsilon = 0;
  int32_t width = 0, window = 0, heads = 0, kv_heads = 0, head_dim = 0;
  std::string label;
  double seconds = 0;  // accumulated while profiling
};

// Instructions [first, end) that run between two barriers: one that divides in its own way (linear, attention), or a
// chain in which every row depends on the same row alone, so that a thread takes its rows through all of it.
struct Phase {
  size_t first, end;
};

// Work of an attention instruction: consecutive tokens of one sequence.
struct TokenSpan {
  int32_t sequence, first, count;
};

class Model {
 public:
  Model(int threads, std::vector<int> cpus, size_t arena_bytes, ModelLimits limits, const Force& force);

  // Returns the bytes of one page.
  size_t add_group(int32_t layers, int32_t kv_heads, int32_t head_dim, int32_t num_pages);
  int32_t add_vector(std::vector<float> values);
  void add(Instruction instruction);

  // Runs the step's arrays. Throws std::invalid_argument, before any work, when a count or an index is out of bounds.
  void forward(int32_t tokens, int32_t sequences, int32_t rows);

  // Draws one token per logits row of the last forward.
  void sample(const SampleInputs& inputs, const SampleOutputs& outputs);

  const float* logits() const;
  int32_t logit_rows() const { return rows_; }
  int32_t vocabulary() const;

  const Force& force() const { return force_; }
  const ModelLimits& limits() const { return limits_; }
  StepArrays& arrays() { return arrays_; }
  std::vector<KvGroup>& groups() { return groups_; }
  const std::vector<float>& vector(int32_t id) const { return vectors_[static_cast<size_t>(id)]; }
  size_t vectors() const { return vectors_.size(); }
  const std::vector<Instruction>& instructions() const { return instructions_; }
  ThreadPool& pool() { return pool_; }
  Memory& arena() { return arena_; }
  void set_profiling(bool on);

 private:
  struct Chunks {
    int32_t count, size;
  };

  void check(int32_t tokens, int32_t sequences, int32_t rows) const;
  void plan_spans();
  void plan_phases();
  void run_phase(size_t index, int thread);
  Chunks chunks(const Instruction& instruction) const;
  int32_t row_count(Symbol symbol) const { return symbol == Symbol::kTokens ? tokens_ : rows_; }
  void run_chunk(const Instruction& instruction, int32_t begin, int32_t end, int thread);
  void run_linear(const Instruction& instruction, int32_t begin, int32_t end);
  void run_quantize(const Instruction& instruction, int32_t begin, int32_t end);
  void run_kv_write(const Instruction& instruction, int32_t begin, int32_t end);
  void run_attention(const Instruction& instruction, int32_t unit, int thread);
  void run_rowwise(const Instruction& instruction, int32_t begin, int32_t end);
  KvLayerArgs kv_layer(const Instruction& instruction, int32_t sequence);
  float* f32(const ViewOperand& view) const;
  size_t stride(const ViewOperand& view) const { return static_cast<size_t>(view.buffer_columns); }

  const ModelLimits limits_;
  const Force force_;
  ThreadPool pool_;
  Memory arena_;
  StepArrays arrays_;
  std::vector<KvGroup> groups_;
  std::vector<std::vector<float>> vectors_;
  std::vector<Instruction> instructions_;
  std::vector<Phase> phases_;                 // empty: to be planned
  std::unique_ptr<ChunkCounter[]> counters_;  // one per phase
  std::vector<TokenSpan> spans_;
  std::vector<int32_t> sequence_of_;         // of each token
  std::vector<std::vector<float>> scratch_;  // one per thread
  int32_t tokens_ = 0, sequences_ = 0, rows_ = 0, embedding_rows_ = 0;
  bool profiling_ = false;
};

}  // namespace neoserve
