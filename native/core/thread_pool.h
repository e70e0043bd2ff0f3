// A pool of persistent threads that run one function together (one program, many threads).
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/memory.h"

namespace neoserve {

// A counter from which threads claim chunks of work; one per op and step, on its own cache line.
struct alignas(kCacheLine) ChunkCounter {
  std::atomic<int32_t> next{0};
  int32_t claim() { return next.fetch_add(1, std::memory_order_relaxed); }
};

// Blocks until all threads have arrived: spins first, then sleeps on a futex, so that a descheduled thread does
// not burn the cores of the others. All writes before `wait` are seen by all threads after it.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  void wait();

 private:
  const int threads_;
  alignas(kCacheLine) std::atomic<int32_t> arrived_{0};
  alignas(kCacheLine) std::atomic<uint32_t> phase_{0};
  alignas(kCacheLine) std::atomic<int32_t> sleepers_{0};
};

class ThreadPool {
 public:
  // `threads` >= 1 counts the caller. `cpus` pins thread i to cpus[i % size]; empty: no pinning. The caller is never
  // pinned.
  ThreadPool(int threads, std::vector<int> cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Runs task(thread) on every thread, the caller being thread 0, and returns when all are done.
  // The task must not throw. Not reentrant; concurrent callers take turns.
  void run(const std::function<void(int)>& task);

  Barrier& barrier() { return barrier_; }

 private:
  void worker(int index, int cpu);
  void end_workers();

  const int threads_;
  const int owner_;  // process that started the threads
  Barrier barrier_;
  std::mutex turn_;
  const std::function<void(int)>* task_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(kCacheLine) std::atomic<uint32_t> generation_{0};
  alignas(kCacheLine) std::atomic<int32_t> sleepers_{0};
  alignas(kCacheLine) std::atomic<uint32_t> pending_{0};
  std::atomic<int32_t> waiters_{0};
  std::vector<std::thread> workers_;
};

}  // namespace neoserve
