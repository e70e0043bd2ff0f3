// Sampling of docs/ops.md: penalties, temperature, top-k, min-p, top-p, one counter-based draw a row.
#pragma once

#include <cstdint>

namespace neoserve {

// Arrays as in neoserve.types.step.SamplingBatch; *_start arrays have rows + 1 entries.
struct SampleInputs {
  int32_t rows;
  const float *temperature, *top_p, *min_p, *repetition_penalty, *presence_penalty, *frequency_penalty;
  const int32_t* top_k;
  const uint64_t* seed;
  const int32_t *position, *num_logprobs;
  const int32_t *history_start, *history_tokens, *history_output_counts;
  const int32_t *bias_start, *bias_tokens;
  const float* bias_values;
  const int32_t *forbidden_start, *forbidden_tokens;
  int32_t valid_vocabulary;  // in [1, vocabulary]: log probabilities are over the ids below it
};

struct SampleOutputs {
  int32_t alternatives;  // columns of the two last arrays
  int32_t* token_ids;
  float* logprobs;
  int32_t* top_ids;
  float* top_logprobs;
};

// Philox 4x32-10 (Salmon et al., SC 2011) at counter (position, 0, 0, 0) and key `seed`: the first word's upper 24 bits
// / 2^24.
double uniform(uint64_t seed, uint32_t position);

// Samples row `row` of logits [rows][vocabulary].
void sample_row(const float* logits, int32_t vocabulary, int32_t row, const SampleInputs& inputs,
                const SampleOutputs& outputs);

}  // namespace neoserve
