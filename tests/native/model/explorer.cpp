#include "explorer.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <tuple>

#include "fiber.h"

namespace model {
namespace {

// Open addressing over 64-bit hashes of states; 0 is empty. Two states of one hash are taken for one: with 10^7 states
// the chance that this happens at all is 3 * 10^-6.
class Visited {
 public:
  Visited() : table_(1 << 20) {}
  bool insert(uint64_t hash) {
    if (hash == 0) hash = 1;
    if (2 * count_ >= table_.size()) grow();
    if (!place(table_, hash)) return false;
    ++count_;
    return true;
  }
  uint64_t count() const { return count_; }

 private:
  static bool place(std::vector<uint64_t>& table, uint64_t hash) {
    size_t i = hash & (table.size() - 1);
    while (table[i] != 0) {
      if (table[i] == hash) return false;
      i = (i + 1) & (table.size() - 1);
    }
    table[i] = hash;
    return true;
  }
  void grow() {
    std::vector<uint64_t> bigger(table_.size() * 2);
    for (uint64_t hash : table_)
      if (hash != 0) place(bigger, hash);
    table_.swap(bigger);
  }

  std::vector<uint64_t> table_;
  uint64_t count_ = 0;
};

// Four lanes, so that the multiplications overlap.
class Hash {
 public:
  void bytes(const void* data, size_t size) {
    const auto* at = static_cast<const uint8_t*>(data);
    for (; size >= 32; at += 32, size -= 32) {
      uint64_t words[4];
      std::memcpy(words, at, 32);
      for (size_t i = 0; i < 4; ++i) lanes_[i] = mix(lanes_[i], words[i]);
    }
    uint64_t words[4] = {0, 0, 0, size};
    std::memcpy(words, at, std::min<size_t>(size, 24));
    if (size > 24) std::memcpy(&words[3], at + 24, size - 24);
    for (size_t i = 0; i < 4; ++i) lanes_[i] = mix(lanes_[i], words[i]);
  }
  uint64_t value() const { return mix(mix(lanes_[0], lanes_[1]), mix(lanes_[2], lanes_[3])); }

 private:
  static uint64_t mix(uint64_t state, uint64_t word) {
    const auto product = static_cast<unsigned __int128>(state ^ word) * 0xd6e8feb86659fd93u;
    return (static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64)) + 0x243f6a8885a308d3u;
  }
  uint64_t lanes_[4] = {11, 22, 33, 44};
};

// What it takes to go on from a state once more.
struct Step {
  int thread, option;
};
struct Node {
  std::vector<uint8_t> bytes;
  std::vector<Step> steps;
  size_t next = 0;
  std::string taken;
};

struct World {
  Machine machine;
  std::array<Fiber, kMaxThreads> fiber;
  void* scheduler = nullptr;
  int running = -1;
  const char* fault = nullptr;
  Mutation mutation;
  uint32_t mutated = 0;  // bits of locations
  std::set<std::array<int, 4>> uses;
  void (*body)(int) = nullptr;
  int lifetime = -1;
  std::map<int, std::string> names;
};

World& world() {
  static World the_world;
  return the_world;
}

void enter() {
  World& w = world();
  w.body(w.running);
  w.machine.thread[static_cast<size_t>(w.running)].status = Status::kEnded;
  while (true) model_switch_stack(&w.fiber[static_cast<size_t>(w.running)].stack_pointer, w.scheduler);
}

void resume(int thread) {
  World& w = world();
  w.running = thread;
  Fiber& fiber = w.fiber[static_cast<size_t>(thread)];
  model_switch_stack(&w.scheduler, fiber.stack_pointer);
  fiber.clear_dead_bytes();
}

[[noreturn]] void fail(const char* what) {
  World& w = world();
  w.fault = what;
  while (true) model_switch_stack(&w.fiber[static_cast<size_t>(w.running)].stack_pointer, w.scheduler);
}

// Calls visit(data, size) for all bytes that make up the state.
template <class Visit>
void for_each_part(Visit visit) {
  World& w = world();
  Machine& m = w.machine;
  visit(&m.thread, sizeof m.thread[0] * static_cast<size_t>(m.threads));
  visit(&m.plain, sizeof m.plain[0] * static_cast<size_t>(m.plains));
  visit(&m.outcome, sizeof m.outcome);
  for (int x = 0; x < m.locations; ++x) {
    Location& l = m.location[static_cast<size_t>(x)];
    visit(&l, offsetof(Location, stores));
    visit(&l.stores, sizeof l.stores[0] * static_cast<size_t>(l.count));
  }
  for (int t = 0; t < m.threads; ++t) {
    Fiber& fiber = w.fiber[static_cast<size_t>(t)];
    visit(&fiber.stack_pointer, sizeof fiber.stack_pointer);
    if (m.thread[static_cast<size_t>(t)].status != Status::kEnded) visit(fiber.stack_pointer, fiber.used());
  }
}

void save(std::vector<uint8_t>& bytes) {
  bytes.clear();
  for_each_part([&](void* data, size_t size) {
    const auto* from = static_cast<uint8_t*>(data);
    bytes.insert(bytes.end(), from, from + size);
  });
}

// Sizes are read from parts that have been put back before them.
void put_back(const std::vector<uint8_t>& bytes) {
  const uint8_t* at = bytes.data();
  for_each_part([&](void* data, size_t size) {
    std::memcpy(data, at, size);
    at += size;
  });
}

uint64_t hash_state() {
  Hash hash;
  for_each_part([&](void* data, size_t size) { hash.bytes(data, size); });
  return hash.value();
}

const char* kind_name(Kind kind) {
  constexpr const char* kNames[] = {"load", "store", "add", "futex wait", "futex wake", "join"};
  return kNames[static_cast<size_t>(kind)];
}

std::string describe(const Step& step) {
  const Machine& m = world().machine;
  const Thread& t = m.thread[static_cast<size_t>(step.thread)];
  const Request& r = t.request;
  std::string text = "thread " + std::to_string(step.thread) + ": ";
  if (t.status == Status::kWoken) return text + "wakes";
  text += kind_name(r.kind);
  if (r.kind == Kind::kJoin) return text + " thread " + std::to_string(r.operand);
  text += " " + location_name(r.location);
  if (r.kind == Kind::kFutexWait) return text + (step.option == Machine::kSleep ? ", sleeps" : ", returns");
  if (r.kind == Kind::kFutexWake) return text;
  if (r.kind != Kind::kLoad) text += " " + std::to_string(static_cast<int64_t>(r.operand));
  text += " " + order_name(r.order);
  if (r.kind == Kind::kStore) return text + ", place " + std::to_string(step.option);
  const Location& l = m.location[r.location];
  text += ": reads " + std::to_string(static_cast<int64_t>(l.stores[static_cast<size_t>(step.option)].value));
  return text + (step.option + 1 < l.count ? " (not the latest)" : "");
}

class Explorer {
 public:
  Explorer(const Limits& limits, Result& result) : limits_(limits), result_(result) {}

  void run() {
    start_threads();
    if (world().fault == nullptr) visit();
    while (depth_ > 0 && result_.fault.empty()) {
      Node& node = nodes_[depth_ - 1];
      if (node.next == node.steps.size()) {
        --depth_;
        continue;
      }
      put_back(node.bytes);
      take(node, node.steps[node.next++]);
    }
    result_.states = visited_.count();
  }

 private:
  // Up to the first atomic operation of each thread; plain accesses before it are checked like all others.
  void start_threads() {
    World& w = world();
    for (int t = 0; t < w.machine.threads && w.fault == nullptr; ++t) {
      w.fiber[static_cast<size_t>(t)].start(enter);
      resume(t);
    }
    if (w.fault != nullptr) result_.fault = w.fault;
  }

  void take(Node& node, const Step& step) {
    World& w = world();
    ++result_.steps;
    taken_ = step;
    w.fault = nullptr;
    w.running = step.thread;
    (void)node;
    if (w.machine.perform(step.thread, step.option, &w.fault) &&
        w.machine.thread[static_cast<size_t>(step.thread)].status == Status::kReady) {
      resume(step.thread);
    }
    if (w.fault != nullptr) return report(w.fault);
    w.machine.normalise();
    visit();
  }

  void visit() {
    if (!visited_.insert(hash_state())) return;
    if (visited_.count() > limits_.states) return report("more states than the limit");
    World& w = world();
    if (depth_ == nodes_.size()) nodes_.emplace_back();
    Node& node = nodes_[depth_];
    node.steps.clear();
    node.next = 0;
    bool ended = true;
    for (int t = 0; t < w.machine.threads; ++t) {
      ended = ended && w.machine.thread[static_cast<size_t>(t)].status == Status::kEnded;
      const bool alone = limits_.reduce && w.machine.commutes(t);
      if (alone) node.steps.clear();
      uint32_t options = w.machine.options(t);
      for (int option = 0; options != 0; ++option, options >>= 1)
        if (options & 1) node.steps.push_back({t, option});
      if (alone) break;
    }
    if (ended) {
      result_.outcomes.insert(Outcome(w.machine.outcome.begin(), w.machine.outcome.end()));
      return;
    }
    if (node.steps.empty()) return report("deadlock: every thread that has not ended sleeps or waits");
    save(node.bytes);
    ++depth_;
  }

  void report(const char* what) {
    result_.fault = what;
    for (size_t i = 0; i < depth_; ++i) {
      put_back(nodes_[i].bytes);
      result_.trace.push_back(describe(nodes_[i].steps[nodes_[i].next - 1]));
    }
  }

  const Limits limits_;
  Result& result_;
  Visited visited_;
  std::vector<Node> nodes_;
  size_t depth_ = 0;
  Step taken_{};
};

}  // namespace

bool Use::operator<(const Use& other) const {
  return std::tie(site, location, kind, order) < std::tie(other.site, other.location, other.kind, other.order);
}

Result explore(const Scenario& scenario, const Mutation& mutation, const Limits& limits) {
  Result result;
  World& w = world();
  w.machine.clear(scenario.threads);
  w.names.clear();
  w.mutation = mutation;
  w.body = scenario.body;
  w.lifetime = -1;
  w.fault = nullptr;
  w.uses.clear();
  scenario.set_up();
  w.mutated = 0;
  for (const auto& [location, name] : w.names)
    if (name == mutation.location) w.mutated |= uint32_t{1} << location;
  Explorer(limits, result).run();
  for (const std::array<int, 4>& use : w.uses) {
    result.uses.insert({static_cast<uint8_t>(use[0]), location_name(use[1]), static_cast<Kind>(use[2]),
                        static_cast<std::memory_order>(use[3])});
  }
  scenario.take_down();
  return result;
}

std::string order_name(std::memory_order order) {
  switch (order) {
    case std::memory_order_relaxed:
      return "relaxed";
    case std::memory_order_acquire:
      return "acquire";
    case std::memory_order_release:
      return "release";
    case std::memory_order_acq_rel:
      return "acq_rel";
    default:
      return "seq_cst";
  }
}

std::string location_name(int location) {
  const auto found = world().names.find(location);
  return found == world().names.end() ? "atomic " + std::to_string(location) : found->second;
}

int new_location(uint64_t value, int lifetime) {
  return world().machine.add_location(value, lifetime);
}
int new_plain(uint64_t value) {
  return world().machine.add_plain(value);
}
void name_location(int location, const std::string& name) {
  world().names[location] = name;
}
int current_lifetime() {
  return world().lifetime;
}
void set_lifetime(int plain) {
  world().lifetime = plain;
}

uint64_t act(Kind kind, int location, int site, std::memory_order order, uint64_t operand) {
  World& w = world();
  const auto index = static_cast<size_t>(w.running);
  if (site >= 0) {
    w.uses.insert({site, location, static_cast<int>(kind), static_cast<int>(order)});
    if (w.mutation.site == site && (w.mutated >> location & 1) != 0) order = w.mutation.order;
  }
  Thread& t = w.machine.thread[index];
  t.request = {kind, static_cast<uint8_t>(location), static_cast<uint8_t>(site), 0, order, operand};
  t.result = 0;
  model_switch_stack(&w.fiber[index].stack_pointer, w.scheduler);
  const uint64_t result = t.result;
  t.result = 0;
  return result;
}

uint64_t read_plain(int variable) {
  World& w = world();
  if (!w.machine.read_plain(w.running, variable))
    fail("data race: plain data is read while not ordered after its last write");
  return w.machine.plain[static_cast<size_t>(variable)];
}

void write_plain(int variable, uint64_t value) {
  World& w = world();
  if (!w.machine.write_plain(w.running, variable)) {
    fail("data race: plain data is written while not ordered after its last accesses");
  }
  w.machine.plain[static_cast<size_t>(variable)] = value;
}

void outcome(int index, int64_t value) {
  world().machine.outcome[static_cast<size_t>(index)] = value;
}

void expect(bool condition, const char* what) {
  if (!condition) fail(what);
}

}  // namespace model
