// What core/thread_pool does when threads are many, late or interrupted: counts of threads and chunks, threads without
// a core of their own, signals. CPU time is bounded loosely, time on the clock not at all. Exit code 1 on a failure.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "core/thread_pool.h"

namespace {

using neoserve::ChunkCounter;
using neoserve::ThreadPool;

void expect(bool condition, const char* what, double found) {
  if (condition) return;
  std::fprintf(stderr, "FAILED: %s (found %g)\n", what, found);
  std::exit(1);
}

// CPU seconds that the process has used.
double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void doze(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

// Pins the calling thread, and so the threads that it starts, to one of its processors while this lives.
class OneProcessor {
 public:
  OneProcessor() {
    sched_getaffinity(0, sizeof before_, &before_);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &before_)) ++cpu;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    expect(sched_setaffinity(0, sizeof one, &one) == 0, "the system refuses to pin to one processor", cpu);
  }
  ~OneProcessor() { sched_setaffinity(0, sizeof before_, &before_); }

 private:
  cpu_set_t before_;
};

// Every count of threads, fewer chunks than threads and more: each chunk is done once, and every barrier passes.
void all_counts_of_threads() {
  for (int threads = 1; threads <= 256; threads += threads < 40 ? 1 : 9) {
    ThreadPool pool(threads, {});
    for (int chunks : {0, 1, 4, 63, 300}) {
      ChunkCounter first, second;
      std::vector<int> done(static_cast<size_t>(chunks)), after(static_cast<size_t>(chunks));
      pool.run([&](int thread) {
        for (int i = first.claim(); i < chunks; i = first.claim()) done[static_cast<size_t>(i)] += 1;
        pool.barrier().wait(thread);
        for (int i = second.claim(); i < chunks; i = second.claim()) {
          after[static_cast<size_t>(i)] += done[static_cast<size_t>(chunks - 1 - i)];
        }
      });
      for (int count : after) expect(count == 1, "a chunk was not done once", count);
    }
  }
  std::printf("behaviour: 1 to 256 threads, 0 to 300 chunks: each chunk once\n");
}

// A thread that is not scheduled while it holds a chunk: the others take all the rest.
void late_thread_delays_its_chunk_alone() {
  constexpr int kThreads = 4, kChunks = 40;
  ThreadPool pool(kThreads, {});
  ChunkCounter counter;
  std::atomic<int> done{0}, done_meanwhile{0};
  std::atomic<bool> held{false};
  pool.run([&](int thread) {
    if (thread == 1) {
      const int mine = counter.claim();
      expect(mine < kChunks, "the late thread found no chunk", mine);
      held.store(true);
      for (int wait = 0; wait < 10000 && done.load() < kChunks - 1; ++wait) doze(1);
      done_meanwhile.store(done.load());
    } else {
      while (!held.load()) std::this_thread::yield();
      for (int i = counter.claim(); i < kChunks; i = counter.claim()) done.fetch_add(1);
    }
    pool.barrier().wait(thread);
  });
  expect(done_meanwhile.load() == kChunks - 1, "chunks waited for a late thread", done_meanwhile.load());
  std::printf("behaviour: a late thread holds up its own chunk alone\n");
}

// Threads that wait for a late one sleep. Were they spinning, three of them would use 3 * 400 ms.
void waiting_threads_sleep() {
  constexpr int kThreads = 4, kLate = 400;
  ThreadPool pool(kThreads, {});
  const double before = cpu_seconds();
  pool.run([&](int thread) {
    if (thread == 2) doze(kLate);
    pool.barrier().wait(thread);
  });
  const double in_barrier = cpu_seconds() - before;
  expect(in_barrier < 0.1, "threads that wait at a barrier use the processor, seconds", in_barrier);
  doze(kLate);
  const double idle = cpu_seconds() - before - in_barrier;
  expect(idle < 0.1, "a pool without work uses the processor, seconds", idle);
  std::printf("behaviour: CPU time of 3 threads in a barrier for %d ms: %.2f ms; of an idle pool: %.2f ms\n", kLate,
              1e3 * in_barrier, 1e3 * idle);
}

// Arithmetic that takes some tens of microseconds.
double chunk_of_work(int seed) {
  double value = 1 + seed * 1e-9;
  for (int i = 0; i < 4000; ++i) value = value * 1.0000001 + 1e-12;
  return value;
}

// CPU seconds for `phases` phases of 16 chunks each.
double work(int threads, int phases) {
  ThreadPool pool(threads, {});
  std::vector<ChunkCounter> counters(static_cast<size_t>(phases));
  std::vector<double> results(16);
  const double before = cpu_seconds();
  pool.run([&](int thread) {
    for (ChunkCounter& counter : counters) {
      for (int i = counter.claim(); i < 16; i = counter.claim()) results[static_cast<size_t>(i)] += chunk_of_work(i);
      pool.barrier().wait(thread);
    }
  });
  return cpu_seconds() - before;
}

// More threads than processors, as under a quota: waiting must not cost as much as working. With 8 threads on one
// processor that spin for a fixed 100 microseconds each, the waits of a phase cost about as much as its work.
void threads_without_a_processor() {
  const OneProcessor pinned;
  const double one = work(1, 600), eight = work(8, 600), many = work(64, 600);
  expect(eight < 3 * one, "8 threads on one processor against 1 thread, CPU time as a ratio", eight / one);
  expect(many < 12 * one, "64 threads on one processor against 1 thread, CPU time as a ratio", many / one);
  std::printf("behaviour: CPU time of the same work on one processor: 8 threads %.2f, 64 threads %.2f times 1 thread\n",
              eight / one, many / one);
}

std::atomic<int> signals{0};

// A signal ends a futex wait early (EINTR); the wait goes on.
void signals_end_no_wait() {
  struct sigaction action{}, before{};
  action.sa_handler = [](int) { signals.fetch_add(1); };  // without SA_RESTART
  sigaction(SIGUSR1, &action, &before);
  constexpr int kThreads = 4, kRounds = 60;
  std::vector<pthread_t> handles(kThreads);
  std::atomic<bool> stop{false};
  {
    ThreadPool pool(kThreads, {});
    pool.run([&](int thread) { handles[static_cast<size_t>(thread)] = pthread_self(); });
    std::thread sender([&] {
      while (!stop.load()) {
        for (pthread_t handle : handles) pthread_kill(handle, SIGUSR1);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
    int value = 0;
    for (int round = 1; round <= kRounds; ++round) {
      pool.run([&](int thread) {
        if (thread == round % kThreads) {
          const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(2);
          while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
          value = round;
        }
        pool.barrier().wait(thread);
        expect(value == round, "a signal let a thread out of the barrier", round);
        pool.barrier().wait(thread);
      });
    }
    stop.store(true);
    sender.join();
  }
  sigaction(SIGUSR1, &before, nullptr);
  expect(signals.load() > kRounds, "too few signals arrived to show anything", signals.load());
  std::printf("behaviour: %d signals during %d runs end no wait\n", signals.load(), kRounds);
}

}  // namespace

int main() {
  all_counts_of_threads();
  late_thread_delays_its_chunk_alone();
  waiting_threads_sleep();
  threads_without_a_processor();
  signals_end_no_wait();
  return 0;
}
