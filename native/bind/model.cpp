#include "bind/bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "bind/operands.h"
#include "exec/model.h"

namespace neoserve::bind {
namespace {

using HostArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
template <class T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

size_t element_bytes(const HostArray& array) {
  return array.itemsize();
}

const void* checked(const std::optional<HostArray>& array, size_t count, size_t bytes, const char* name) {
  if (!array) throw std::invalid_argument(std::string(name) + " is missing");
  if (array->size() != count || element_bytes(*array) != bytes) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(array->size()) + " elements of " +
                                std::to_string(element_bytes(*array)) + " bytes; expected " + std::to_string(count) +
                                " of " + std::to_string(bytes));
  }
  return array->data();
}

std::shared_ptr<PackedWeight> make_weight(const std::string& kind, int32_t n, int32_t k, int32_t group,
                                          const std::string& scale_type, const std::string& offset,
                                          const std::string& force) {
  const WeightFormat format = parse_format(kind, group, scale_type, offset);
  return std::make_shared<PackedWeight>(format, n, k, choose_row(Op::kLinear, format.kind, parse_force(force)));
}

void put_rows(PackedWeight& weight, int32_t row_begin, const HostArray& values, std::optional<HostArray> scales,
              std::optional<HostArray> minimums, std::optional<HostArray> zeros) {
  const WeightFormat& format = weight.format();
  const auto k = static_cast<size_t>(weight.k());
  if (values.ndim() != 2 || values.shape(1) != k) throw std::invalid_argument("values must be [rows, K]");
  const size_t rows = values.shape(0);
  const size_t bytes = format.kind == WeightKind::kF32 ? 4 : format.kind == WeightKind::kBf16 ? 2 : 1;
  CanonicalRows packed{
      row_begin, static_cast<int32_t>(rows), checked(values, rows * k, bytes, "values"), nullptr, nullptr, nullptr};
  const size_t scale = format.scale_type == ScaleType::kF16 ? 2 : 4, groups = static_cast<size_t>(weight.groups());
  const auto unused = [](const std::optional<HostArray>& array, const char* name, bool used) {
    if (array && !used) throw std::invalid_argument(std::string(name) + " are given, but the weight's format has none");
  };
  unused(scales, "scales", groups > 0 || format.kind == WeightKind::kInt8Channel);
  unused(minimums, "minimums", format.offset == Offset::kMinimum);
  unused(zeros, "zeros", format.offset == Offset::kZero);
  if (format.kind == WeightKind::kInt8Channel) packed.scales = checked(scales, rows, 4, "scales");
  if (groups > 0) {
    packed.scales = checked(scales, rows * groups, scale, "scales");
    if (format.offset == Offset::kMinimum) packed.minimums = checked(minimums, rows * groups, scale, "minimums");
    if (format.offset == Offset::kZero)
      packed.zeros = static_cast<const uint8_t*>(checked(zeros, rows * groups, 1, "zeros"));
  }
  nb::gil_scoped_release release;
  weight.put(packed);
}

void check_limit(const char* name, int32_t value, int32_t most) {
  if (value >= 1 && value <= most) return;
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be in [1, " +
                              std::to_string(most) + "]");
}

// The bound model with what Python builds it from.
struct Session {
  Session(int threads, size_t arena_bytes, ModelLimits limits, const std::string& force, std::vector<int> cpus)
      : model(std::make_unique<Model>(threads, std::move(cpus), arena_bytes, limits, parse_force(force))) {}

  // Frees weights, pages and threads. Numpy views of the step's arrays may outlive this: their memory stays.
  void close() {
    const std::lock_guard<std::mutex> lock(use);
    if (!model) return;
    retired_arrays = std::move(model->arrays());
    retired_arena = std::move(model->arena());
    for (KvGroup& group : model->groups()) retired_tables.push_back(std::move(group.block_tables));
    model.reset();
    weights.clear();
  }

  Model& open() {
    if (!model) throw std::runtime_error("the model is closed");
    return *model;
  }

  std::mutex use;  // held by what runs without the interpreter lock: a step, a draw, closing
  std::unique_ptr<Model> model;
  std::vector<std::shared_ptr<PackedWeight>> weights;
  StepArrays retired_arrays;
  Memory retired_arena;
  std::vector<std::vector<int32_t>> retired_tables;
};

template <class T>
nb::ndarray<nb::numpy, T> view(T* data, std::initializer_list<size_t> shape, nb::handle owner) {
  return nb::ndarray<nb::numpy, T>(data, shape, owner);
}

nb::dict step_arrays(Session& self) {
  Model& model = self.open();
  StepArrays& arrays = model.arrays();
  const nb::object owner = nb::find(&self);
  nb::dict out;
  const auto put = [&](const char* name, std::vector<int32_t>& values) {
    out[name] = view(values.data(), {values.size()}, owner);
  };
  put("token_ids", arrays.token_ids);
  put("positions", arrays.positions);
  put("query_start", arrays.query_start);
  put("context_len", arrays.context_len);
  put("logit_rows", arrays.logit_rows);
  nb::list tables;
  const ModelLimits& limits = model.limits();
  for (KvGroup& group : model.groups()) {
    tables.append(view(group.block_tables.data(),
                       {static_cast<size_t>(limits.max_sequences), static_cast<size_t>(limits.max_pages_per_sequence)},
                       owner));
  }
  out["block_tables"] = tables;
  return out;
}

template <class T>
const T* field(const nb::dict& batch, const char* name, size_t count) {
  if (!batch.contains(name)) throw std::invalid_argument(std::string("sampling batch: ") + name + " is missing");
  // No conversion: it would make a copy that dies with `array`, and the caller keeps the pointer.
  Input<T> array;
  if (!nb::try_cast(batch[name], array, false)) {
    throw std::invalid_argument(std::string("sampling batch: ") + name +
                                " must be a contiguous one-dimensional array of the type that SamplingBatch gives it");
  }
  if (array.size() < count) {
    throw std::invalid_argument(std::string("sampling batch: ") + name + " has " + std::to_string(array.size()) +
                                " entries; expected " + std::to_string(count));
  }
  return array.data();
}

// A ragged list: checks the bounds of its starts and that every id is inside the vocabulary.
const int32_t* ragged(const nb::dict& batch, const char* start_name, const char* id_name, size_t rows,
                      int32_t vocabulary, const int32_t*& ids) {
  const int32_t* start = field<int32_t>(batch, start_name, rows + 1);
  for (size_t r = 0; r < rows; ++r) {
    if (start[r] < 0 || start[r + 1] < start[r])
      throw std::invalid_argument(std::string("sampling batch: ") + start_name + " must ascend");
  }
  ids = field<int32_t>(batch, id_name, static_cast<size_t>(start[rows]));
  for (int32_t i = start[0]; i < start[rows]; ++i) {
    if (ids[i] < 0 || ids[i] >= vocabulary) {
      throw std::invalid_argument(std::string("sampling batch: ") + id_name + " has id " + std::to_string(ids[i]) +
                                  " outside the vocabulary of " + std::to_string(vocabulary));
    }
  }
  return start;
}

template <class T>
nb::ndarray<nb::numpy, T> owned(std::vector<T>* values, std::initializer_list<size_t> shape) {
  nb::capsule owner(values, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(values->data(), shape, owner);
}

// How many ids, from 0, log probabilities are over: all when the batch does not say.
int32_t valid_vocabulary(const nb::dict& batch, int32_t vocabulary) {
  if (!batch.contains("valid_vocabulary")) return vocabulary;
  int32_t valid = 0;
  if (!nb::try_cast(batch["valid_vocabulary"], valid, false) || valid < 1) {
    throw std::invalid_argument("sampling batch: valid_vocabulary must be an integer of at least 1");
  }
  return std::min(valid, vocabulary);
}

nb::tuple sample(Session& self, const nb::dict& batch) {
  Model& model = self.open();
  const auto rows = static_cast<size_t>(model.logit_rows());
  const int32_t vocabulary = model.vocabulary();
  SampleInputs in{};
  in.rows = model.logit_rows();
  in.temperature = field<float>(batch, "temperature", rows);
  in.top_p = field<float>(batch, "top_p", rows);
  in.min_p = field<float>(batch, "min_p", rows);
  in.repetition_penalty = field<float>(batch, "repetition_penalty", rows);
  in.presence_penalty = field<float>(batch, "presence_penalty", rows);
  in.frequency_penalty = field<float>(batch, "frequency_penalty", rows);
  in.top_k = field<int32_t>(batch, "top_k", rows);
  in.seed = field<uint64_t>(batch, "seed", rows);
  in.position = field<int32_t>(batch, "position", rows);
  in.num_logprobs = field<int32_t>(batch, "num_logprobs", rows);
  in.history_start = ragged(batch, "history_start", "history_tokens", rows, vocabulary, in.history_tokens);
  in.history_output_counts =
      field<int32_t>(batch, "history_output_counts", static_cast<size_t>(in.history_start[rows]));
  in.bias_start = ragged(batch, "bias_start", "bias_tokens", rows, vocabulary, in.bias_tokens);
  in.bias_values = field<float>(batch, "bias_values", static_cast<size_t>(in.bias_start[rows]));
  in.forbidden_start = ragged(batch, "forbidden_start", "forbidden_tokens", rows, vocabulary, in.forbidden_tokens);
  in.valid_vocabulary = valid_vocabulary(batch, vocabulary);
  int32_t alternatives = 0;
  for (size_t r = 0; r < rows; ++r)
    alternatives = std::max(alternatives, std::min(in.num_logprobs[r], in.valid_vocabulary));
  const auto columns = static_cast<size_t>(alternatives);
  auto ids = std::make_unique<std::vector<int32_t>>(rows),
       top_ids = std::make_unique<std::vector<int32_t>>(rows * columns);
  auto logprobs = std::make_unique<std::vector<float>>(rows),
       top = std::make_unique<std::vector<float>>(rows * columns);
  const SampleOutputs out{alternatives, ids->data(), logprobs->data(), top_ids->data(), top->data()};
  {
    nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(self.use);
    self.open().sample(in, out);
  }
  auto a = owned(ids.release(), {rows});
  auto b = owned(logprobs.release(), {rows});
  auto c = owned(top_ids.release(), {rows, columns});
  auto d = owned(top.release(), {rows, columns});
  return nb::make_tuple(a, b, c, d);
}

nb::list rows_of(Session& self) {
  nb::list out;
  for (const Instruction& instruction : self.open().instructions()) {
    out.append(nb::make_tuple(instruction.label, instruction.row ? op_name(instruction.row->op) : "move",
                              instruction.row ? instruction.row->name : ""));
  }
  return out;
}

}  // namespace

void bind_model(nb::module_& m) {
  nb::class_<PackedWeight>(m, "PackedWeight", "A [n, k] weight in the packed layout of the kernel row chosen for it.")
      .def("__init__", [](PackedWeight*, nb::args) { throw nb::type_error("use pack_weight"); })
      .def("put_rows", &put_rows, nb::arg("row_begin"), nb::arg("values"), nb::arg("scales").none() = nb::none(),
           nb::arg("minimums").none() = nb::none(), nb::arg("zeros").none() = nb::none(),
           "Packs rows [row_begin, row_begin + len(values)) of values [rows, k].")
      .def(
          "gather",
          [](const PackedWeight& self, int32_t n) {
            if (n < 0 || n >= self.n()) throw std::out_of_range("row outside the weight");
            auto out = std::make_unique<std::vector<float>>(static_cast<size_t>(self.k()));
            self.gather(n, 1.0f, out->data());
            return owned(out.release(), {static_cast<size_t>(self.k())});
          },
          nb::arg("n"), "Dequantised row n as float32 [k].")
      .def_prop_ro("nbytes", &PackedWeight::bytes)
      .def_prop_ro("row_name", [](const PackedWeight& self) { return self.row()->name; });
  m.def("pack_weight", &make_weight, nb::arg("kind"), nb::arg("n"), nb::arg("k"), nb::arg("group") = 0,
        nb::arg("scale_type") = "", nb::arg("offset") = "none", nb::arg("force") = "",
        "An empty PackedWeight; fill it with put_rows. ValueError when K and the group do not fit.");

  nb::class_<Session>(m, "Model", "A bound program and its memory; see neoserve/program/native.py.")
      .def(
          "__init__",
          [](Session* self, int threads, size_t arena_bytes, int32_t max_tokens, int32_t max_sequences,
             int32_t max_rows, int32_t max_pages_per_sequence, int32_t page_size, const std::string& kv_dtype,
             const std::string& force, std::vector<int> cpus) {
            if (kv_dtype != "f32" && kv_dtype != "bf16") {
              throw std::invalid_argument("kv_dtype is \"" + kv_dtype + "\"; it must be f32 or bf16");
            }
            check_limit("threads", threads, 1024);
            check_limit("max_tokens", max_tokens, INT32_MAX);
            check_limit("max_sequences", max_sequences, INT32_MAX - 1);
            check_limit("max_rows", max_rows, INT32_MAX);
            check_limit("page_size", page_size, 1 << 16);
            if (page_size % 16 != 0) {
              throw std::invalid_argument("page_size is " + std::to_string(page_size) +
                                          "; it must be a multiple of 16");
            }
            check_limit("max_pages_per_sequence", max_pages_per_sequence, INT32_MAX / page_size);
            const ModelLimits limits{max_tokens, max_sequences,     max_rows, max_pages_per_sequence,
                                     page_size,  kv_dtype == "bf16"};
            new (self) Session(threads, arena_bytes, limits, force, std::move(cpus));
          },
          nb::arg("threads"), nb::arg("arena_bytes"), nb::arg("max_tokens"), nb::arg("max_sequences"),
          nb::arg("max_rows"), nb::arg("max_pages_per_sequence"), nb::arg("page_size"), nb::arg("kv_dtype"),
          nb::arg("force") = "", nb::arg("cpus") = std::vector<int>{})
      .def(
          "add_group",
          [](Session& self, int32_t layers, int32_t heads, int32_t dim, int32_t pages) {
            return self.open().add_group(layers, heads, dim, pages);
          },
          nb::arg("num_layers"), nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("num_pages"),
          "Returns the bytes of one page.")
      .def(
          "add_vector",
          [](Session& self, const Input<float>& values) {
            return self.open().add_vector(std::vector<float>(values.data(), values.data() + values.size()));
          },
          nb::arg("values"))
      .def(
          "add_weight",
          [](Session& self, std::shared_ptr<PackedWeight> weight) {
            self.weights.push_back(std::move(weight));
            return self.weights.size() - 1;
          },
          nb::arg("weight"))
      .def(
          "add_op",
          [](Session& self, const std::string& op, const nb::list& operands, const nb::dict& attributes,
             const std::string& label, bool joins) {
            Model& model = self.open();
            Instruction instruction = parse_instruction(model, self.weights, op, operands, attributes, label);
            instruction.joins = joins;
            model.add(std::move(instruction));
          },
          nb::arg("op"), nb::arg("operands"), nb::arg("attributes"), nb::arg("label"), nb::arg("joins") = false,
          "`joins`: no barrier before this instruction (neoserve/program/phases.py says when that is sound).")
      .def("step_arrays", &step_arrays, "Writable int32 views of the step's inputs, named as in StepInput.")
      .def(
          "arena",
          [](Session& self) {
            Memory& arena = self.open().arena();
            return view(arena.data(), {arena.size()}, nb::find(&self));
          },
          "The activation arena as uint8 (kernel tests).")
      .def(
          "forward",
          [](Session& self, int32_t tokens, int32_t sequences, int32_t rows) {
            const std::lock_guard<std::mutex> lock(self.use);
            self.open().forward(tokens, sequences, rows);
          },
          nb::arg("num_tokens"), nb::arg("num_sequences"), nb::arg("num_rows"),
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "logits",
          [](Session& self) {
            Model& model = self.open();
            return view(const_cast<float*>(model.logits()),
                        {static_cast<size_t>(model.logit_rows()), static_cast<size_t>(model.vocabulary())},
                        nb::find(&self));
          },
          "Logits [rows, vocabulary] of the last forward: a view that the next forward overwrites.")
      .def("sample", &sample, nb::arg("batch"),
           "(token_ids, logprobs, top_ids, top_logprobs) for a dict of SamplingBatch arrays.")
      .def(
          "set_profiling", [](Session& self, bool on) { self.open().set_profiling(on); }, nb::arg("on"))
      .def(
          "profile",
          [](Session& self) {
            nb::list out;
            for (const Instruction& i : self.open().instructions())
              out.append(nb::make_tuple(i.label, i.row ? i.row->name : "", i.seconds));
            return out;
          },
          "(label, row, seconds) per instruction since profiling was set.")
      .def("rows", &rows_of, "(label, op, row) per instruction.")
      .def("close", &Session::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace neoserve::bind
