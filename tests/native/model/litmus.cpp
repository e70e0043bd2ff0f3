// Litmus tests of the model itself: for each, the exact set of outcomes over all executions. The sets are those of
// C++20 without load buffering (machine.h); exit code 1 when one differs.
#include <cstdio>
#include <set>
#include <string>
#include <vector>

#include "explorer.h"

namespace {

using model::Kind;
using std::memory_order;

constexpr auto relaxed = std::memory_order_relaxed, acquire = std::memory_order_acquire,
               release = std::memory_order_release, acq_rel = std::memory_order_acq_rel,
               seq_cst = std::memory_order_seq_cst;

int x, y, data;  // x and y: atomics, zero at the start; data: a plain variable

int64_t load(int location, memory_order order) {
  return static_cast<int64_t>(model::act(Kind::kLoad, location, -1, order, 0));
}
void store(int location, uint64_t value, memory_order order) {
  model::act(Kind::kStore, location, -1, order, value);
}
int64_t add(int location, uint64_t value, memory_order order) {
  return static_cast<int64_t>(model::act(Kind::kAdd, location, -1, order, value));
}
void join(int thread) {
  model::act(Kind::kJoin, 0, -1, relaxed, static_cast<uint64_t>(thread));
}

struct Litmus {
  const char* name;
  int threads;
  void (*body)(int thread);
  const char* outcomes;  // all of them, as digits, in ascending order
  const char* fault = "";
};

// Store buffering: both write, then read the other.
template <memory_order kWrite, memory_order kRead>
void store_buffering(int thread) {
  store(thread == 0 ? x : y, 1, kWrite);
  model::outcome(thread, load(thread == 0 ? y : x, kRead));
}

template <memory_order kAdd, memory_order kRead>
void add_buffering(int thread) {
  add(thread == 0 ? x : y, 1, kAdd);
  model::outcome(thread, load(thread == 0 ? y : x, kRead));
}

template <memory_order kWrite, memory_order kRead>
void message_passing(int thread) {
  if (thread == 0) {
    store(x, 1, relaxed);
    store(y, 1, kWrite);
  } else {
    model::outcome(0, load(y, kRead));
    model::outcome(1, load(x, relaxed));
  }
}

template <memory_order kWrite, memory_order kRead>
void plain_message(int thread) {
  if (thread == 0) {
    model::write_plain(data, 7);
    store(y, 1, kWrite);
  } else if (load(y, kRead) == 1) {
    model::outcome(0, static_cast<int64_t>(model::read_plain(data)));
  }
}

void load_buffering(int thread) {
  model::outcome(thread, load(thread == 0 ? x : y, relaxed));
  store(thread == 0 ? y : x, 1, relaxed);
}

// Independent reads of independent writes.
template <memory_order kWrite, memory_order kRead>
void independent_reads(int thread) {
  if (thread < 2) return store(thread == 0 ? x : y, 1, kWrite);
  model::outcome(2 * (thread - 2), load(thread == 2 ? x : y, kRead));
  model::outcome(2 * (thread - 2) + 1, load(thread == 2 ? y : x, kRead));
}

void coherent_reads(int thread) {
  if (thread == 0) {
    store(x, 1, relaxed);
    store(x, 2, relaxed);
  } else {
    model::outcome(0, load(x, relaxed));
    model::outcome(1, load(x, relaxed));
  }
}

void one_order_of_writes(int thread) {
  if (thread < 2) return store(x, static_cast<uint64_t>(thread) + 1, relaxed);
  model::outcome(2 * (thread - 2), load(x, relaxed));
  model::outcome(2 * (thread - 2) + 1, load(x, relaxed));
}

// Read own write, or a later one.
void coherent_write_read(int thread) {
  if (thread == 0) return store(x, 1, relaxed);
  store(x, 2, relaxed);
  model::outcome(0, load(x, relaxed));
}

// Load, then store: the store is later than what was loaded.
void coherent_read_write(int thread) {
  if (thread == 0) return store(x, 1, relaxed);
  if (thread == 1) {
    model::outcome(0, load(x, relaxed));
    store(x, 2, relaxed);
    return;
  }
  join(0), join(1);
  model::outcome(1, load(x, relaxed));
}

template <memory_order kOrder>
void two_plus_two_writes(int thread) {
  if (thread < 2) {
    store(thread == 0 ? x : y, 1, kOrder);
    store(thread == 0 ? y : x, 2, kOrder);
    return;
  }
  join(0), join(1);
  model::outcome(0, load(x, relaxed));
  model::outcome(1, load(y, relaxed));
}

template <memory_order kWrite, memory_order kRead>
void write_to_read_causality(int thread) {
  if (thread == 0) return store(x, 1, kWrite);
  if (thread == 1) {
    model::outcome(0, load(x, kRead));
    return store(y, 1, kWrite);
  }
  model::outcome(1, load(y, kRead));
  model::outcome(2, load(x, relaxed));
}

template <memory_order kOrder>
void adds_are_atomic(int thread) {
  if (thread < 2) {
    model::outcome(thread, add(x, 1, kOrder));
    return;
  }
  join(0), join(1);
  model::outcome(2, load(x, relaxed));
}

// A relaxed read-modify-write goes on with a release sequence.
void release_sequence_add(int thread) {
  if (thread == 0) {
    model::write_plain(data, 7);
    store(x, 1, release);
  } else if (thread == 1) {
    add(x, 1, relaxed);
  } else if (load(x, acquire) == 2) {
    model::outcome(0, static_cast<int64_t>(model::read_plain(data)));
  }
}

// A relaxed store of the same thread ends it (since C++20).
void release_sequence_store(int thread) {
  if (thread == 0) {
    model::write_plain(data, 7);
    store(x, 1, release);
    store(x, 2, relaxed);
  } else if (load(x, acquire) == 2) {
    (void)model::read_plain(data);
  }
}

// All arrivals of a counter are seen by the last: the barrier in small.
template <memory_order kOrder>
void count_arrivals(int thread) {
  model::write_plain(data + thread, 5);
  if (add(x, 1, kOrder) == 2) {
    for (int t = 0; t < 3; ++t) model::outcome(t, static_cast<int64_t>(model::read_plain(data + t)));
  }
}

// A relaxed store may overtake a seq_cst one: S is not the order of execution.
template <memory_order kWrite, memory_order kRead>
void overtaking_store(int thread) {
  if (thread == 0) {
    store(x, 1, seq_cst);
    store(y, 1, kWrite);
  } else {
    model::outcome(0, load(y, kRead));
    model::outcome(1, load(x, seq_cst));
  }
}

// Z6.U of Lahav, Vafeiadis, Kang, Hur, Dreyer: Repairing sequential consistency in C/C++11, PLDI 2017. C++20 allows
// 1 3 0 (strongly-happens-before), C++11 did not.
void z6_u(int thread) {
  if (thread == 0) {
    store(x, 1, seq_cst);
    store(y, 1, release);
  } else if (thread == 1) {
    model::outcome(0, add(y, 1, seq_cst));
    model::outcome(1, load(y, relaxed));
  } else {
    store(y, 3, seq_cst);
    model::outcome(2, load(x, seq_cst));
  }
}

// Like it, with all of y's seq_cst: 1 3 0 is gone.
void z6_u_strong(int thread) {
  if (thread == 0) {
    store(x, 1, seq_cst);
    store(y, 1, seq_cst);
  } else if (thread == 1) {
    model::outcome(0, add(y, 1, seq_cst));
    model::outcome(1, load(y, relaxed));
  } else {
    store(y, 3, seq_cst);
    model::outcome(2, load(x, seq_cst));
  }
}

template <bool kWake>
void sleep_and_wake(int thread) {
  if (thread == 0) {
    store(x, 1, relaxed);
    if (kWake) model::act(Kind::kFutexWake, x, -1, relaxed, 0);
  } else {
    model::act(Kind::kFutexWait, x, -1, relaxed, 0);
  }
}

// The wake comes before the store: whoever compares in between sleeps for good.
void wake_too_early(int thread) {
  if (thread == 0) {
    model::act(Kind::kFutexWake, x, -1, relaxed, 0);
    store(x, 1, relaxed);
  } else {
    model::act(Kind::kFutexWait, x, -1, relaxed, 0);
  }
}

// A futex orders nothing but its own word.
void futex_is_no_fence(int thread) {
  if (thread == 0) {
    store(y, 1, relaxed);
    store(x, 1, relaxed);
    model::act(Kind::kFutexWake, x, -1, relaxed, 0);
  } else {
    model::act(Kind::kFutexWait, x, -1, relaxed, 0);
    model::outcome(0, load(y, relaxed));
  }
}

template <memory_order kOrder>
void unordered_writes(int thread) {
  if (thread == 1 && load(x, acquire) == 0) return;
  model::write_plain(data, static_cast<uint64_t>(thread));
  if (thread == 0) store(x, 1, kOrder);
}

constexpr const char* kRead = "data race: plain data is read while not ordered after its last write";
constexpr const char* kWrite = "data race: plain data is written while not ordered after its last accesses";
constexpr const char* kDeadlock = "deadlock: every thread that has not ended sleeps or waits";

const Litmus kLitmus[] = {
    {"store buffering, relaxed", 2, store_buffering<relaxed, relaxed>, "00 01 10 11"},
    {"store buffering, release and acquire", 2, store_buffering<release, acquire>, "00 01 10 11"},
    {"store buffering, seq_cst", 2, store_buffering<seq_cst, seq_cst>, "01 10 11"},
    {"store buffering, seq_cst stores alone", 2, store_buffering<seq_cst, relaxed>, "00 01 10 11"},
    {"store buffering, seq_cst loads alone", 2, store_buffering<release, seq_cst>, "00 01 10 11"},
    {"store buffering by read-modify-writes, seq_cst", 2, add_buffering<seq_cst, seq_cst>, "01 10 11"},
    {"store buffering by read-modify-writes, acq_rel", 2, add_buffering<acq_rel, seq_cst>, "00 01 10 11"},
    {"message passing, release and acquire", 2, message_passing<release, acquire>, "00 01 11"},
    {"message passing, seq_cst", 2, message_passing<seq_cst, seq_cst>, "00 01 11"},
    {"message passing, relaxed store", 2, message_passing<relaxed, acquire>, "00 01 10 11"},
    {"message passing, relaxed load", 2, message_passing<release, relaxed>, "00 01 10 11"},
    {"plain message, release and acquire", 2, plain_message<release, acquire>, "0 7"},
    {"plain message, relaxed store", 2, plain_message<relaxed, acquire>, "", kRead},
    {"plain message, relaxed load", 2, plain_message<release, relaxed>, "", kRead},
    {"plain writes, ordered", 2, unordered_writes<release>, "0"},
    {"plain writes, not ordered", 2, unordered_writes<relaxed>, "", kWrite},
    {"load buffering (11 is not modelled)", 2, load_buffering, "00 01 10"},
    {"independent reads, release and acquire", 4, independent_reads<release, acquire>,
     "0000 0001 0010 0011 0100 0101 0110 0111 1000 1001 1010 1011 1100 1101 1110 1111"},
    {"independent reads, seq_cst", 4, independent_reads<seq_cst, seq_cst>,
     "0000 0001 0010 0011 0100 0101 0110 0111 1000 1001 1011 1100 1101 1110 1111"},
    {"independent reads, seq_cst loads alone (C++20)", 4, independent_reads<release, seq_cst>,
     "0000 0001 0010 0011 0100 0101 0110 0111 1000 1001 1011 1100 1101 1110 1111"},
    {"independent reads, seq_cst stores alone", 4, independent_reads<seq_cst, acquire>,
     "0000 0001 0010 0011 0100 0101 0110 0111 1000 1001 1010 1011 1100 1101 1110 1111"},
    {"coherence: read, read", 2, coherent_reads, "00 01 02 11 12 22"},
    {"coherence: one order of writes", 4, one_order_of_writes,
     "0000 0001 0002 0011 0012 0021 0022 0100 0101 0102 0111 0112 0121 0122 0200 0201 0202 0211 0212 0221 0222 "
     "1100 1101 1102 1111 1112 1121 1122 1200 1201 1202 1211 1212 1222 2100 2101 2102 2111 2121 2122 "
     "2200 2201 2202 2211 2212 2221 2222"},
    {"coherence: write, read", 2, coherent_write_read, "1 2"},
    {"coherence: read, write", 3, coherent_read_write, "01 02 12"},
    {"2+2 writes, relaxed", 3, two_plus_two_writes<relaxed>, "11 12 21 22"},
    {"2+2 writes, release", 3, two_plus_two_writes<release>, "11 12 21 22"},
    {"2+2 writes, seq_cst", 3, two_plus_two_writes<seq_cst>, "12 21 22"},
    {"write to read causality, release and acquire", 3, write_to_read_causality<release, acquire>,
     "000 001 010 011 100 101 111"},
    {"write to read causality, relaxed", 3, write_to_read_causality<relaxed, relaxed>,
     "000 001 010 011 100 101 110 111"},
    {"read-modify-writes, relaxed", 3, adds_are_atomic<relaxed>, "012 102"},
    {"release sequence through a read-modify-write", 3, release_sequence_add, "0 7"},
    {"release sequence, relaxed store", 2, release_sequence_store, "", kRead},
    {"arrivals, acq_rel", 3, count_arrivals<acq_rel>, "555"},
    {"arrivals, release", 3, count_arrivals<release>, "", kRead},
    {"arrivals, acquire", 3, count_arrivals<acquire>, "", kRead},
    {"overtaking a seq_cst store, relaxed", 2, overtaking_store<relaxed, relaxed>, "00 01 10 11"},
    {"overtaking a seq_cst store, release and acquire", 2, overtaking_store<release, acquire>, "00 01 11"},
    {"overtaking a seq_cst store, seq_cst", 2, overtaking_store<seq_cst, seq_cst>, "00 01 11"},
    {"Z6.U, as C++20 has it", 3, z6_u, "010 011 030 031 120 121 130 131 310 311 340 341"},
    {"Z6.U, seq_cst", 3, z6_u_strong, "010 011 030 031 120 121 131 310 311 340 341"},
    {"futex: sleep and wake", 2, sleep_and_wake<true>, ""},
    {"futex: no wake", 2, sleep_and_wake<false>, "", kDeadlock},
    {"futex: wake before the store", 2, wake_too_early, "", kDeadlock},
    {"futex: no order for other words", 2, futex_is_no_fence, "0 1"},
};

int digits(const Litmus& litmus) {
  const std::string text = litmus.outcomes;
  const size_t blank = text.find(' ');
  return static_cast<int>(blank == std::string::npos ? text.size() : blank);
}

// `reduce`: explorer.h; the outcomes must not depend on it.
bool run(const Litmus& litmus, bool reduce) {
  model::Scenario scenario;
  scenario.name = litmus.name;
  scenario.threads = litmus.threads;
  scenario.body = litmus.body;
  scenario.set_up = [] {
    x = model::new_location(0, -1), y = model::new_location(0, -1);
    data = model::new_plain(0), model::new_plain(0), model::new_plain(0);
  };
  model::Limits limits;
  limits.reduce = reduce;
  const model::Result result = model::explore(scenario, {}, limits);
  std::string found;
  if (digits(litmus) > 0) {
    for (const model::Outcome& outcome : result.outcomes) {
      if (!found.empty()) found += ' ';
      for (int i = 0; i < digits(litmus); ++i) found += std::to_string(outcome[static_cast<size_t>(i)]);
    }
  }
  const bool good = result.fault == litmus.fault && (!result.fault.empty() || found == litmus.outcomes);
  std::printf("litmus: %s%s: %s, %llu states\n", litmus.name, reduce ? "" : ", all orders",
              !good                  ? "FAILED"
              : result.fault.empty() ? "the outcomes of the standard"
                                     : "the fault is found",
              static_cast<unsigned long long>(result.states));
  if (!good) {
    std::printf("  expected: %s %s\n  found:    %s %s\n", litmus.outcomes, litmus.fault, found.c_str(),
                result.fault.c_str());
    for (const std::string& step : result.trace) std::printf("    %s\n", step.c_str());
  }
  return good;
}

}  // namespace

int main() {
  bool good = true;
  for (const Litmus& litmus : kLitmus) {
    for (bool reduce : {true, false}) good = run(litmus, reduce) && good;
  }
  return good ? 0 : 1;
}
