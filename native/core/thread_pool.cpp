#include "core/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <system_error>

namespace neoserve {

ThreadPool::ThreadPool(int threads, std::vector<int> cpus)
    : threads_(threads), owner_(getpid()), barrier_(threads), crew_(threads) {
  workers_.reserve(static_cast<size_t>(threads) - 1);
  try {
    for (int index = 1; index < threads; ++index) {
      const int cpu = cpus.empty() ? -1 : cpus[static_cast<size_t>(index) % cpus.size()];
      workers_.emplace_back([this, index, cpu] { worker(index, cpu); });
    }
  } catch (const std::system_error& error) {
    const size_t started = workers_.size() + 1;
    end_workers();
    throw std::runtime_error("the system refuses thread " + std::to_string(started + 1) + " of " +
                             std::to_string(threads) + " (" + error.what() +
                             "); ask for fewer threads or raise the limit of processes (ulimit -u, pids.max)");
  }
}

ThreadPool::~ThreadPool() {
  if (getpid() == owner_) {
    end_workers();
  } else {
    // A forked child has none of these threads: there is nothing to join.
    for (std::thread& thread : workers_) thread.detach();
  }
}

void ThreadPool::end_workers() {
  crew_.stop();
  for (std::thread& thread : workers_) thread.join();
  workers_.clear();
}

void ThreadPool::run(const std::function<void(int)>& task) {
  if (threads_ > 1 && getpid() != owner_) {
    throw std::runtime_error("the model was loaded before fork(); load it in the child, or start it by spawn");
  }
  std::lock_guard<std::mutex> guard(turn_);
  if (threads_ == 1) {
    task(0);
  } else {
    crew_.run(task);
  }
}

void ThreadPool::worker(int index, int cpu) {
  if (cpu >= 0) {
    // A cpu_set_t ends at 1024 CPUs.
    if (cpu_set_t* set = CPU_ALLOC(cpu + 1); set != nullptr) {
      const size_t bytes = CPU_ALLOC_SIZE(cpu + 1);
      CPU_ZERO_S(bytes, set);
      CPU_SET_S(static_cast<size_t>(cpu), bytes, set);
      (void)pthread_setaffinity_np(pthread_self(), bytes, set);  // a refused pin costs speed, not correctness
      CPU_FREE(set);
    }
  }
  crew_.serve(index);
}

}  // namespace neoserve
