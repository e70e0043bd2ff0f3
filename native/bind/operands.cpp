#include "bind/operands.h"

#include <nanobind/stl/string.h>

#include <stdexcept>

namespace neoserve::bind {
namespace {

[[noreturn]] void bad(const std::string& label, const std::string& what) {
  throw std::invalid_argument("instruction " + label + ": " + what);
}

ViewOperand parse_view(const nb::tuple& operand, const Memory& arena, const ModelLimits& limits,
                       const std::string& label) {
  ViewOperand view;
  view.offset = nb::cast<size_t>(operand[1]);
  view.buffer_columns = nb::cast<int32_t>(operand[2]);
  view.column = nb::cast<int32_t>(operand[3]);
  view.columns = nb::cast<int32_t>(operand[4]);
  const auto format = nb::cast<std::string>(operand[5]);
  const auto symbol = nb::cast<std::string>(operand[6]);
  if (symbol != "tokens" && symbol != "rows") bad(label, "unknown symbol " + symbol);
  view.symbol = symbol == "tokens" ? Symbol::kTokens : Symbol::kRows;
  if (view.columns < 1 || view.column < 0 || view.column > view.buffer_columns - view.columns)
    bad(label, "view outside its buffer");
  size_t row_bytes = 0;
  if (format == "f32") {
    view.kind = ActivationKind::kF32;
    row_bytes = static_cast<size_t>(view.buffer_columns) * 4;
  } else if (format == "bf16") {
    view.kind = ActivationKind::kBf16;
    row_bytes = static_cast<size_t>(view.buffer_columns) * 2;
  } else if (format.rfind("int8_", 0) == 0) {
    view.kind = ActivationKind::kInt8;
    view.group = format == "int8_token" ? view.buffer_columns : std::stoi(format.substr(6));
    if (view.group < 1 || view.buffer_columns % view.group != 0) bad(label, "columns are not a multiple of the group");
    if (view.columns != view.buffer_columns) bad(label, "an int8 view must span its buffer");
    row_bytes = static_cast<size_t>(view.buffer_columns) + 8 * static_cast<size_t>(view.buffer_columns / view.group);
  } else {
    bad(label, "unknown activation format " + format);
  }
  const auto rows = static_cast<size_t>(view.symbol == Symbol::kTokens ? limits.max_tokens : limits.max_rows);
  if (view.offset % 4 != 0 || view.offset > arena.size() || rows * row_bytes > arena.size() - view.offset)
    bad(label, "view outside the arena");
  return view;
}

struct Inputs {
  std::vector<ViewOperand> views;
  std::shared_ptr<PackedWeight> weight;
  int32_t vector = -1, group = -1, layer = -1;
};

Inputs parse_inputs(Model& model, const std::vector<std::shared_ptr<PackedWeight>>& weights, const nb::list& operands,
                    const std::string& label) {
  Inputs found;
  for (size_t i = 1; i < nb::len(operands); ++i) {
    const auto operand = nb::cast<nb::tuple>(operands[i]);
    const auto kind = nb::cast<std::string>(operand[0]);
    if (kind == "view") {
      found.views.push_back(parse_view(operand, model.arena(), model.limits(), label));
    } else if (kind == "weight") {
      found.weight = weights.at(nb::cast<size_t>(operand[1]));
    } else if (kind == "vector") {
      found.vector = nb::cast<int32_t>(operand[1]);
      (void)model.vector(found.vector);
    } else if (kind == "kv") {
      found.group = nb::cast<int32_t>(operand[1]);
      found.layer = nb::cast<int32_t>(operand[2]);
      if (found.layer < 0 || found.layer >= model.groups().at(static_cast<size_t>(found.group)).layers)
        bad(label, "no such KV layer");
    } else if (kind != "input") {
      bad(label, "unknown operand kind " + kind);
    }
  }
  return found;
}

template <class Value>
Value attribute(const nb::dict& attributes, const char* name, const std::string& label) {
  if (!attributes.contains(name)) bad(label, std::string("attribute ") + name + " is missing");
  return nb::cast<Value>(attributes[name]);
}

ActivationKind activation_of(const WeightFormat& format) {
  switch (format.kind) {
    case WeightKind::kF32:
      return ActivationKind::kF32;
    case WeightKind::kBf16:
      return ActivationKind::kBf16;
    default:
      return ActivationKind::kInt8;
  }
}

void check_linear(const Model& model, const Instruction& in, const std::string& label) {
  const PackedWeight& weight = *in.weight;
  if (in.in.kind != activation_of(weight.format())) bad(label, "activation format does not fit the weight");
  if (in.in.columns != weight.k() || in.out.columns != weight.n()) bad(label, "shapes do not fit the weight");
  if (in.in.kind == ActivationKind::kInt8 &&
      in.in.group != (weight.format().group ? weight.format().group : weight.k())) {
    bad(label, "activation group does not fit the weight");
  }
  // bf16 rows have no padding of their own, so an odd K would read the next row.
  if (weight.format().kind == WeightKind::kBf16 && weight.k() % 2 != 0) bad(label, "bf16 needs an even K");
  if (in.vector >= 0 && static_cast<int32_t>(model.vector(in.vector).size()) != weight.n())
    bad(label, "bias does not fit the weight");
}

void check_heads(const Instruction& in, const std::string& label) {
  if (in.head_dim < 16 || in.head_dim % 16 != 0) bad(label, "head_dim must be a multiple of 16");
  if (in.kv_heads < 1 || in.heads % in.kv_heads != 0) bad(label, "heads must be a multiple of kv_heads");
}

}  // namespace

WeightFormat parse_format(const std::string& kind, int32_t group, const std::string& scale_type,
                          const std::string& offset) {
  WeightFormat format{};
  if (kind == "f32") {
    format.kind = WeightKind::kF32;
  } else if (kind == "bf16") {
    format.kind = WeightKind::kBf16;
  } else if (kind == "int8_channel") {
    format.kind = WeightKind::kInt8Channel;
  } else if (kind == "int8_group") {
    format.kind = WeightKind::kInt8Group;
  } else if (kind == "int4_group") {
    format.kind = WeightKind::kInt4Group;
  } else {
    throw std::invalid_argument("unknown weight kind " + kind);
  }
  format.scale_type = scale_type == "f16" ? ScaleType::kF16 : ScaleType::kF32;
  if (offset == "minimum") {
    format.offset = Offset::kMinimum;
  } else if (offset == "zero") {
    format.offset = Offset::kZero;
  } else if (offset == "none") {
    format.offset = Offset::kNone;
  } else {
    throw std::invalid_argument("unknown weight offset " + offset);
  }
  format.group = group;
  return format;
}

Instruction parse_instruction(Model& model, const std::vector<std::shared_ptr<PackedWeight>>& weights,
                              const std::string& op, const nb::list& operands, const nb::dict& attributes,
                              const std::string& label) {
  Inputs inputs = parse_inputs(model, weights, operands, label);
  Instruction in{};
  in.label = label;
  const auto output = nb::cast<nb::tuple>(operands[0]);
  if (nb::cast<std::string>(output[0]) == "view") in.out = parse_view(output, model.arena(), model.limits(), label);
  if (!inputs.views.empty()) in.in = inputs.views[0];
  if (inputs.views.size() > 1) in.second = inputs.views[1];
  in.weight = inputs.weight;
  in.vector = inputs.vector;
  in.group = inputs.group;
  in.layer = inputs.layer;
  const bool bf16 = model.limits().kv_bf16;
  const auto choose = [&](Op row_op, WeightKind kind = WeightKind::kF32) {
    return choose_row(row_op, kind, model.force());
  };
  if ((op == "embed" || op == "linear") && !in.weight) bad(label, "weight is missing");
  if ((op == "kv_write" || op == "attention") && in.group < 0) bad(label, "KV layer is missing");
  if ((op == "rms_norm" || op == "rope_table") && in.vector < 0) bad(label, "vector is missing");
  if (op == "embed") {
    in.code = OpCode::kEmbed;
    in.scale = attribute<float>(attributes, "scale", label);
    if (in.out.columns != in.weight->k()) bad(label, "embedding width does not fit");
  } else if (op == "rms_norm") {
    in.code = OpCode::kRmsNorm;
    in.row = choose(Op::kRmsNorm);
    in.epsilon = attribute<float>(attributes, "eps", label);
    in.width = attribute<int32_t>(attributes, "width", label);
    if (in.width < 1 || in.out.columns % in.width != 0 || in.in.columns != in.out.columns)
      bad(label, "width does not divide the columns");
    if (static_cast<int32_t>(model.vector(in.vector).size()) != in.width) bad(label, "norm weight does not fit");
  } else if (op == "quantize") {
    in.code = OpCode::kQuantize;
    in.row = choose(in.out.kind == ActivationKind::kBf16 ? Op::kQuantizeBf16 : Op::kQuantizeInt8);
    if (in.in.columns != in.out.columns || in.out.columns != in.out.buffer_columns) bad(label, "columns do not fit");
  } else if (op == "linear") {
    in.code = OpCode::kLinear;
    in.row = in.weight->row();
    in.accumulate = attribute<int32_t>(attributes, "accumulate", label) != 0;
    check_linear(model, in, label);
  } else if (op == "rope_table") {
    in.code = OpCode::kRopeTable;
    in.scale = attribute<float>(attributes, "attention_factor", label);
    if (static_cast<size_t>(in.out.columns) != 2 * model.vector(in.vector).size())
      bad(label, "table width does not fit");
  } else if (op == "rope") {
    in.code = OpCode::kRope;
    in.row = choose(Op::kRope);
    in.head_dim = attribute<int32_t>(attributes, "head_dim", label);
    if (in.head_dim < 2 || in.out.columns % in.head_dim != 0 || in.second.columns > in.head_dim)
      bad(label, "heads do not fit the view");
    if (in.second.columns != in.second.buffer_columns) bad(label, "the rope table must be a whole buffer");
  } else if (op == "kv_write") {
    in.code = OpCode::kKvWrite;
    in.row = choose(bf16 ? Op::kKvWriteBf16 : Op::kKvWriteF32);
    const KvGroup& group = model.groups()[static_cast<size_t>(in.group)];
    in.heads = in.kv_heads = group.kv_heads, in.head_dim = group.head_dim;
    check_heads(in, label);
    if (in.in.columns != in.kv_heads * in.head_dim || in.second.columns != in.in.columns ||
        in.second.buffer_columns != in.in.buffer_columns) {
      bad(label, "k and v do not fit the KV group");
    }
  } else if (op == "attention") {
    in.code = OpCode::kAttention;
    in.row = choose(bf16 ? Op::kAttentionBf16 : Op::kAttentionF32);
    in.scale = attribute<float>(attributes, "scale", label);
    in.window = attribute<int32_t>(attributes, "window", label);
    in.heads = attribute<int32_t>(attributes, "heads", label);
    in.kv_heads = attribute<int32_t>(attributes, "kv_heads", label);
    in.head_dim = attribute<int32_t>(attributes, "head_dim", label);
    const KvGroup& group = model.groups()[static_cast<size_t>(in.group)];
    check_heads(in, label);
    if (group.kv_heads != in.kv_heads || group.head_dim != in.head_dim) bad(label, "heads do not fit the KV group");
    if (in.in.columns != in.heads * in.head_dim || in.out.columns != in.in.columns)
      bad(label, "q does not fit the heads");
  } else if (op == "silu_mul" || op == "gelu_tanh_mul") {
    in.code = OpCode::kGated;
    in.row = choose(op == "silu_mul" ? Op::kSiluMul : Op::kGeluTanhMul);
    if (in.in.columns != 2 * in.out.columns) bad(label, "gate and up do not fit");
  } else if (op == "add") {
    in.code = OpCode::kAdd;
    in.row = choose(Op::kAdd);
    if (in.second.columns != in.out.columns) bad(label, "columns do not fit");
  } else if (op == "gather_rows") {
    in.code = OpCode::kGatherRows;
    if (in.in.columns != in.out.columns) bad(label, "columns do not fit");
  } else {
    bad(label, "unknown op " + op);
  }
  return in;
}

}  // namespace neoserve::bind
