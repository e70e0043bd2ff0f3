#include "exec/registry.h"

#include <algorithm>
#include <stdexcept>

#include "core/features.h"
#include "ops/reference.h"

namespace neoserve {

#define NEOSERVE_KERNEL_FOLDER(NAME) RowTable NAME##_rows();
#include "kernel_folders.inc"
#undef NEOSERVE_KERNEL_FOLDER

namespace {

// Tables from the most preferred feature set to the reference.
const std::vector<RowTable>& tables() {
  static const std::vector<RowTable> list = [] {
    std::vector<RowTable> found = {reference_rows()};
#define NEOSERVE_KERNEL_FOLDER(NAME) found.push_back(NAME##_rows());
#include "kernel_folders.inc"
#undef NEOSERVE_KERNEL_FOLDER
    std::reverse(found.begin(), found.end());
    return found;
  }();
  return list;
}

bool applies(const Row& row, Op op, WeightKind kind) {
  return row.op == op && (op != Op::kLinear || row.kind == kind);
}

std::string missing_features(const Row& row) {
  std::string text;
  for (const std::string& name : feature_names(row.features & ~detect_features()))
    text += (text.empty() ? "" : ", ") + name;
  return text;
}

bool row_named(const std::string& name, const RowTable& table) {
  return std::any_of(table.rows, table.rows + table.count, [&](const Row& row) { return name == row.name; });
}

}  // namespace

const char* op_name(Op op) {
  switch (op) {
    case Op::kLinear:
      return "linear";
    case Op::kRmsNorm:
      return "rms_norm";
    case Op::kQuantizeBf16:
      return "quantize_bf16";
    case Op::kQuantizeInt8:
      return "quantize_int8";
    case Op::kRope:
      return "rope";
    case Op::kSiluMul:
      return "silu_mul";
    case Op::kGeluTanhMul:
      return "gelu_tanh_mul";
    case Op::kAdd:
      return "add";
    case Op::kKvWriteF32:
      return "kv_write_f32";
    case Op::kKvWriteBf16:
      return "kv_write_bf16";
    case Op::kAttentionF32:
      return "attention_f32";
    case Op::kAttentionBf16:
      return "attention_bf16";
    case Op::kMeasureInt8:
      return "measure_int8";
    case Op::kMeasureF32:
      return "measure_f32";
    case Op::kMeasureRead:
      return "measure_read";
  }
  return "unknown";
}

Force parse_force(const std::string& name) {
  if (name.empty()) return {};
  std::string known;
  for (const RowTable& table : tables()) {
    known += (known.empty() ? "" : ", ") + std::string(table.folder);
    const bool folder = name == table.folder;
    if (!folder && !row_named(name, table)) continue;
    for (const Row* row = table.rows; row != table.rows + table.count; ++row) {
      if ((folder || name == row->name) && !missing_features(*row).empty()) {
        throw std::invalid_argument("kernels is \"" + name + "\", but this CPU lacks " + missing_features(*row) +
                                    "; choose a feature set that `neoserve doctor` shows as present");
      }
    }
    return {name};
  }
  throw std::invalid_argument("kernels is \"" + name + "\"; it must be one of the feature sets of this build (" +
                              known + ") or the name of a row (`neoserve doctor` lists them)");
}

std::vector<Verdict> explain_rows(Op op, WeightKind kind, const Force& force) {
  std::vector<Verdict> verdicts;
  bool excluded = false, row_forced = false;
  for (const RowTable& table : tables()) {
    excluded = excluded || force.name == table.folder;
    for (const Row* row = table.rows; row != table.rows + table.count; ++row) {
      row_forced = row_forced || (applies(*row, op, kind) && force.name == row->name);
    }
  }
  const bool folder_forced = excluded;
  bool chosen = false, reached = !folder_forced;
  for (const RowTable& table : tables()) {
    reached = reached || force.name == table.folder;
    for (const Row* row = table.rows; row != table.rows + table.count; ++row) {
      if (!applies(*row, op, kind)) continue;
      std::string reason;
      if (row_forced && force.name != row->name) {
        reason = "row " + force.name + " is forced";
      } else if (!reached) {
        reason = "feature set " + force.name + " is forced";
      } else if (const std::string missing = missing_features(*row); !missing.empty()) {
        reason = "the CPU lacks " + missing;
      } else if (chosen) {
        reason = "a preferred row was chosen";
      }
      chosen = chosen || reason.empty();
      verdicts.push_back({row, table.folder, reason});
    }
  }
  return verdicts;
}

const Row* choose_row(Op op, WeightKind kind, const Force& force) {
  for (const Verdict& verdict : explain_rows(op, kind, force)) {
    if (verdict.reason.empty()) return verdict.row;
  }
  throw std::logic_error(std::string("no row for ") + op_name(op));  // the reference applies to every op
}

std::vector<Verdict> all_rows() {
  std::vector<Verdict> verdicts;
  for (const RowTable& table : tables()) {
    for (const Row* row = table.rows; row != table.rows + table.count; ++row)
      verdicts.push_back({row, table.folder, ""});
  }
  return verdicts;
}

}  // namespace neoserve
