// The bounds of a step, checked once before any work (exec/model.h, Model::check).
#include <stdexcept>
#include <string>

#include "exec/model.h"

namespace neoserve {
namespace {

[[noreturn]] void reject(const std::string& what) {
  throw std::invalid_argument("step refused: " + what);
}

void within(const char* name, int32_t value, int32_t low, int32_t high) {
  if (value >= low && value <= high) return;
  reject(std::string(name) + " is " + std::to_string(value) + "; it must be in [" + std::to_string(low) + ", " +
         std::to_string(high) + "]");
}

}  // namespace

void Model::check(int32_t tokens, int32_t sequences, int32_t rows) const {
  within("num_tokens", tokens, 1, limits_.max_tokens);
  within("num_sequences", sequences, 1, limits_.max_sequences);
  within("num_logit_rows", rows, 0, limits_.max_rows);
  for (int32_t t = 0; t < tokens && embedding_rows_ > 0; ++t) {
    within("token_ids", arrays_.token_ids[static_cast<size_t>(t)], 0, embedding_rows_ - 1);
  }
  for (int32_t r = 0; r < rows; ++r) within("logit_rows", arrays_.logit_rows[static_cast<size_t>(r)], 0, tokens - 1);
  within("query_start", arrays_.query_start[0], 0, 0);
  within("query_start", arrays_.query_start[static_cast<size_t>(sequences)], tokens, tokens);
  for (size_t s = 0; s < static_cast<size_t>(sequences); ++s) {
    const int32_t first = arrays_.query_start[s], end = arrays_.query_start[s + 1], length = arrays_.context_len[s];
    within("query_start", end, first + 1, tokens);
    within("context_len", length, end - first, limits_.max_pages_per_sequence * limits_.page_size);
    for (int32_t t = first; t < end; ++t) {
      const int32_t position = length - (end - t);
      within("positions", arrays_.positions[static_cast<size_t>(t)], position, position);
    }
    const int32_t pages = (length - 1) / limits_.page_size + 1;
    for (const KvGroup& group : groups_) {
      const int32_t* table = group.block_tables.data() + s * static_cast<size_t>(limits_.max_pages_per_sequence);
      for (int32_t p = 0; p < pages; ++p) within("block_tables", table[p], 0, group.num_pages - 1);
    }
  }
}

}  // namespace neoserve
