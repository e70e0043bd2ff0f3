// The synchronisation of the thread pool, written once over a policy `Sync`: SystemSync (core/system_sync.h) runs it on
// std::atomic and the futex; tests/native/model runs the same code on a model of the C++ memory order and goes through
// every execution. docs/threads.md says what each order is for.
//
// A policy has
//   Atomic<T>      load, store, fetch_add, fetch_sub, each told its Site and its order
//   Plain<T>       get, set: ordinary memory that the atomics must order
//   Spin           again(), hit(), miss(): how long a wait looks before it sleeps
//   futex_wait(Atomic<uint32_t>&, seen), futex_wake_all(Atomic<uint32_t>&)
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/memory.h"

namespace neoserve {

// Every place that names a memory order, so that a test can weaken one of them alone.
enum class Site : uint8_t {
  kSpin,            // wait_change: a look while spinning
  kSleeperRaise,    // wait_change: about to sleep
  kSleepCheck,      // wait_change: the last look before sleeping
  kSleeperLower,    // wait_change: awake again
  kPublish,         // publish_change: the change
  kSleeperLook,     // publish_change: is anyone asleep?
  kBarrierPhase,    // Barrier: the phase on arrival
  kBarrierArrive,   // Barrier: arrival in the group
  kBarrierReset,    // Barrier: the group's count, by its last arrival
  kBarrierJoin,     // Barrier: arrival of a full group
  kBarrierRestart,  // Barrier: the count of groups, by the last one
  kStopStore,       // Crew: the end is asked for
  kStopLoad,        // Crew: a worker looks for it
  kPendingSet,      // Crew: workers that have yet to finish
  kPendingLook,     // Crew: the caller looks for zero
  kPendingDone,     // Crew: a worker has finished
  kWaiterLook,      // Crew: does the caller sleep?
  kCounterReset,    // ChunkCounter
  kCounterClaim,    // ChunkCounter
  kCount,
};

// Returns when `word` differs from `seen`; what was written before that change is then visible. `sleepers` lets the
// waker skip the system call when nobody sleeps: it is raised before the last look at `word`, and the waker looks at it
// after changing `word`. Both pairs are sequentially consistent, so that at least one of the two sees the other.
template <class Sync>
void wait_change(typename Sync::template Atomic<uint32_t>& word, uint32_t seen,
                 typename Sync::template Atomic<int32_t>& sleepers) {
  typename Sync::Spin spin;
  do {
    if (word.load(Site::kSpin, std::memory_order_acquire) != seen) return spin.hit();
  } while (spin.again());
  spin.miss();
  sleepers.fetch_add(Site::kSleeperRaise, 1, std::memory_order_seq_cst);
  // A futex may return for no reason (signals, stale wakes), so the word is looked at again each time.
  while (word.load(Site::kSleepCheck, std::memory_order_seq_cst) == seen) Sync::futex_wait(word, seen);
  sleepers.fetch_sub(Site::kSleeperLower, 1, std::memory_order_relaxed);
}

// Changes `word` and wakes who sleeps on it.
template <class Sync>
void publish_change(typename Sync::template Atomic<uint32_t>& word, typename Sync::template Atomic<int32_t>& sleepers) {
  word.fetch_add(Site::kPublish, 1, std::memory_order_seq_cst);
  if (sleepers.load(Site::kSleeperLook, std::memory_order_seq_cst) > 0) Sync::futex_wake_all(word);
}

// A counter from which threads claim chunks of work; one per op and step, on its own cache line. Its orders are
// relaxed: a claim hands out a number and nothing else; `reset` must be ordered before the claims and after all claims
// of the use before (ThreadPool::run does both).
template <class Sync>
struct alignas(kCacheLine) BasicChunkCounter {
  typename Sync::template Atomic<int32_t> next{0};
  int32_t claim() { return next.fetch_add(Site::kCounterClaim, 1, std::memory_order_relaxed); }
  void reset() { next.store(Site::kCounterReset, 0, std::memory_order_relaxed); }
};

// Blocks until all threads have arrived: spins first, then sleeps on a futex, so that a descheduled thread does not
// burn the cores of the others. All writes before `wait` are seen by all threads after it.
//
// Arrivals are counted per group of threads and then over the groups, so that no cache line is written by more than
// kBarrierGroup threads, one after the other, per phase. The release is one word that all watch: no thread has to run
// for another to be released.
constexpr int kBarrierGroup = 16;

template <class Sync>
class BasicBarrier {
 public:
  explicit BasicBarrier(int threads, int group_size = kBarrierGroup)
      : threads_(threads),
        group_size_(group_size),
        group_count_((threads + group_size - 1) / group_size),
        groups_(std::make_unique<Group[]>(static_cast<size_t>(group_count_))) {}

  // `thread` in [0, threads): each calls once per phase.
  void wait(int thread) {
    if (threads_ == 1) return;
    const uint32_t phase = phase_.load(Site::kBarrierPhase, std::memory_order_relaxed);
    if (last_arrival(thread / group_size_)) {
      publish_change<Sync>(phase_, sleepers_);
    } else {
      wait_change<Sync>(phase_, phase, sleepers_);
    }
  }

 private:
  struct alignas(kCacheLine) Group {
    typename Sync::template Atomic<int32_t> arrived{0};
  };

  // The counts are set back before the phase changes: who arrives next has seen the new phase, and so the zero.
  bool last_arrival(int index) {
    const int members = std::min(group_size_, threads_ - index * group_size_);
    Group& group = groups_[static_cast<size_t>(index)];
    if (group.arrived.fetch_add(Site::kBarrierArrive, 1, std::memory_order_acq_rel) != members - 1) return false;
    group.arrived.store(Site::kBarrierReset, 0, std::memory_order_relaxed);
    if (group_count_ == 1) return true;
    if (full_groups_.fetch_add(Site::kBarrierJoin, 1, std::memory_order_acq_rel) != group_count_ - 1) return false;
    full_groups_.store(Site::kBarrierRestart, 0, std::memory_order_relaxed);
    return true;
  }

  const int threads_, group_size_, group_count_;
  const std::unique_ptr<Group[]> groups_;
  alignas(kCacheLine) typename Sync::template Atomic<int32_t> full_groups_{0};
  alignas(kCacheLine) typename Sync::template Atomic<uint32_t> phase_{0};
  alignas(kCacheLine) typename Sync::template Atomic<int32_t> sleepers_{0};
};

// How a caller and its workers hand over tasks. `Task` is called as task(thread).
template <class Sync, class Task>
class BasicCrew {
 public:
  explicit BasicCrew(int threads) : threads_(threads) {}

  // The caller, thread 0: runs task(thread) on every thread and returns when all are done. One call at a time.
  void run(const Task& task) {
    task_.set(&task);
    pending_.store(Site::kPendingSet, static_cast<uint32_t>(threads_) - 1, std::memory_order_relaxed);
    publish_change<Sync>(generation_, sleepers_);
    task(0);
    for (uint32_t left = look(); left != 0; left = look()) wait_change<Sync>(pending_, left, waiters_);
  }

  // A worker, thread 1 and up: serves every run until `stop`.
  void serve(int thread) {
    for (uint32_t seen = 0;; ++seen) {
      wait_change<Sync>(generation_, seen, sleepers_);
      if (stop_.load(Site::kStopLoad, std::memory_order_relaxed)) return;
      (*task_.get())(thread);
      // The caller may go on as soon as it sees zero; it joins the workers before it ends this object, so `waiters_`
      // is still there.
      pending_.fetch_sub(Site::kPendingDone, 1, std::memory_order_seq_cst);
      if (waiters_.load(Site::kWaiterLook, std::memory_order_seq_cst) > 0) Sync::futex_wake_all(pending_);
    }
  }

  // The caller, after its last run: every worker leaves `serve`.
  void stop() {
    stop_.store(Site::kStopStore, true, std::memory_order_relaxed);
    publish_change<Sync>(generation_, sleepers_);
  }

 private:
  uint32_t look() { return pending_.load(Site::kPendingLook, std::memory_order_acquire); }

  const int threads_;
  typename Sync::template Plain<const Task*> task_{nullptr};
  typename Sync::template Atomic<bool> stop_{false};
  alignas(kCacheLine) typename Sync::template Atomic<uint32_t> generation_{0};
  alignas(kCacheLine) typename Sync::template Atomic<int32_t> sleepers_{0};
  alignas(kCacheLine) typename Sync::template Atomic<uint32_t> pending_{0};
  typename Sync::template Atomic<int32_t> waiters_{0};
};

}  // namespace neoserve
