// The synchronisation of the thread pool (native/core/sync.h, the code that ships) on every execution that the memory
// model allows; then each of its memory orders weakened, one at a time: the model must find what that breaks.
//   pool_model            the scenarios as they are
//   pool_model mutations  each order weakened
//   pool_model deep       larger scenarios, minutes
#include <cstdio>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "explorer.h"
#include "policy.h"

namespace {

using model::Kind;
using model::ModelSync;
using neoserve::Site;
using Barrier = neoserve::BasicBarrier<ModelSync>;
using Counter = neoserve::BasicChunkCounter<ModelSync>;

// A task as ThreadPool has it; `number` tells one run's from another's.
struct Task {
  int number = 0;
  void operator()(int thread) const;
};
using Crew = neoserve::BasicCrew<ModelSync, Task>;

// What the threads of a scenario share. Its atomics and its plain data live in the model's machine; everything else
// here is constant while threads run.
struct Shared {
  std::unique_ptr<Barrier> barrier;
  std::unique_ptr<Crew> crew;
  std::vector<std::unique_ptr<Counter>> counters;
  std::vector<std::unique_ptr<ModelSync::Plain<int>>> slots;
  int counter_end = -1;  // plain variable: 1 when the counter that a task held on its stack is gone
  Task tasks[4];
  int threads = 0, rounds = 0, chunks = 0;
};
Shared shared;

void join(int thread) {
  model::act(Kind::kJoin, 0, -1, std::memory_order_relaxed, static_cast<uint64_t>(thread));
}

int slot(int index) {
  return shared.slots[static_cast<size_t>(index)]->get();
}
void set_slot(int index, int value) {
  shared.slots[static_cast<size_t>(index)]->set(value);
}

// ---- the barrier alone

// Every thread writes its slot, passes, reads the slots of others: leaving early is a race or a wrong value. Slots
// alternate, so that one pass a round does.
void barrier_body(int thread) {
  for (int round = 0; round < shared.rounds; ++round) {
    const int first = round % 2 * shared.threads;
    set_slot(first + thread, round);
    shared.barrier->wait(thread);
    for (int other = 0; other < shared.threads; ++other) {
      model::expect(slot(first + other) == round, "a thread left the barrier before all had arrived");
    }
  }
}

// ---- the crew: run, serve, stop

// Thread t takes what the caller wrote and writes its own slot.
void hand_over(const Task& task, int thread) {
  model::expect(slot(0) == task.number, "a task saw other data than its caller wrote");
  if (thread > 0) set_slot(thread, task.number + thread);
}

void crew_body(int thread) {
  if (thread > 0) return shared.crew->serve(thread);
  for (int round = 0; round < shared.rounds; ++round) {
    set_slot(0, shared.tasks[round].number);
    shared.crew->run(shared.tasks[round]);
    for (int other = 1; other < shared.threads; ++other) {
      model::expect(slot(other) == shared.tasks[round].number + other, "run returned before a worker was done");
    }
  }
  shared.crew->stop();
  for (int other = 1; other < shared.threads; ++other) join(other);
}

// ---- a replay in small: chunks of an op, a barrier, chunks of the next op, which reads what the first wrote

void claim_all(int op, int thread) {
  Counter& counter = *shared.counters[static_cast<size_t>(op)];
  const int first = op * shared.chunks;
  for (int chunk = counter.claim(); chunk < shared.chunks; chunk = counter.claim()) {
    if (op > 0) {
      // The op before wrote its chunks from 1 on; it must be done.
      const int before = slot((op - 1) * shared.chunks + (chunk + 1) % shared.chunks);
      model::expect(before == slot(first + chunk) + 1, "an op ran before the one ahead was done");
    }
    set_slot(first + chunk, slot(first + chunk) + 1);
  }
  (void)thread;
}

void replay(int thread) {
  const int ops = static_cast<int>(shared.counters.size());
  for (int op = 0; op < ops; ++op) {
    claim_all(op, thread);
    shared.barrier->wait(thread);
  }
}

void replay_body(int thread) {
  if (thread > 0) return shared.crew->serve(thread);
  const int ops = static_cast<int>(shared.counters.size());
  for (int round = 0; round < shared.rounds; ++round) {
    for (int op = 0; op < ops; ++op) shared.counters[static_cast<size_t>(op)]->reset();
    shared.crew->run(shared.tasks[0]);
    for (int i = 0; i < ops * shared.chunks; ++i) {
      model::expect(slot(i) == round + 1, "a chunk was claimed twice or not at all");
    }
  }
  shared.crew->stop();
  for (int other = 1; other < shared.threads; ++other) join(other);
}

// ---- a counter that lives on the caller's stack, as in Model::sample: its end must be ordered after every claim

void sample_body(int thread) {
  if (thread > 0) return shared.crew->serve(thread);
  shared.crew->run(shared.tasks[0]);
  for (int i = 0; i < shared.chunks; ++i) model::expect(slot(i) == 1, "a chunk was claimed twice or not at all");
  model::write_plain(shared.counter_end, 1);
  shared.crew->stop();
  for (int other = 1; other < shared.threads; ++other) join(other);
}

enum class Work { kHandOver, kReplay, kClaim } work;

}  // namespace

void Task::operator()(int thread) const {
  switch (work) {
    case Work::kHandOver:
      return hand_over(*this, thread);
    case Work::kReplay:
      return replay(thread);
    default:
      return claim_all(0, thread);
  }
}

namespace {

// Locations come in the order in which constructors make them.
int named = 0;
void name_next(const std::string& name) {
  model::name_location(named++, name);
}

void make_barrier(int threads, int group) {
  shared.barrier = std::make_unique<Barrier>(threads, group);
  for (int g = 0; g * group < threads; ++g) name_next("barrier.arrived");
  name_next("barrier.full_groups"), name_next("barrier.phase"), name_next("barrier.sleepers");
}

void make_crew(int threads) {
  shared.crew = std::make_unique<Crew>(threads);
  name_next("crew.stop"), name_next("crew.generation"), name_next("crew.sleepers");
  name_next("crew.pending"), name_next("crew.waiters");
}

void make_slots(int count) {
  for (int i = 0; i < count; ++i) shared.slots.push_back(std::make_unique<ModelSync::Plain<int>>(0));
}

void begin(int threads, int rounds, int chunks) {
  shared = Shared{};
  named = 0;
  shared.threads = threads, shared.rounds = rounds, shared.chunks = chunks;
  for (int i = 0; i < 4; ++i) shared.tasks[i].number = 10 * (i + 1);
}

model::Scenario barrier_scenario(int threads, int group, int rounds) {
  return {"barrier, " + std::to_string(threads) + " threads in groups of " + std::to_string(group) + ", " +
              std::to_string(rounds) + " rounds",
          threads,
          [=] {
            begin(threads, rounds, 0);
            make_barrier(threads, group);
            make_slots(2 * threads);
          },
          barrier_body};
}

model::Scenario crew_scenario(int threads, int rounds) {
  return {"run and stop, " + std::to_string(threads) + " threads, " + std::to_string(rounds) + " rounds", threads,
          [=] {
            begin(threads, rounds, 0);
            work = Work::kHandOver;
            make_crew(threads);
            make_slots(threads);
          },
          crew_body};
}

model::Scenario replay_scenario(int threads, int rounds, int ops, int chunks) {
  return {"replay, " + std::to_string(threads) + " threads, " + std::to_string(rounds) + " rounds of " +
              std::to_string(ops) + " ops of " + std::to_string(chunks) + " chunks",
          threads,
          [=] {
            begin(threads, rounds, chunks);
            work = Work::kReplay;
            make_crew(threads);
            make_barrier(threads, neoserve::kBarrierGroup);
            for (int op = 0; op < ops; ++op) {
              shared.counters.push_back(std::make_unique<Counter>());
              name_next("counter " + std::to_string(op));
            }
            make_slots(ops * chunks);
          },
          replay_body};
}

model::Scenario sample_scenario(int threads, int chunks) {
  return {"a counter on the caller's stack, " + std::to_string(threads) + " threads", threads,
          [=] {
            begin(threads, 1, chunks);
            work = Work::kClaim;
            make_crew(threads);
            shared.counter_end = model::new_plain(0);
            model::set_lifetime(shared.counter_end);
            shared.counters.push_back(std::make_unique<Counter>());
            model::set_lifetime(-1);
            name_next("counter");
            make_slots(chunks);
          },
          sample_body};
}

const char* site_name(uint8_t site) {
  constexpr const char* kNames[] = {"kSpin",         "kSleeperRaise", "kSleepCheck",     "kSleeperLower",
                                    "kPublish",      "kSleeperLook",  "kBarrierPhase",   "kBarrierArrive",
                                    "kBarrierReset", "kBarrierJoin",  "kBarrierRestart", "kStopStore",
                                    "kStopLoad",     "kPendingSet",   "kPendingLook",    "kPendingDone",
                                    "kWaiterLook",   "kCounterReset", "kCounterClaim"};
  static_assert(std::size(kNames) == static_cast<size_t>(Site::kCount));
  return kNames[site];
}

// Small ones first: a mutation is tried on them in this order until one shows a fault.
std::vector<model::Scenario> scenarios() {
  return {barrier_scenario(2, 16, 4), crew_scenario(2, 3),       replay_scenario(2, 2, 2, 2),
          sample_scenario(2, 2),      barrier_scenario(3, 1, 1), barrier_scenario(3, 2, 2),
          barrier_scenario(3, 16, 2), barrier_scenario(4, 2, 1), crew_scenario(3, 1)};
}

// Millions of states: by hand.
std::vector<model::Scenario> deep_scenarios() {
  return {crew_scenario(3, 2), sample_scenario(3, 1)};
}

int explore_all(const std::vector<model::Scenario>& all) {
  int faults = 0;
  for (const model::Scenario& scenario : all) {
    const model::Result result = model::explore(scenario);
    std::printf("%s: %s, %llu states, %llu steps\n", scenario.name.c_str(),
                result.fault.empty() ? "no fault" : result.fault.c_str(),
                static_cast<unsigned long long>(result.states), static_cast<unsigned long long>(result.steps));
    for (const std::string& step : result.trace) std::printf("    %s\n", step.c_str());
    std::fflush(stdout);
    faults += !result.fault.empty();
  }
  return faults == 0 ? 0 : 1;
}

std::vector<std::memory_order> one_step_weaker(Kind kind, std::memory_order order) {
  switch (order) {
    case std::memory_order_seq_cst:
      if (kind == Kind::kLoad) return {std::memory_order_acquire};
      if (kind == Kind::kStore) return {std::memory_order_release};
      return {std::memory_order_acq_rel};
    case std::memory_order_acq_rel:
      return {std::memory_order_acquire, std::memory_order_release};
    case std::memory_order_relaxed:
      return {};
    default:
      return {std::memory_order_relaxed};
  }
}

// Orders that are stronger than they need be, and why they stay.
struct Spare {
  Site site;
  const char* location;
  std::memory_order weaker;
  const char* reason;
};
constexpr Spare kSpare[] = {
    {Site::kSpin, "crew.pending", std::memory_order_relaxed,
     "wait_change acquires for every caller; run() looks at `pending` again and acquires there"},
};

const Spare* spare(const model::Use& use, std::memory_order weaker) {
  for (const Spare& s : kSpare) {
    if (static_cast<uint8_t>(s.site) == use.site && use.location == s.location && weaker == s.weaker) return &s;
  }
  return nullptr;
}

// Every order that is stronger than relaxed, one step weaker, alone.
int mutate_all() {
  const std::vector<model::Scenario> all = scenarios();
  std::set<model::Use> uses;
  std::vector<std::set<model::Use>> uses_of;
  for (const model::Scenario& scenario : all) {
    uses_of.push_back(model::explore(scenario).uses);
    uses.insert(uses_of.back().begin(), uses_of.back().end());
  }
  int wrong = 0, tried = 0;
  for (const model::Use& use : uses) {
    for (std::memory_order weaker : one_step_weaker(use.kind, use.order)) {
      std::string fault, where;
      for (size_t i = 0; i < all.size() && fault.empty(); ++i) {
        if (uses_of[i].count(use) == 0) continue;
        fault = model::explore(all[i], {use.site, use.location, weaker}).fault;
        where = all[i].name;
      }
      const Spare* known = spare(use, weaker);
      const bool good = fault.empty() == (known != nullptr);
      wrong += !good, ++tried;
      std::printf(
          "%s%s on %s, %s instead of %s: %s\n", good ? "" : "FAILED: ", site_name(use.site), use.location.c_str(),
          model::order_name(weaker).c_str(), model::order_name(use.order).c_str(),
          fault.empty() ? (known ? known->reason : "no scenario shows a fault") : (fault + " (" + where + ")").c_str());
      std::fflush(stdout);
    }
  }
  std::printf("%d weakened orders, %d unexpected\n", tried, wrong);
  return wrong == 0 && tried > 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "mutations") return mutate_all();
  if (mode == "deep") return explore_all(deep_scenarios());
  if (mode.empty()) return explore_all(scenarios());
  std::fprintf(stderr, "pool_model: unknown mode %s; it is empty, mutations or deep\n", mode.c_str());
  return 2;
}
