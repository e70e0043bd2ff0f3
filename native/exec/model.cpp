#include "exec/model.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <mutex>
#include <new>
#include <stdexcept>

#include "exec/trigonometry.h"

namespace neoserve {
namespace {

// Query rows that one attention work unit holds: enough to reuse a K tile, few enough to balance threads.
constexpr int32_t kSpanTokens = 16;

bool divided(const Instruction& i) {
  return i.code == OpCode::kLinear || i.code == OpCode::kAttention;
}

Symbol rows_of(const Instruction& i) {
  return i.code == OpCode::kKvWrite ? Symbol::kTokens : i.out.symbol;
}

// Both divide by the same rows (neoserve/program/phases.py); gather_rows reads rows of other threads.
bool can_join(const Instruction& before, const Instruction& instruction) {
  return !divided(before) && !divided(instruction) && instruction.code != OpCode::kGatherRows &&
         rows_of(before) == rows_of(instruction);
}

}  // namespace

Model::Model(int threads, std::vector<int> cpus, size_t arena_bytes, ModelLimits limits, const Force& force)
    : limits_(limits), force_(force), pool_(threads, std::move(cpus)), arena_(arena_bytes) {
  const auto sequences = static_cast<size_t>(limits.max_sequences);
  arrays_.token_ids.resize(static_cast<size_t>(limits.max_tokens));
  arrays_.positions.resize(static_cast<size_t>(limits.max_tokens));
  arrays_.query_start.resize(sequences + 1);
  arrays_.context_len.resize(sequences);
  arrays_.logit_rows.resize(static_cast<size_t>(limits.max_rows));
  scratch_.resize(static_cast<size_t>(threads));
}

size_t Model::add_group(int32_t layers, int32_t kv_heads, int32_t head_dim, int32_t num_pages) {
  if (layers < 1 || kv_heads < 1 || head_dim < 16 || head_dim % 16 != 0 || num_pages < 1) {
    throw std::invalid_argument("KV group of " + std::to_string(layers) + " layers, " + std::to_string(kv_heads) +
                                " heads of " + std::to_string(head_dim) + ", " + std::to_string(num_pages) +
                                " pages: all must be positive, and head_dim a multiple of 16");
  }
  const double total = 8.0 * kv_heads * head_dim * limits_.page_size * layers * num_pages;
  if (total > 0x1p62) throw std::bad_alloc();  // the sizes below cannot overflow
  KvGroup group{};
  group.layers = layers, group.kv_heads = kv_heads, group.head_dim = head_dim, group.num_pages = num_pages;
  const size_t element = limits_.kv_bf16 ? 2 : 4;
  group.layer_bytes = 2 * element * static_cast<size_t>(kv_heads) * static_cast<size_t>(head_dim) *
                      static_cast<size_t>(limits_.page_size);
  group.page_stride = round_up(group.layer_bytes * static_cast<size_t>(layers), kCacheLine);
  // A stride that is a multiple of 4096 would map equal places of all pages to one cache set.
  if (group.page_stride % 4096 == 0) group.page_stride += kCacheLine;
  group.pages = Memory(group.page_stride * static_cast<size_t>(num_pages));
  group.block_tables.resize(static_cast<size_t>(limits_.max_sequences) *
                            static_cast<size_t>(limits_.max_pages_per_sequence));
  groups_.push_back(std::move(group));
  return groups_.back().page_stride;
}

int32_t Model::add_vector(std::vector<float> values) {
  vectors_.push_back(std::move(values));
  return static_cast<int32_t>(vectors_.size()) - 1;
}

void Model::add(Instruction instruction) {
  if (instruction.joins && (instructions_.empty() || !can_join(instructions_.back(), instruction))) {
    throw std::invalid_argument("instruction " + instruction.label + ": cannot join the phase of the one before");
  }
  if (instruction.code == OpCode::kAttention) {
    const auto heads = static_cast<size_t>(instruction.heads / instruction.kv_heads);
    const size_t floats = attention_scratch_floats(kSpanTokens * heads, static_cast<size_t>(instruction.head_dim));
    for (std::vector<float>& scratch : scratch_) scratch.resize(std::max(scratch.size(), floats));
  }
  if (instruction.code == OpCode::kEmbed) {
    const int32_t rows = instruction.weight->n();
    embedding_rows_ = embedding_rows_ == 0 ? rows : std::min(embedding_rows_, rows);
  }
  instructions_.push_back(std::move(instruction));
  phases_.clear();
}

const float* Model::logits() const {
  if (instructions_.empty()) throw std::logic_error("the model has no instructions");
  return f32(instructions_.back().out);
}

int32_t Model::vocabulary() const {
  return instructions_.empty() ? 0 : instructions_.back().out.buffer_columns;
}

void Model::set_profiling(bool on) {
  profiling_ = on;
  for (Instruction& instruction : instructions_) instruction.seconds = 0;
  phases_.clear();  // profiling gives every instruction a phase of its own
}

void Model::plan_spans() {
  spans_.clear();
  sequence_of_.resize(static_cast<size_t>(limits_.max_tokens));
  for (int32_t s = 0; s < sequences_; ++s) {
    const int32_t first = arrays_.query_start[static_cast<size_t>(s)],
                  end = arrays_.query_start[static_cast<size_t>(s) + 1];
    std::fill(sequence_of_.begin() + first, sequence_of_.begin() + end, s);
    for (int32_t t = first; t < end; t += kSpanTokens) spans_.push_back({s, t, std::min(kSpanTokens, end - t)});
  }
  // Later tokens see more keys: they come first, so that the longest units do not end the step.
  std::stable_sort(spans_.begin(), spans_.end(), [this](const TokenSpan& a, const TokenSpan& b) {
    return arrays_.positions[static_cast<size_t>(a.first)] > arrays_.positions[static_cast<size_t>(b.first)];
  });
}

void Model::plan_phases() {
  for (size_t i = 0; i < instructions_.size(); ++i) {
    if (i > 0 && instructions_[i].joins && !profiling_) {
      phases_.back().end = i + 1;
    } else {
      phases_.push_back({i, i + 1});
    }
  }
  counters_ = std::make_unique<ChunkCounter[]>(phases_.size());
}

void Model::forward(int32_t tokens, int32_t sequences, int32_t rows) {
  if (instructions_.empty()) throw std::logic_error("the model has no instructions");
  check(tokens, sequences, rows);
  tokens_ = tokens, sequences_ = sequences, rows_ = rows;
  plan_spans();
  if (phases_.empty()) plan_phases();
  for (size_t i = 0; i < phases_.size(); ++i) counters_[i].reset();
  pool_.run([this](int thread) {
    for (size_t i = 0; i < phases_.size(); ++i) run_phase(i, thread);
  });
}

void Model::run_phase(size_t index, int thread) {
  const Phase phase = phases_[index];
  const Chunks work = chunks(instructions_[phase.first]);
  if (work.count == 0) return;
  const bool timed = profiling_ && thread == 0;
  const auto start = timed ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point{};
  const int32_t parts = (work.count + work.size - 1) / work.size;
  for (int32_t part = counters_[index].claim(); part < parts; part = counters_[index].claim()) {
    const int32_t begin = part * work.size, end = std::min(work.count, begin + work.size);
    for (size_t i = phase.first; i < phase.end; ++i) run_chunk(instructions_[i], begin, end, thread);
  }
  pool_.barrier().wait(thread);
  if (timed)
    instructions_[phase.first].seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// How an instruction's work divides: `count` items, claimed `size` at a time. Sizes follow the bytes and the arithmetic
// of an item; the result does not depend on them.
Model::Chunks Model::chunks(const Instruction& instruction) const {
  const int32_t threads = pool_.threads();
  const int32_t rows = row_count(instruction.code == OpCode::kKvWrite ? Symbol::kTokens : instruction.out.symbol);
  switch (instruction.code) {
    case OpCode::kLinear: {
      if (rows == 0) return {0, 1};
      const int32_t blocks = (instruction.weight->n() + kBlock - 1) / kBlock;
      // Four chunks a thread: a descheduled thread leaves the rest to others, and the tail stays short.
      return {blocks, std::max(1, blocks / (threads * 4))};
    }
    case OpCode::kAttention:
      return {static_cast<int32_t>(spans_.size()) * instruction.kv_heads, 1};
    default:
      return {rows, std::max(1, std::min(64, rows / (threads * 2)))};
  }
}

float* Model::f32(const ViewOperand& view) const {
  return reinterpret_cast<float*>(arena_.data() + view.offset) + view.column;
}

void Model::run_chunk(const Instruction& instruction, int32_t begin, int32_t end, int thread) {
  switch (instruction.code) {
    case OpCode::kLinear:
      return run_linear(instruction, begin, end);
    case OpCode::kQuantize:
      return run_quantize(instruction, begin, end);
    case OpCode::kAttention:
      for (int32_t unit = begin; unit < end; ++unit) run_attention(instruction, unit, thread);
      return;
    case OpCode::kKvWrite:
      return run_kv_write(instruction, begin, end);
    default:
      return run_rowwise(instruction, begin, end);
  }
}

namespace {

// Parts of an int8 activation buffer (neoserve/program/plan.py, buffer_layout).
struct Int8Parts {
  size_t row_bytes, groups, scales, sums;
};

Int8Parts int8_parts(const ViewOperand& view, const ModelLimits& limits) {
  const auto rows = static_cast<size_t>(view.symbol == Symbol::kTokens ? limits.max_tokens : limits.max_rows);
  const auto columns = static_cast<size_t>(view.buffer_columns);
  Int8Parts parts{};
  parts.row_bytes = round_up(columns, kCacheLine);
  parts.groups = columns / static_cast<size_t>(view.group);
  parts.scales = view.offset + rows * parts.row_bytes;
  parts.sums = parts.scales + round_up(rows * parts.groups * 4, kCacheLine);
  return parts;
}

}  // namespace

void Model::run_linear(const Instruction& instruction, int32_t begin, int32_t end) {
  LinearArgs args{};
  instruction.weight->fill(args);
  const ViewOperand& in = instruction.in;
  if (in.kind == ActivationKind::kInt8) {
    const Int8Parts parts = int8_parts(in, limits_);
    args.x = arena_.data() + in.offset;
    args.x_stride = parts.row_bytes;
    args.x_groups = parts.groups;
    args.x_scales = reinterpret_cast<const float*>(arena_.data() + parts.scales);
    args.x_sums = reinterpret_cast<const int32_t*>(arena_.data() + parts.sums);
  } else {
    const size_t element = in.kind == ActivationKind::kF32 ? 4 : 2;
    args.x = arena_.data() + in.offset + static_cast<size_t>(in.column) * element;
    args.x_stride = static_cast<size_t>(in.buffer_columns) * element;
  }
  args.bias = instruction.vector >= 0 ? vectors_[static_cast<size_t>(instruction.vector)].data() : nullptr;
  args.out = f32(instruction.out);
  args.out_stride = stride(instruction.out);
  args.rows = row_count(instruction.out.symbol);
  args.accumulate = instruction.accumulate;
  args.block_begin = begin;
  args.block_end = end;
  instruction.row->run.linear(args);
}

void Model::run_quantize(const Instruction& instruction, int32_t begin, int32_t end) {
  const ViewOperand& out = instruction.out;
  QuantizeArgs args{};
  args.x = f32(instruction.in);
  args.x_stride = stride(instruction.in);
  args.out = arena_.data() + out.offset;
  args.columns = out.buffer_columns;
  args.row_begin = begin;
  args.row_end = end;
  if (out.kind == ActivationKind::kBf16) {
    args.out_stride = static_cast<size_t>(out.buffer_columns) * 2;
    args.padded_columns = out.buffer_columns;
  } else {
    const Int8Parts parts = int8_parts(out, limits_);
    args.out_stride = parts.row_bytes;
    args.padded_columns = static_cast<int32_t>(parts.row_bytes);
    args.groups = parts.groups;
    args.group = out.group;
    args.scales = reinterpret_cast<float*>(arena_.data() + parts.scales);
    args.sums = reinterpret_cast<int32_t*>(arena_.data() + parts.sums);
  }
  instruction.row->run.quantize(args);
}

KvLayerArgs Model::kv_layer(const Instruction& instruction, int32_t sequence) {
  KvGroup& group = groups_[static_cast<size_t>(instruction.group)];
  KvLayerArgs args{};
  args.pages = group.pages.data();
  args.page_stride = group.page_stride;
  args.layer_offset = static_cast<size_t>(instruction.layer) * group.layer_bytes;
  args.block_table =
      group.block_tables.data() + static_cast<size_t>(sequence) * static_cast<size_t>(limits_.max_pages_per_sequence);
  args.page_size = limits_.page_size;
  args.kv_heads = group.kv_heads;
  args.head_dim = group.head_dim;
  return args;
}

void Model::run_kv_write(const Instruction& instruction, int32_t begin, int32_t end) {
  while (begin < end) {
    const int32_t sequence = sequence_of_[static_cast<size_t>(begin)];
    const int32_t stop = std::min(end, arrays_.query_start[static_cast<size_t>(sequence) + 1]);
    KvWriteArgs args{};
    args.kv = kv_layer(instruction, sequence);
    args.stride = stride(instruction.in);
    args.k = f32(instruction.in) + static_cast<size_t>(begin) * args.stride;
    args.v = f32(instruction.second) + static_cast<size_t>(begin) * args.stride;
    args.position = arrays_.positions[static_cast<size_t>(begin)];
    args.rows = stop - begin;
    instruction.row->run.kv_write(args);
    begin = stop;
  }
}

void Model::run_attention(const Instruction& instruction, int32_t unit, int thread) {
  const TokenSpan& span = spans_[static_cast<size_t>(unit / instruction.kv_heads)];
  const int32_t kv_head = unit % instruction.kv_heads, shared = instruction.heads / instruction.kv_heads;
  const size_t column =
      static_cast<size_t>(kv_head) * static_cast<size_t>(shared) * static_cast<size_t>(instruction.head_dim);
  AttentionArgs args{};
  args.kv = kv_layer(instruction, span.sequence);
  args.q_stride = stride(instruction.in);
  args.q = f32(instruction.in) + static_cast<size_t>(span.first) * args.q_stride + column;
  args.out_stride = stride(instruction.out);
  args.out = f32(instruction.out) + static_cast<size_t>(span.first) * args.out_stride + column;
  args.scratch = scratch_[static_cast<size_t>(thread)].data();
  args.kv_head = kv_head;
  args.heads = shared;
  args.position = arrays_.positions[static_cast<size_t>(span.first)];
  args.rows = span.count;
  args.window = instruction.window;
  args.scale = instruction.scale;
  instruction.row->run.attention(args);
}

void Model::run_rowwise(const Instruction& instruction, int32_t begin, int32_t end) {
  const ViewOperand &in = instruction.in, &out = instruction.out;
  switch (instruction.code) {
    case OpCode::kEmbed:
      for (int32_t t = begin; t < end; ++t) {
        instruction.weight->gather(arrays_.token_ids[static_cast<size_t>(t)], instruction.scale,
                                   f32(out) + static_cast<size_t>(t) * stride(out));
      }
      return;
    case OpCode::kRmsNorm:
      return instruction.row->run.rms_norm(
          {f32(in), stride(in), vectors_[static_cast<size_t>(instruction.vector)].data(), f32(out), stride(out), begin,
           end, out.columns, instruction.width, instruction.epsilon});
    case OpCode::kRopeTable: {
      const std::vector<float>& frequencies = vectors_[static_cast<size_t>(instruction.vector)];
      const size_t half = frequencies.size();
      for (int32_t t = begin; t < end; ++t) {
        float* table = f32(out) + static_cast<size_t>(t) * stride(out);
        for (size_t i = 0; i < half; ++i) {
          const float angle = static_cast<float>(arrays_.positions[static_cast<size_t>(t)]) * frequencies[i];
          double cosine, sine;
          cos_sin(static_cast<double>(angle), cosine, sine);
          table[i] = static_cast<float>(cosine) * instruction.scale;
          table[half + i] = static_cast<float>(sine) * instruction.scale;
        }
      }
      return;
    }
    case OpCode::kRope:
      return instruction.row->run.rope({f32(out), stride(out), f32(instruction.second), begin, end,
                                        out.columns / instruction.head_dim, instruction.head_dim,
                                        instruction.second.columns});
    case OpCode::kGated:
      return instruction.row->run.gated({f32(in), stride(in), f32(out), stride(out), begin, end, out.columns});
    case OpCode::kAdd:
      return instruction.row->run.add(
          {f32(out), stride(out), f32(instruction.second), stride(instruction.second), begin, end, out.columns});
    case OpCode::kGatherRows:
      for (int32_t r = begin; r < end; ++r) {
        const float* source = f32(in) + static_cast<size_t>(arrays_.logit_rows[static_cast<size_t>(r)]) * stride(in);
        std::copy(source, source + out.columns, f32(out) + static_cast<size_t>(r) * stride(out));
      }
      return;
    default:
      return;
  }
}

void Model::sample(const SampleInputs& inputs, const SampleOutputs& outputs) {
  if (inputs.rows != rows_) {
    throw std::invalid_argument("sampling batch has " + std::to_string(inputs.rows) + " rows, the step computed " +
                                std::to_string(rows_));
  }
  const float* values = logits();
  const int32_t columns = vocabulary();
  ChunkCounter counter;
  std::mutex lock;
  std::exception_ptr failure;  // the first: a task must not throw, and sample_row allocates
  pool_.run([&](int) {
    try {
      for (int32_t row = counter.claim(); row < inputs.rows; row = counter.claim())
        sample_row(values, columns, row, inputs, outputs);
    } catch (...) {
      const std::lock_guard<std::mutex> guard(lock);
      if (!failure) failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

}  // namespace neoserve
