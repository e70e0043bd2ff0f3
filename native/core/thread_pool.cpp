#include "core/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <stdexcept>
#include <string>
#include <system_error>

namespace neoserve {
namespace {

// Spinning covers the usual gap between ops (microseconds); beyond it the thread sleeps. Between steps the
// caller spends longer in Python, so a waiting worker spins only this long before it gives its core away.
constexpr int kSpins = 4000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");
#endif
}

// std::atomic<uint32_t> is one futex word (lock-free, same size); std::atomic::wait needs libstdc++ 11.
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Returns when `word` differs from `seen`. `sleepers` lets the waker skip the system call when nobody sleeps: it is
// raised before the last look at `word`, and the waker looks at it after changing `word` (both sequentially
// consistent).
void wait_change(std::atomic<uint32_t>& word, uint32_t seen, std::atomic<int32_t>& sleepers) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (word.load(std::memory_order_acquire) != seen) return;
    relax();
  }
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (word.load(std::memory_order_seq_cst) == seen) futex_wait(word, seen);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void publish_change(std::atomic<uint32_t>& word, std::atomic<int32_t>& sleepers) {
  word.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(word);
}

}  // namespace

void Barrier::wait() {
  if (threads_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    publish_change(phase_, sleepers_);
    return;
  }
  wait_change(phase_, phase, sleepers_);
}

ThreadPool::ThreadPool(int threads, std::vector<int> cpus) : threads_(threads), owner_(getpid()), barrier_(threads) {
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
  stop_.store(true, std::memory_order_relaxed);
  publish_change(generation_, sleepers_);
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
    return;
  }
  task_ = &task;
  pending_.store(static_cast<uint32_t>(threads_) - 1, std::memory_order_relaxed);
  publish_change(generation_, sleepers_);
  task(0);
  for (uint32_t left = pending_.load(std::memory_order_acquire); left != 0;
       left = pending_.load(std::memory_order_acquire)) {
    wait_change(pending_, left, waiters_);
  }
}

void ThreadPool::worker(int index, int cpu) {
  if (cpu >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    (void)pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // a refused pin costs speed, not correctness
  }
  uint32_t seen = 0;
  while (true) {
    wait_change(generation_, seen, sleepers_);
    ++seen;
    if (stop_.load(std::memory_order_relaxed)) return;
    (*task_)(index);
    // The caller may end the pool as soon as it sees zero, but its threads are joined first, so `waiters_` is still
    // there.
    pending_.fetch_sub(1, std::memory_order_seq_cst);
    if (waiters_.load(std::memory_order_seq_cst) > 0) futex_wake_all(pending_);
  }
}

}  // namespace neoserve
