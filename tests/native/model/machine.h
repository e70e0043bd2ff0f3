// A machine with the C++20 memory model, for exhaustive exploration (explorer.h). Threads act in program order; a store
// may take any place in the modification order of its location that coherence leaves open, and a load may return any
// store that coherence and happens-before leave open. What is modelled:
//
//   coherence          every thread has a view: per location, the oldest store that it may still read ([intro.races];
//                      the views of Kang, Hur, Lahav, Vafeiadis, Dreyer: A promising semantics for relaxed-memory
//                      concurrency, POPL 2017, without its promises)
//   release, acquire   a release store carries the facts of its thread; release sequences go on through
//                      read-modify-writes alone (C++20)
//   seq_cst            any total order S that agrees with coherence order and strongly-happens-before
//                      ([atomics.order]), not the order of execution: S is kept as the set of predecessors of each
//                      operation, and an operation that would close a cycle is not offered
//   plain data         a race is an error: every access is checked against the last write and the last reads
//   futex              the comparison and the sleep are one step; steps on one word are ordered (the kernel's lock), so
//                      a wait after a wake sees what the waker saw; a wait may return for no reason at any time. No
//                      other order comes from the kernel, though Linux gives more.
//
// Not modelled: load buffering (a load that returns a store which comes later in an order of program and reads-from),
// fences, compare-exchange, mixed sizes.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace model {

constexpr int kMaxThreads = 4, kMaxLocations = 16, kMaxStores = 10, kMaxPlain = 24, kMaxOutcomes = 6;

using Positions = std::array<uint8_t, kMaxLocations>;  // per location, a place in its modification order

// What a thread knows, or a message carries.
struct Facts {
  Positions view;    // oldest store that may be read
  Positions before;  // strongly-happens-before: the last place of a seq_cst operation that is earlier in S
  std::array<uint64_t, 2> accesses;  // per plain variable: its last write, and the last read of each thread, are known
};

struct Store {
  uint64_t value;
  Facts message;           // what an acquire of this store learns
  Positions write, reads;  // predecessors in S of the seq_cst operation that made it, and of those that read it
  uint64_t follows;        // 1: a read-modify-write of the store before: nothing comes between
};

struct Location {
  int32_t count;
  Positions gone;   // predecessors in S of all operations on stores that nobody can read any more
  uint8_t kernel;   // oldest store that the kernel may read for a futex
  int8_t lifetime;  // plain variable that every use reads and the end of the object writes, or -1
  std::array<Store, kMaxStores> stores;
};

enum class Status : uint8_t { kReady, kAsleep, kWoken, kEnded };
enum class Kind : uint8_t { kLoad, kStore, kAdd, kFutexWait, kFutexWake, kJoin };

// What a thread is about to do.
struct Request {
  Kind kind;
  uint8_t location, site, unused;  // no padding: the state is compared as bytes
  std::memory_order order;
  uint64_t operand;  // value stored, added or compared; thread joined
};

struct Thread {
  Status status;
  Request request;
  uint64_t result;
  Facts facts;
};

struct Machine {
  int32_t threads, locations, plains;
  std::array<Thread, kMaxThreads> thread;
  std::array<uint64_t, kMaxPlain> plain;
  std::array<int64_t, kMaxOutcomes> outcome;
  std::array<Location, kMaxLocations> location;

  void clear(int thread_count);
  int add_location(uint64_t value, int lifetime);
  int add_plain(uint64_t value);

  // The places that the request of a thread may take: bit p is store p for loads and read-modify-writes, and the place
  // of the new store for stores; one bit for everything else; 0 when the thread cannot go on. Bit kSleep: a futex wait
  // that sleeps; it may always return at once too. (A sleeper that returned for no reason later would be no different
  // from one that returned at once and was not scheduled until then.)
  static constexpr int kSleep = 30;
  uint32_t options(int thread) const;

  // Whether the request commutes with whatever other threads do, now or later, and takes no option from them: then it
  // need not be tried in any other order. A store that is not seq_cst is one: where it stands in the modification order
  // is chosen, not given by time. What stands before it may still be read, and be followed by other stores.
  bool commutes(int thread) const;

  // Does it; the result is in thread[].result. Returns false when the atomic is at its end: `fault` says how.
  bool perform(int thread, int option, const char** fault);

  // Plain accesses; false is a race.
  bool read_plain(int thread, int variable);
  bool write_plain(int thread, int variable);

  // Makes states that cannot be told apart equal: drops stores that no thread can read any more.
  void normalise();

 private:
  void load(int thread, int place, std::memory_order order, bool writes);
  void insert(int thread, int place, uint64_t value, std::memory_order order, bool follows, const Facts* read);
  void order_operation(int thread, int place, bool reads, bool writes, Positions* own);
  template <class Visit>
  void for_each_facts(Visit visit);
  template <class Visit>
  void for_each_before(Visit visit);
};

bool acquires(std::memory_order order);
bool releases(std::memory_order order);

}  // namespace model
