#include "bind/bindings.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "core/features.h"
#include "core/identity.h"
#include "core/memory.h"
#include "core/thread_pool.h"
#include "cpus/cores.h"
#include "exec/registry.h"
#include "exec/sampler.h"
#include "exec/trigonometry.h"

namespace neoserve::bind {
namespace {

namespace nb = nanobind;

constexpr Op kOps[] = {Op::kLinear,     Op::kRmsNorm,     Op::kQuantizeBf16, Op::kQuantizeInt8,
                       Op::kRope,       Op::kSiluMul,     Op::kGeluTanhMul,  Op::kAdd,
                       Op::kKvWriteF32, Op::kKvWriteBf16, Op::kAttentionF32, Op::kAttentionBf16};

const char* kind_name(WeightKind kind) {
  switch (kind) {
    case WeightKind::kF32:
      return "f32";
    case WeightKind::kBf16:
      return "bf16";
    case WeightKind::kInt8Channel:
      return "int8_channel";
    case WeightKind::kInt8Group:
      return "int8_group";
    case WeightKind::kInt4Group:
      return "int4_group";
  }
  return "";
}

void explain(nb::list& out, Op op, WeightKind kind, const Force& force) {
  const std::string name = op == Op::kLinear ? std::string("linear_") + kind_name(kind) : op_name(op);
  for (const Verdict& verdict : explain_rows(op, kind, force)) {
    out.append(nb::make_tuple(name, verdict.row->name, verdict.folder, verdict.reason.empty(), verdict.reason));
  }
}

nb::list rows(const std::string& force_name) {
  const Force force = parse_force(force_name);
  nb::list out;
  for (Op op : kOps) {
    if (op != Op::kLinear) {
      explain(out, op, WeightKind::kF32, force);
      continue;
    }
    for (WeightKind kind : {WeightKind::kF32, WeightKind::kBf16, WeightKind::kInt8Channel, WeightKind::kInt8Group,
                            WeightKind::kInt4Group}) {
      explain(out, op, kind, force);
    }
  }
  return out;
}

// Best of several rounds: amount of all threads per second.
double measure(Op op, int threads, size_t amount, const uint8_t* data, size_t bytes_per_thread, int rounds) {
  const Row* row = choose_row(op, WeightKind::kF32, {});
  ThreadPool pool(threads, {});
  std::vector<float> sinks(static_cast<size_t>(threads) * 16);
  double best = 0;
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    pool.run([&](int thread) {
      const auto index = static_cast<size_t>(thread);
      row->run.measure({data + index * bytes_per_thread, amount, &sinks[index * 16]});
    });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, static_cast<double>(amount) * threads / seconds);
  }
  return best;
}

nb::list described(const std::vector<CoreIdentity>& identities) {
  nb::list out;
  for (const CoreIdentity& identity : identities) {
    const Core* core = find_core(identity);
    out.append(nb::make_tuple(identity.text(), core ? core->name : "", core ? core->products : ""));
  }
  return out;
}

void check_threads(int threads) {
  if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be in [1, 1024]");
}

double read_bandwidth(int threads, size_t bytes) {
  check_threads(threads);
  const size_t share = bytes / static_cast<size_t>(threads) / 4096 * 4096;
  if (share == 0) throw std::invalid_argument("bytes must be at least 4096 a thread");
  const Memory memory(share * static_cast<size_t>(threads));
  for (size_t i = 0; i < memory.size(); i += 64) memory.data()[i] = 1;  // untouched pages would all be one zero page
  return measure(Op::kMeasureRead, threads, share, memory.data(), share, 7) / 1e9;
}

double arithmetic_peak(Op op, int threads) {
  check_threads(threads);
  return 2 * measure(op, threads, op == Op::kMeasureInt8 ? size_t{1} << 31 : size_t{1} << 29, nullptr, 0, 5) / 1e9;
}

}  // namespace

void bind_machine(nb::module_& m) {
  m.def(
      "cpu_features", [] { return feature_names(detect_features()); },
      "Names of the instruction-set extensions found.");
  m.def(
      "cores", [](const std::vector<int>& cpus) { return described(core_identities(cpus)); },
      nb::arg("cpus") = std::vector<int>{},
      "(identity, name, products) of the different cores among `cpus` (default: the affinity mask); name and products "
      "are empty for a core that is served by its feature bits alone.");
  m.def(
      "arm_cores",
      [](const std::string& root, const std::vector<int>& cpus, uint64_t midr) {
        return described(arm_identities(root, cpus, midr));
      },
      nb::arg("root"), nb::arg("cpus"), nb::arg("midr"),
      "cores() as an AArch64 machine with the files under `root` and this MIDR_EL1 (0: not readable) would give it.");
  m.def(
      "cpuid_core",
      [](const std::string& vendor, uint32_t signature) { return described({from_cpuid(vendor, signature)}); },
      nb::arg("vendor"), nb::arg("signature"), "cores() of an x86-64 CPU with this CPUID vendor and leaf 1 EAX.");
  m.def("sve_vector_bytes", &sve_vector_bytes, "SVE vector length in bytes; 0 without SVE.");
  m.def("rows", &rows, nb::arg("force") = "",
        "(op, row, feature set, chosen, reason) for every op, preferred first. ValueError on a bad force.");
  m.def(
      "folders",
      [] {
        std::vector<std::string> names;
        for (const Verdict& verdict : all_rows()) {
          if (names.empty() || names.back() != verdict.folder) names.emplace_back(verdict.folder);
        }
        return names;
      },
      "Feature sets of this build, preferred first.");
  m.def(
      "relaxed_rows",
      [] {
        std::vector<std::string> names;
        for (const Verdict& verdict : all_rows()) {
          if (verdict.row->relaxed) names.emplace_back(verdict.row->name);
        }
        return names;
      },
      "Rows of this build that do not give the reference's bits (docs/ops.md).");
  m.def("measure_read_bandwidth", &read_bandwidth, nb::arg("threads"), nb::arg("bytes"),
        nb::call_guard<nb::gil_scoped_release>(),
        "GB/s of all threads streaming over `bytes` together, best of seven rounds.");
  m.def(
      "measure_int8_peak", [](int threads) { return arithmetic_peak(Op::kMeasureInt8, threads); }, nb::arg("threads"),
      nb::call_guard<nb::gil_scoped_release>(),
      "GOP/s (two operations a multiply-accumulate) of the int8 dot product in registers.");
  m.def(
      "measure_f32_peak", [](int threads) { return arithmetic_peak(Op::kMeasureF32, threads); }, nb::arg("threads"),
      nb::call_guard<nb::gil_scoped_release>(), "GFLOP/s of fused multiply-add in registers.");
  m.def("uniform", &uniform, nb::arg("seed"), nb::arg("position"), "The sampler's random number for (seed, position).");
  m.def(
      "cos_sin",
      [](double angle) {
        double cosine, sine;
        cos_sin(angle, cosine, sine);
        return nb::make_tuple(cosine, sine);
      },
      nb::arg("angle"), "The rope table's cosine and sine.");
}

}  // namespace neoserve::bind
