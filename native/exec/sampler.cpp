#include "exec/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace neoserve {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Candidate {
  float logit;
  int32_t id;
};

// Descending logit, ascending id.
bool before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

bool modified(int32_t row, const SampleInputs& in) {
  return in.bias_start[row] != in.bias_start[row + 1] || in.history_start[row] != in.history_start[row + 1] ||
         in.forbidden_start[row] != in.forbidden_start[row + 1];
}

void modify(std::vector<float>& x, int32_t row, const SampleInputs& in) {
  for (int32_t i = in.bias_start[row]; i < in.bias_start[row + 1]; ++i)
    x[static_cast<size_t>(in.bias_tokens[i])] += in.bias_values[i];
  const float repetition = in.repetition_penalty[row], frequency = in.frequency_penalty[row],
              presence = in.presence_penalty[row];
  for (int32_t i = in.history_start[row]; i < in.history_start[row + 1]; ++i) {
    float& value = x[static_cast<size_t>(in.history_tokens[i])];
    value = value > 0 ? value / repetition : value * repetition;
    const int32_t count = in.history_output_counts[i];
    if (count > 0) {
      value -= frequency * static_cast<float>(count);
      value -= presence;
    }
  }
  for (int32_t i = in.forbidden_start[row]; i < in.forbidden_start[row + 1]; ++i) {
    x[static_cast<size_t>(in.forbidden_tokens[i])] = kNothing;
  }
}

// Lowest id among the maxima; NaN counts as -inf; -1 when nothing can be drawn.
int32_t argmax(const float* x, int32_t count) {
  float best = kNothing;
  int32_t id = -1;
  for (int32_t i = 0; i < count; ++i) {
    if (x[i] > best) best = x[i], id = i;
  }
  return id;
}

// Candidates that become sorted (see `before`) only as far as they are looked at: a draw seldom goes deep.
class SortedPrefix {
 public:
  explicit SortedPrefix(std::vector<Candidate>& list) : list_(list) {}
  const Candidate& operator[](size_t index) {
    while (index >= sorted_) grow();
    return list_[index];
  }
  size_t size() const { return list_.size(); }

 private:
  void grow() {
    const size_t next = std::min(list_.size(), std::max<size_t>(64, sorted_ * 8));
    const auto at = [&](size_t index) { return list_.begin() + static_cast<std::ptrdiff_t>(index); };
    if (next < list_.size()) std::nth_element(at(sorted_), at(next), list_.end(), before);
    std::sort(at(sorted_), at(next), before);
    sorted_ = next;
  }

  std::vector<Candidate>& list_;
  size_t sorted_ = 0;
};

// Weights exp((logit - top) / temperature) in binary64: the quotient cannot overflow, however small the temperature.
struct Weights {
  double top, temperature;
  double operator()(const Candidate& candidate) const {
    return std::exp((static_cast<double>(candidate.logit) - top) / temperature);
  }
};

// How many of the sorted candidates min-p and top-p keep, and the sum of their weights.
size_t keep(SortedPrefix& sorted, const Weights& weight, double total, const SampleInputs& in, int32_t row,
            double& kept_total) {
  const double top_p = in.top_p[row], floor = in.min_p[row];
  kept_total = total;
  if (top_p >= 1 && floor <= 0) return sorted.size();
  kept_total = 0;
  size_t kept = 0;
  while (kept < sorted.size()) {
    const double w = weight(sorted[kept]);
    if (kept > 0 && (w < floor || w <= 0)) break;  // the largest weight is 1
    kept_total += w;
    ++kept;
    if (top_p < 1 && kept_total >= top_p * total) break;
  }
  return kept;
}

int32_t draw(const float* x, int32_t vocabulary, int32_t row, const SampleInputs& in) {
  std::vector<Candidate> list;
  list.reserve(static_cast<size_t>(vocabulary));
  for (int32_t i = 0; i < vocabulary; ++i) {
    if (x[i] > kNothing) list.push_back({x[i], i});  // false for NaN
  }
  if (list.empty()) return -1;
  const size_t top_k = in.top_k[row] > 0 ? static_cast<size_t>(in.top_k[row]) : list.size();
  if (top_k < list.size()) {
    std::nth_element(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(top_k), list.end(), before);
    list.resize(top_k);
  }
  double top = list[0].logit;
  for (const Candidate& candidate : list) top = std::max<double>(top, candidate.logit);
  SortedPrefix sorted(list);
  if (top == std::numeric_limits<double>::infinity()) return sorted[0].id;
  const Weights weight{top, in.temperature[row]};
  double total = 0, kept_total;
  for (const Candidate& candidate : list) total += weight(candidate);
  const size_t kept = keep(sorted, weight, total, in, row, kept_total);
  const double u = uniform(in.seed[row], static_cast<uint32_t>(in.position[row])) * kept_total;
  double running = 0;
  size_t last = 0;
  for (size_t i = 0; i < kept; ++i) {
    const double w = weight(sorted[i]);
    if (w <= 0) break;
    running += w;
    last = i;
    if (running > u) break;
  }
  return sorted[last].id;
}

void write_logprobs(const float* logits, int32_t row, int32_t token, const SampleInputs& in, const SampleOutputs& out) {
  const int32_t vocabulary = in.valid_vocabulary;
  double top = -std::numeric_limits<double>::infinity(), total = 0;
  for (int32_t i = 0; i < vocabulary; ++i) top = logits[i] > top ? logits[i] : top;
  for (int32_t i = 0; i < vocabulary; ++i) {
    if (logits[i] > kNothing) total += std::exp(static_cast<double>(logits[i]) - top);
  }
  const double normalizer = top + std::log(total);
  const float logit = token < vocabulary ? logits[token] : kNothing;
  out.logprobs[row] = static_cast<float>(static_cast<double>(logit) - normalizer);
  const int32_t count = std::min(in.num_logprobs[row], std::min(out.alternatives, vocabulary));
  if (count <= 0) return;
  std::vector<Candidate> list;
  list.reserve(static_cast<size_t>(vocabulary));
  for (int32_t i = 0; i < vocabulary; ++i) list.push_back({logits[i] > kNothing ? logits[i] : kNothing, i});
  std::partial_sort(list.begin(), list.begin() + count, list.end(), before);
  for (int32_t i = 0; i < count; ++i) {
    const size_t at = static_cast<size_t>(row) * static_cast<size_t>(out.alternatives) + static_cast<size_t>(i);
    out.top_ids[at] = list[static_cast<size_t>(i)].id;
    out.top_logprobs[at] = static_cast<float>(static_cast<double>(list[static_cast<size_t>(i)].logit) - normalizer);
  }
}

}  // namespace

double uniform(uint64_t seed, uint32_t position) {
  uint32_t c[4] = {position, 0, 0, 0};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(c[0]) * 0xD2511F53u, p1 = static_cast<uint64_t>(c[2]) * 0xCD9E8D57u;
    const uint32_t next[4] = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
                              static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    std::copy(next, next + 4, c);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<double>(c[0] >> 8) * 0x1p-24;
}

void sample_row(const float* logits, int32_t vocabulary, int32_t row, const SampleInputs& in,
                const SampleOutputs& out) {
  const float* x = logits + static_cast<size_t>(row) * static_cast<size_t>(vocabulary);
  const float* changed = x;
  std::vector<float> copy;
  if (modified(row, in)) {
    copy.assign(x, x + vocabulary);
    for (float& value : copy) value = value != value ? kNothing : value;
    modify(copy, row, in);
    changed = copy.data();
  }
  const int32_t token = in.temperature[row] == 0 ? argmax(changed, vocabulary) : draw(changed, vocabulary, row, in);
  out.token_ids[row] = token;
  out.logprobs[row] = std::numeric_limits<float>::quiet_NaN();
  for (int32_t i = 0; i < out.alternatives; ++i) {
    const size_t at = static_cast<size_t>(row) * static_cast<size_t>(out.alternatives) + static_cast<size_t>(i);
    out.top_ids[at] = -1;
    out.top_logprobs[at] = kNothing;
  }
  if (in.num_logprobs[row] >= 0 && token >= 0) write_logprobs(x, row, token, in, out);
}

}  // namespace neoserve
