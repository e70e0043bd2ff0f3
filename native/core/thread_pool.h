// A pool of persistent threads that run one function together (one program, many threads).
#pragma once

#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "core/system_sync.h"

namespace neoserve {

using ChunkCounter = BasicChunkCounter<SystemSync>;
using Barrier = BasicBarrier<SystemSync>;

class ThreadPool {
 public:
  // `threads` >= 1 counts the caller. `cpus` pins thread i to cpus[i % size]; empty: no pinning. The caller is never
  // pinned. Throws std::runtime_error when the system refuses a thread.
  ThreadPool(int threads, std::vector<int> cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Runs task(thread) on every thread, the caller being thread 0, and returns when all are done.
  // The task must not throw. Not reentrant; concurrent callers take turns.
  void run(const std::function<void(int)>& task);

  // For the threads of one task; each calls wait(thread) equally often.
  Barrier& barrier() { return barrier_; }

 private:
  void worker(int index, int cpu);
  void end_workers();

  const int threads_;
  const int owner_;  // process that started the threads
  Barrier barrier_;
  std::mutex turn_;
  BasicCrew<SystemSync, std::function<void(int)>> crew_;
  std::vector<std::thread> workers_;
};

}  // namespace neoserve
