// A small transformer run natively from token ids to sampled tokens, for the sanitizers (tools/test_tsan.sh): arenas,
// scratch, pages and counters are shared by the threads of exec/model.cpp exactly as when serving. Every result must
// have the bits that one thread gives. Then linear with fewer blocks of outputs than threads, on each number of
// threads.
//   program_stress MOST STEP   thread counts 1, 1 + STEP, ... up to MOST for the second part
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "exec/model.h"

namespace {

using namespace neoserve;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

// Repeatable values in [-1, 1).
class Values {
 public:
  explicit Values(uint32_t seed) : state_(seed) {}
  float next() {
    state_ = state_ * 1664525u + 1013904223u;
    return static_cast<float>(state_ >> 8) / 8388608.0f - 1.0f;
  }
  std::vector<float> floats(size_t count, float scale) {
    std::vector<float> out(count);
    for (float& value : out) value = next() * scale;
    return out;
  }

 private:
  uint32_t state_;
};

std::shared_ptr<PackedWeight> f32_weight(int32_t n, int32_t k, Values& values) {
  const WeightFormat format{WeightKind::kF32, ScaleType::kF32, Offset::kNone, 0};
  auto weight = std::make_shared<PackedWeight>(format, n, k, choose_row(Op::kLinear, format.kind, {}));
  const std::vector<float> data = values.floats(static_cast<size_t>(n) * static_cast<size_t>(k), 0.2f);
  weight->put({0, n, data.data(), nullptr, nullptr, nullptr});
  return weight;
}

std::shared_ptr<PackedWeight> int8_weight(int32_t n, int32_t k, Values& values) {
  const WeightFormat format{WeightKind::kInt8Channel, ScaleType::kF32, Offset::kNone, 0};
  auto weight = std::make_shared<PackedWeight>(format, n, k, choose_row(Op::kLinear, format.kind, {}));
  std::vector<int8_t> data(static_cast<size_t>(n) * static_cast<size_t>(k));
  for (int8_t& value : data) value = static_cast<int8_t>(values.next() * 127.0f);
  std::vector<float> scales(static_cast<size_t>(n));
  for (float& scale : scales) scale = 0.002f * (1.5f + values.next());
  weight->put({0, n, data.data(), scales.data(), nullptr, nullptr});
  return weight;
}

constexpr int32_t kHidden = 64, kHeads = 4, kKvHeads = 2, kHeadDim = 16, kGated = 96, kVocabulary = 97, kLayers = 2;
constexpr int32_t kTokens = 48, kSequences = 3, kPage = 16, kPages = 4;
constexpr ModelLimits kLimits = {kTokens, kSequences, kSequences, kPages, kPage, false};

// Lays buffers out in the arena.
class Layout {
 public:
  ViewOperand buffer(int32_t columns, ActivationKind kind = ActivationKind::kF32, Symbol symbol = Symbol::kTokens) {
    ViewOperand view;
    view.offset = end_;
    view.buffer_columns = view.columns = columns;
    view.kind = kind;
    view.group = kind == ActivationKind::kInt8 ? columns : 0;
    view.symbol = symbol;
    // int8: values, scales and sums, each on its own cache line (exec/model.cpp, int8_parts); f32 takes more.
    end_ += round_up(static_cast<size_t>(kTokens) * (static_cast<size_t>(columns) * 4 + 128), kCacheLine);
    return view;
  }
  size_t bytes() const { return end_; }

 private:
  size_t end_ = 0;
};

ViewOperand part(const ViewOperand& buffer, int32_t column, int32_t columns) {
  ViewOperand view = buffer;
  view.column = column, view.columns = columns;
  return view;
}

// The program of the small transformer: int8 products, float attention, tied to nothing of the Python side.
class Builder {
 public:
  Builder(Model& model, uint32_t seed) : model_(model), values_(seed) {}

  void add(OpCode code, const ViewOperand& out, const ViewOperand& in, const char* label, bool joins = false) {
    Instruction instruction = start(code, label, joins);
    instruction.out = out, instruction.in = in;
    model_.add(std::move(instruction));
  }

  void embed(const ViewOperand& out) {
    Instruction i = start(OpCode::kEmbed, "embed", false);
    i.out = out, i.weight = f32_weight(kVocabulary, kHidden, values_);
    model_.add(std::move(i));
  }

  void norm(const ViewOperand& out, const ViewOperand& in, bool joins) {
    Instruction i = start(OpCode::kRmsNorm, "rms_norm", joins);
    i.row = choose_row(Op::kRmsNorm, WeightKind::kF32, {});
    i.out = out, i.in = in, i.width = in.columns, i.epsilon = 1e-5f;
    i.vector = model_.add_vector(values_.floats(static_cast<size_t>(in.columns), 1.0f));
    model_.add(std::move(i));
  }

  void quantize(const ViewOperand& out, const ViewOperand& in, bool joins) {
    Instruction i = start(OpCode::kQuantize, "quantize", joins);
    i.row = choose_row(Op::kQuantizeInt8, WeightKind::kF32, {});
    i.out = out, i.in = in;
    model_.add(std::move(i));
  }

  void linear(const ViewOperand& out, const ViewOperand& in, bool accumulate) {
    Instruction i = start(OpCode::kLinear, "linear", false);
    i.weight = in.kind == ActivationKind::kInt8 ? int8_weight(out.columns, in.columns, values_)
                                                : f32_weight(out.columns, in.columns, values_);
    i.row = i.weight->row();
    i.out = out, i.in = in, i.accumulate = accumulate;
    model_.add(std::move(i));
  }

  void rope_table(const ViewOperand& out, bool joins) {
    Instruction i = start(OpCode::kRopeTable, "rope_table", joins);
    std::vector<float> frequencies(kHeadDim / 2);
    for (size_t f = 0; f < frequencies.size(); ++f) frequencies[f] = std::pow(10000.0f, -static_cast<float>(f) / 8.0f);
    i.vector = model_.add_vector(frequencies);
    i.out = out;
    model_.add(std::move(i));
  }

  void rope(const ViewOperand& view, const ViewOperand& table, bool joins) {
    Instruction i = start(OpCode::kRope, "rope", joins);
    i.row = choose_row(Op::kRope, WeightKind::kF32, {});
    i.out = i.in = view, i.second = table, i.head_dim = kHeadDim;
    model_.add(std::move(i));
  }

  void kv_write(const ViewOperand& k, const ViewOperand& v, int32_t layer) {
    Instruction i = start(OpCode::kKvWrite, "kv_write", true);
    i.row = choose_row(Op::kKvWriteF32, WeightKind::kF32, {});
    i.in = k, i.second = v, i.group = 0, i.layer = layer;
    i.heads = i.kv_heads = kKvHeads, i.head_dim = kHeadDim;
    model_.add(std::move(i));
  }

  void attention(const ViewOperand& out, const ViewOperand& q, int32_t layer) {
    Instruction i = start(OpCode::kAttention, "attention", false);
    i.row = choose_row(Op::kAttentionF32, WeightKind::kF32, {});
    i.out = out, i.in = q, i.group = 0, i.layer = layer;
    i.heads = kHeads, i.kv_heads = kKvHeads, i.head_dim = kHeadDim, i.scale = 0.25f;
    model_.add(std::move(i));
  }

  void gated(const ViewOperand& out, const ViewOperand& in) {
    Instruction i = start(OpCode::kGated, "silu_mul", false);
    i.row = choose_row(Op::kSiluMul, WeightKind::kF32, {});
    i.out = out, i.in = in;
    model_.add(std::move(i));
  }

 private:
  static Instruction start(OpCode code, const char* label, bool joins) {
    Instruction instruction;
    instruction.code = code, instruction.label = label, instruction.joins = joins;
    return instruction;
  }

  Model& model_;
  Values values_;
};

std::unique_ptr<Model> make_transformer(int threads) {
  Layout layout;
  const auto kInt8 = ActivationKind::kInt8;
  const ViewOperand x = layout.buffer(kHidden), normed = layout.buffer(kHidden), input = layout.buffer(kHidden, kInt8),
                    table = layout.buffer(kHeadDim), qkv = layout.buffer((kHeads + 2 * kKvHeads) * kHeadDim),
                    mixed = layout.buffer(kHidden), both = layout.buffer(2 * kGated), inner = layout.buffer(kGated),
                    inner_input = layout.buffer(kGated, kInt8),
                    last = layout.buffer(kHidden, ActivationKind::kF32, Symbol::kRows),
                    last_normed = layout.buffer(kHidden, ActivationKind::kF32, Symbol::kRows),
                    logits = layout.buffer(kVocabulary, ActivationKind::kF32, Symbol::kRows);
  auto model = std::make_unique<Model>(threads, std::vector<int>{}, layout.bytes(), kLimits, Force{});
  model->add_group(kLayers, kKvHeads, kHeadDim, kSequences * kPages);
  Builder builder(*model, 7);
  const ViewOperand q = part(qkv, 0, kHeads * kHeadDim), k = part(qkv, kHeads * kHeadDim, kKvHeads * kHeadDim),
                    v = part(qkv, (kHeads + kKvHeads) * kHeadDim, kKvHeads * kHeadDim);
  builder.embed(x);
  builder.rope_table(table, true);
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    builder.norm(normed, x, layer == 0);
    builder.quantize(input, normed, true);
    builder.linear(qkv, input, false);
    builder.rope(q, table, false);
    builder.rope(k, table, true);
    builder.kv_write(k, v, layer);
    builder.attention(mixed, q, layer);
    builder.quantize(input, mixed, false);
    builder.linear(x, input, true);
    builder.norm(normed, x, false);
    builder.quantize(input, normed, true);
    builder.linear(both, input, false);
    builder.gated(inner, both);
    builder.quantize(inner_input, inner, true);
    builder.linear(x, inner_input, true);
  }
  builder.add(OpCode::kGatherRows, last, x, "gather_rows");
  builder.norm(last_normed, last, true);
  builder.linear(logits, last_normed, false);
  return model;
}

// Draws one token per row: temperature, top-k and penalties differ from row to row.
std::vector<int32_t> draw(Model& model, int step) {
  const int32_t rows = model.logit_rows();
  const auto count = static_cast<size_t>(rows);
  const std::vector<float> temperature = {0.0f, 0.8f, 1.3f}, top_p = {1.0f, 0.9f, 1.0f}, min_p = {0, 0, 0.01f},
                           one = {1, 1.1f, 1}, zero = {0, 0.2f, 0};
  const std::vector<int32_t> top_k = {0, 20, 0}, logprobs = {2, 0, 1}, none(4), position(count, step);
  const std::vector<uint64_t> seed = {1, 2, 3};
  const int32_t no_tokens = 0;
  const float no_values = 0;
  const SampleInputs inputs = {
      rows,         temperature.data(), top_p.data(),    min_p.data(),    one.data(),  zero.data(), zero.data(),
      top_k.data(), seed.data(),        position.data(), logprobs.data(), none.data(), &no_tokens,  &no_tokens,
      none.data(),  &no_tokens,         &no_values,      none.data(),     &no_tokens,  kVocabulary};
  std::vector<int32_t> tokens(count), top_ids(2 * count);
  std::vector<float> values(count), top_values(2 * count);
  model.sample(inputs, {2, tokens.data(), values.data(), top_ids.data(), top_values.data()});
  return tokens;
}

// Three prompts of different lengths, then steps that add a token to each; all logits and drawn tokens, in order.
std::vector<float> generate(int threads, int steps) {
  const std::unique_ptr<Model> model = make_transformer(threads);
  StepArrays& arrays = model->arrays();
  const int32_t prompts[kSequences] = {21, 1, 18};
  int32_t lengths[kSequences] = {};
  std::vector<int32_t>& tables = model->groups()[0].block_tables;
  for (int32_t i = 0; i < kSequences * kPages; ++i) tables[static_cast<size_t>(i)] = kSequences * kPages - 1 - i;
  std::vector<float> all;
  std::vector<int32_t> drawn;
  for (int step = 0; step <= steps; ++step) {
    int32_t token = 0;
    for (int32_t s = 0; s < kSequences; ++s) {
      const int32_t count = step == 0 ? prompts[s] : 1;
      arrays.query_start[static_cast<size_t>(s)] = token;
      for (int32_t i = 0; i < count; ++i, ++token) {
        arrays.token_ids[static_cast<size_t>(token)] =
            step == 0 ? (31 * token + 5) % kVocabulary : drawn[static_cast<size_t>(s)];
        arrays.positions[static_cast<size_t>(token)] = lengths[s]++;
      }
      arrays.context_len[static_cast<size_t>(s)] = lengths[s];
      arrays.logit_rows[static_cast<size_t>(s)] = token - 1;
    }
    arrays.query_start[kSequences] = token;
    model->forward(token, kSequences, kSequences);
    all.insert(all.end(), model->logits(), model->logits() + kSequences * kVocabulary);
    drawn = draw(*model, step);
    for (int32_t id : drawn) {
      if (id < 0 || id >= kVocabulary) fail("token " + std::to_string(id) + " was drawn");
      all.push_back(static_cast<float>(id));
    }
  }
  for (float value : all) {
    if (!std::isfinite(value)) fail("a logit is not finite");
  }
  return all;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void transformer() {
  constexpr int kSteps = 6;
  const std::vector<float> wanted = generate(1, kSteps);
  const auto [least, most] = std::minmax_element(wanted.begin(), wanted.begin() + kVocabulary);
  if (*most - *least < 0.01f) fail("the logits are all alike: the program does nothing");
  for (int threads : {2, 3, 4, 7, 16, 17, 33}) {
    if (!same_bits(generate(threads, kSteps), wanted)) fail(std::to_string(threads) + " threads give other bits");
  }
  std::printf("program: %d layers, %d steps, sampling: equal bits on 1 to 33 threads\n", kLayers, kSteps + 1);
}

// `rows` rows times a weight of `n` outputs: one instruction, one phase.
std::vector<float> small_linear(int threads, int32_t n, int32_t rows, ActivationKind kind) {
  constexpr int32_t kInner = 32;
  Layout layout;
  const ViewOperand x = layout.buffer(kInner), input = layout.buffer(kInner, ActivationKind::kInt8),
                    out = layout.buffer(n);
  Model model(threads, {}, layout.bytes(), kLimits, Force{});
  Builder builder(model, 11);
  if (kind == ActivationKind::kInt8) builder.quantize(input, x, false);
  builder.linear(out, kind == ActivationKind::kInt8 ? input : x, false);
  Values values(13);
  auto* data = reinterpret_cast<float*>(model.arena().data() + x.offset);
  for (int32_t i = 0; i < rows * kInner; ++i) data[i] = values.next();
  StepArrays& arrays = model.arrays();
  for (int32_t t = 0; t < rows; ++t) arrays.positions[static_cast<size_t>(t)] = t;
  arrays.query_start[1] = rows;
  arrays.context_len[0] = rows;
  // Twice: the second step finds the counters and the barrier as the first left them.
  for (int step = 0; step < 2; ++step) model.forward(rows, 1, 0);
  const float* result = model.logits();
  return std::vector<float>(result, result + rows * n);
}

// Fewer blocks of 16 outputs than threads: threads without work must do nothing.
void fewer_blocks_than_threads(int most, int step) {
  int counts = 0;
  for (ActivationKind kind : {ActivationKind::kF32, ActivationKind::kInt8}) {
    for (int32_t n : {1, 4, 63}) {
      for (int32_t rows : {1, 5}) {
        const std::vector<float> wanted = small_linear(1, n, rows, kind);
        for (int threads = 1; threads <= most; threads += step, ++counts) {
          if (!same_bits(small_linear(threads, n, rows, kind), wanted)) {
            fail("linear of " + std::to_string(n) + " outputs, " + std::to_string(rows) +
                 " rows: " + std::to_string(threads) + " threads give other bits");
          }
        }
      }
    }
  }
  std::printf("program: linear of 1, 4 and 63 outputs on up to %d threads: %d runs, equal bits\n", most, counts);
}

}  // namespace

int main(int argc, char** argv) {
  const int most = argc > 1 ? std::atoi(argv[1]) : 0, step = argc > 2 ? std::atoi(argv[2]) : 0;
  if (most < 1 || step < 1) {
    std::fprintf(stderr, "usage: program_stress MOST STEP, both at least 1\n");
    return 2;
  }
  transformer();
  fewer_blocks_than_threads(most, step);
  return 0;
}
