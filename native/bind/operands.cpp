#include "bind/operands.h"

#include <nanobind/stl/string.h>

#include <cstdlib>
#include <stdexcept>

namespace neoserve::bind {
namespace {

[[noreturn]] void bad(const std::string& label, const std::string& what) {
  throw std::invalid_argument("instruction " + label + ": " + what);
}

size_t bytes_of(const ViewOperand& view, size_t rows) {
  const auto columns = static_cast<size_t>(view.buffer_columns);
  if (view.kind != ActivationKind::kInt8) return rows * columns * (view.kind == ActivationKind::kF32 ? 4 : 2);
  // Values, scales, sums: neoserve/program/plan.py, buffer_layout.
  const size_t scales = rows * (columns / static_cast<size_t>(view.group)) * 4;
  return rows * round_up(columns, kCacheLine) + round_up(scales, kCacheLine) + scales;
}

void parse_activation(ViewOperand& view, const std::string& format, const std::string& label) {
  if (format == "f32") {
    view.kind = ActivationKind::kF32;
  } else if (format == "bf16") {
    view.kind = ActivationKind::kBf16;
  } else if (format == "int8_token" || format.rfind("int8_g", 0) == 0) {
    view.kind = ActivationKind::kInt8;
    view.group = format == "int8_token" ? view.buffer_columns : std::atoi(format.c_str() + 6);
    if (view.group < 1 || view.buffer_columns % view.group != 0) bad(label, "columns are not a multiple of the group");
    if (view.columns != view.buffer_columns) bad(label, "an int8 view must span its buffer");
  } else {
    bad(label, "unknown activation format " + format);
  }
}

ViewOperand parse_view(const nb::tuple& operand, const Memory& arena, const ModelLimits& limits,
                       const std::string& label) {
  ViewOperand view;
  view.offset = nb::cast<size_t>(operand[1]);
  view.buffer_columns = nb::cast<int32_t>(operand[2]);
  view.column = nb::cast<int32_t>(operand[3]);
  view.columns = nb::cast<int32_t>(operand[4]);
  const auto symbol = nb::cast<std::string>(operand[6]);
  if (symbol != "tokens" && symbol != "rows") bad(label, "unknown symbol " + symbol);
  view.symbol = symbol == "tokens" ? Symbol::kTokens : Symbol::kRows;
  if (view.columns < 1 || view.column < 0 || view.column > view.buffer_columns - view.columns)
    bad(label, "view outside its buffer");
  parse_activation(view, nb::cast<std::string>(operand[5]), label);
  const auto rows = static_cast<size_t>(view.symbol == Symbol::kTokens ? limits.max_tokens : limits.max_rows);
  if (view.offset % 4 != 0 || view.offset > arena.size() || bytes_of(view, rows) > arena.size() - view.offset) {
    bad(label, "view outside the arena");
  }
  return view;
}

int32_t checked_index(const nb::handle& index, size_t count, const char* what, const std::string& label) {
  const auto value = nb::cast<int64_t>(index);
  if (value < 0 || static_cast<size_t>(value) >= count)
    bad(label, std::string("there is no ") + what + " " + std::to_string(value));
  return static_cast<int32_t>(value);
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
      found.weight = weights[static_cast<size_t>(checked_index(operand[1], weights.size(), "weight", label))];
    } else if (kind == "vector") {
      found.vector = checked_index(operand[1], model.vectors(), "vector", label);
    } else if (kind == "kv") {
      found.group = checked_index(operand[1], model.groups().size(), "KV group", label);
      const KvGroup& group = model.groups()[static_cast<size_t>(found.group)];
      found.layer = checked_index(operand[2], static_cast<size_t>(group.layers), "KV layer", label);
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

// What the operands of an op must be, beyond their shapes: a wrong format or row count would be a read past a buffer.
struct Shape {
  OpCode code;
  size_t views;           // among the inputs
  bool writes;            // has an output view
  ActivationKind source;  // of the input views; linear compares with the weight instead
};

Shape shape_of(const std::string& op, const std::string& label) {
  constexpr auto kF32 = ActivationKind::kF32;
  if (op == "embed") return {OpCode::kEmbed, 0, true, kF32};
  if (op == "rms_norm") return {OpCode::kRmsNorm, 1, true, kF32};
  if (op == "quantize") return {OpCode::kQuantize, 1, true, kF32};
  if (op == "linear") return {OpCode::kLinear, 1, true, kF32};
  if (op == "rope_table") return {OpCode::kRopeTable, 0, true, kF32};
  if (op == "rope") return {OpCode::kRope, 2, true, kF32};
  if (op == "kv_write") return {OpCode::kKvWrite, 2, false, kF32};
  if (op == "attention") return {OpCode::kAttention, 1, true, kF32};
  if (op == "silu_mul" || op == "gelu_tanh_mul") return {OpCode::kGated, 1, true, kF32};
  if (op == "add") return {OpCode::kAdd, 2, true, kF32};
  if (op == "gather_rows") return {OpCode::kGatherRows, 1, true, kF32};
  bad(label, "unknown op " + op);
}

// Ops that index the step's per-token arrays or the pages.
bool per_token(OpCode code) {
  return code == OpCode::kEmbed || code == OpCode::kRopeTable || code == OpCode::kRope || code == OpCode::kKvWrite ||
         code == OpCode::kAttention;
}

void check_views(const Instruction& in, const Shape& shape, const Inputs& inputs, bool has_output) {
  if (inputs.views.size() != shape.views || has_output != shape.writes) {
    bad(in.label, "expected " + std::to_string(shape.views) + " input views and " + (shape.writes ? "an" : "no") +
                      " output view");
  }
  for (const ViewOperand& view : inputs.views) {
    if (in.code != OpCode::kLinear && view.kind != shape.source) bad(in.label, "an input view must be f32");
  }
  if (has_output && (in.code == OpCode::kQuantize) == (in.out.kind == ActivationKind::kF32)) {
    bad(in.label, in.code == OpCode::kQuantize ? "the output view must not be f32" : "the output view must be f32");
  }
  const Symbol rows = in.code == OpCode::kGatherRows ? Symbol::kTokens : has_output ? in.out.symbol : Symbol::kTokens;
  for (const ViewOperand& view : inputs.views) {
    if (view.symbol != rows) bad(in.label, "operands mix tokens and rows");
  }
  if (has_output && per_token(in.code) && in.out.symbol != Symbol::kTokens)
    bad(in.label, "the output must have the symbol tokens");
  if (in.code == OpCode::kGatherRows && in.out.symbol != Symbol::kRows)
    bad(in.label, "the output must have the symbol rows");
  if (in.code == OpCode::kRope || in.code == OpCode::kAdd) {
    const bool in_place = in.in.offset == in.out.offset && in.in.column == in.out.column &&
                          in.in.columns == in.out.columns && in.in.buffer_columns == in.out.buffer_columns;
    if (!in_place) bad(in.label, "the first input must be the output");
  }
}

void check_heads(const Instruction& in) {
  if (in.head_dim < 16 || in.head_dim % 16 != 0) bad(in.label, "head_dim must be a multiple of 16");
  if (in.kv_heads < 1 || in.heads < 1 || in.heads % in.kv_heads != 0)
    bad(in.label, "heads must be a multiple of kv_heads");
}

// Completes an instruction whose operands have the right formats: attributes, row, and the agreement of the shapes.
class Binder {
 public:
  Binder(Model& model, const std::string& op, const nb::dict& attributes, Instruction& instruction)
      : model_(model), op_(op), attributes_(attributes), in_(instruction) {}

  void bind() {
    switch (in_.code) {
      case OpCode::kEmbed:
        if (!in_.weight) fail("weight is missing");
        in_.scale = number("scale");
        return need(in_.out.columns == in_.weight->k(), "embedding width does not fit");
      case OpCode::kRmsNorm:
        return rms_norm();
      case OpCode::kQuantize:
        in_.row = choose(in_.out.kind == ActivationKind::kBf16 ? Op::kQuantizeBf16 : Op::kQuantizeInt8);
        return need(in_.in.columns == in_.out.columns && in_.out.columns == in_.out.buffer_columns,
                    "columns do not fit");
      case OpCode::kLinear:
        return linear();
      case OpCode::kRopeTable:
        in_.scale = number("attention_factor");
        return need(static_cast<size_t>(in_.out.columns) == 2 * vector().size(), "table width does not fit");
      case OpCode::kRope:
        in_.row = choose(Op::kRope);
        in_.head_dim = integer("head_dim");
        need(in_.head_dim >= 2 && in_.out.columns % in_.head_dim == 0 && in_.second.columns <= in_.head_dim,
             "heads do not fit the view");
        return need(in_.second.columns == in_.second.buffer_columns && in_.second.columns % 2 == 0,
                    "the rope table must be a whole buffer of even width");
      case OpCode::kKvWrite:
        return kv_write();
      case OpCode::kAttention:
        return attention();
      case OpCode::kGated:
        in_.row = choose(op_ == "silu_mul" ? Op::kSiluMul : Op::kGeluTanhMul);
        return need(in_.in.columns == 2 * in_.out.columns, "gate and up do not fit");
      case OpCode::kAdd:
        in_.row = choose(Op::kAdd);
        return need(in_.second.columns == in_.out.columns, "columns do not fit");
      case OpCode::kGatherRows:
        return need(in_.in.columns == in_.out.columns, "columns do not fit");
    }
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { bad(in_.label, what); }
  void need(bool condition, const char* what) const {
    if (!condition) fail(what);
  }
  float number(const char* name) const { return attribute<float>(attributes_, name, in_.label); }
  int32_t integer(const char* name) const { return attribute<int32_t>(attributes_, name, in_.label); }
  const Row* choose(Op op) const { return choose_row(op, WeightKind::kF32, model_.force()); }
  const std::vector<float>& vector() const {
    if (in_.vector < 0) fail("vector is missing");
    return model_.vector(in_.vector);
  }
  const KvGroup& group() const {
    if (in_.group < 0) fail("KV layer is missing");
    return model_.groups()[static_cast<size_t>(in_.group)];
  }

  void rms_norm() {
    const auto size = static_cast<int32_t>(vector().size());
    in_.row = choose(Op::kRmsNorm);
    in_.epsilon = number("eps");
    in_.width = integer("width");
    need(in_.width >= 1 && in_.out.columns % in_.width == 0 && in_.in.columns == in_.out.columns,
         "width does not divide the columns");
    need(size == in_.width, "norm weight does not fit");
  }

  void linear() {
    if (!in_.weight) fail("weight is missing");
    const PackedWeight& weight = *in_.weight;
    in_.row = weight.row();
    in_.accumulate = integer("accumulate") != 0;
    need(in_.in.kind == activation_of(weight.format()), "activation format does not fit the weight");
    need(in_.in.columns == weight.k() && in_.out.columns == weight.n(), "shapes do not fit the weight");
    const int32_t group = weight.format().group ? weight.format().group : weight.k();
    need(in_.in.kind != ActivationKind::kInt8 || in_.in.group == group, "activation group does not fit the weight");
    // bf16 rows have no padding of their own, so an odd K would read the next row.
    need(weight.format().kind != WeightKind::kBf16 || weight.k() % 2 == 0, "bf16 needs an even K");
    need(in_.vector < 0 || static_cast<int32_t>(vector().size()) == weight.n(), "bias does not fit the weight");
  }

  void kv_write() {
    const KvGroup& kv = group();
    in_.row = choose(model_.limits().kv_bf16 ? Op::kKvWriteBf16 : Op::kKvWriteF32);
    in_.heads = in_.kv_heads = kv.kv_heads, in_.head_dim = kv.head_dim;
    check_heads(in_);
    need(in_.in.columns == in_.kv_heads * in_.head_dim && in_.second.columns == in_.in.columns &&
             in_.second.buffer_columns == in_.in.buffer_columns,
         "k and v do not fit the KV group");
  }

  void attention() {
    const KvGroup& kv = group();
    in_.row = choose(model_.limits().kv_bf16 ? Op::kAttentionBf16 : Op::kAttentionF32);
    in_.scale = number("scale");
    in_.window = integer("window");
    in_.heads = integer("heads");
    in_.kv_heads = integer("kv_heads");
    in_.head_dim = integer("head_dim");
    need(in_.window >= 0, "window must not be negative");
    check_heads(in_);
    need(kv.kv_heads == in_.kv_heads && kv.head_dim == in_.head_dim, "heads do not fit the KV group");
    need(in_.in.columns == in_.heads * in_.head_dim && in_.out.columns == in_.in.columns, "q does not fit the heads");
  }

  Model& model_;
  const std::string& op_;
  const nb::dict& attributes_;
  Instruction& in_;
};

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
  const bool grouped = format.kind == WeightKind::kInt8Group || format.kind == WeightKind::kInt4Group;
  const bool known = scale_type == "f32" || scale_type == (grouped ? "f16" : "");
  if (!known)
    throw std::invalid_argument("scale_type is \"" + scale_type + "\", which " + kind + " weights cannot have");
  if (!grouped && group != 0)
    throw std::invalid_argument("group is " + std::to_string(group) + "; " + kind + " weights have none");
  if (!grouped && offset != "none")
    throw std::invalid_argument("offset is \"" + offset + "\"; " + kind + " weights have none");
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
  const Shape shape = shape_of(op, label);
  Inputs inputs = parse_inputs(model, weights, operands, label);
  Instruction in{};
  in.code = shape.code;
  in.label = label;
  const auto output = nb::cast<nb::tuple>(operands[0]);
  const bool has_output = nb::cast<std::string>(output[0]) == "view";
  if (has_output) in.out = parse_view(output, model.arena(), model.limits(), label);
  if (!inputs.views.empty()) in.in = inputs.views[0];
  if (inputs.views.size() > 1) in.second = inputs.views[1];
  in.weight = inputs.weight;
  in.vector = inputs.vector;
  in.group = inputs.group;
  in.layer = inputs.layer;
  check_views(in, shape, inputs, has_output);
  Binder(model, op, attributes, in).bind();
  return in;
}

}  // namespace neoserve::bind
