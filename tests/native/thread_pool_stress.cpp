// Stress of core/thread_pool for ThreadSanitizer (tools/test_tsan.sh): x86 hides weak memory order from tests of
// results, so every hand-over between threads is shown to the race detector instead. All data here is plain memory;
// only the pool, the barrier and the chunk counter order the accesses. Prints one line a case; exit code 1 on a wrong
// result.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "core/thread_pool.h"

namespace {

using neoserve::ChunkCounter;
using neoserve::ThreadPool;

void expect(bool condition, const char* what, int threads) {
  if (condition) return;
  std::fprintf(stderr, "FAILED with %d threads: %s\n", threads, what);
  std::exit(1);
}

// The caller writes, all threads read and write their own place, the caller reads: run() alone orders it.
void run_publishes_both_ways(int threads, int rounds) {
  ThreadPool pool(threads, {});
  int input = 0;
  std::vector<int> output(static_cast<size_t>(threads));
  for (int round = 1; round <= rounds; ++round) {
    input = round;
    pool.run([&](int thread) { output[static_cast<size_t>(thread)] = input + thread; });
    for (int thread = 0; thread < threads; ++thread) {
      expect(output[static_cast<size_t>(thread)] == round + thread, "run: a thread's write was not seen", threads);
    }
  }
}

// A replay in small: ops between barriers, each reading what other threads wrote in the op before, chunks claimed.
void barriers_order_ops(int threads, int rounds) {
  constexpr int kOps = 6, kItems = 23;
  ThreadPool pool(threads, {});
  auto counters = std::make_unique<ChunkCounter[]>(kOps);
  std::vector<int> front(kItems), back(kItems);
  for (int round = 0; round < rounds; ++round) {
    for (int op = 0; op < kOps; ++op) counters[static_cast<size_t>(op)].reset();
    for (int i = 0; i < kItems; ++i) front[static_cast<size_t>(i)] = round + i;
    pool.run([&](int thread) {
      for (int op = 0; op < kOps; ++op) {
        const std::vector<int>& source = op % 2 ? back : front;
        std::vector<int>& target = op % 2 ? front : back;
        ChunkCounter& counter = counters[static_cast<size_t>(op)];
        for (int i = counter.claim(); i < kItems; i = counter.claim()) {
          target[static_cast<size_t>(i)] = source[static_cast<size_t>((i + 1) % kItems)] + 1;
        }
        pool.barrier().wait(thread);
      }
    });
    for (int i = 0; i < kItems; ++i) {
      const int wanted = round + (i + kOps) % kItems + kOps;
      expect(front[static_cast<size_t>(i)] == wanted, "barrier: an op read before the one ahead was done", threads);
    }
  }
}

// Every chunk goes to one thread; with fewer chunks than threads the rest do nothing.
void chunks_are_claimed_once(int threads, int rounds) {
  ThreadPool pool(threads, {});
  for (int round = 0; round < rounds; ++round) {
    const int count = round % 9;
    ChunkCounter counter;
    std::vector<int> owners(static_cast<size_t>(count), -1);
    pool.run([&](int thread) {
      for (int i = counter.claim(); i < count; i = counter.claim()) {
        expect(owners[static_cast<size_t>(i)] == -1, "chunk counter: a chunk was claimed twice", threads);
        owners[static_cast<size_t>(i)] = thread;
      }
    });
    for (int owner : owners) expect(owner >= 0, "chunk counter: a chunk was left out", threads);
  }
}

// Workers and waiters that have gone to sleep are woken: the caller and one thread of the barrier dawdle past the spin.
void sleepers_wake(int threads, int rounds) {
  ThreadPool pool(threads, {});
  int value = 0;
  for (int round = 0; round < rounds; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(round % 3));
    pool.run([&](int thread) {
      if (thread == round % threads) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        value = round;
      }
      pool.barrier().wait(thread);
      expect(value == round, "barrier: a sleeper woke early", threads);
      pool.barrier().wait(thread);
    });
  }
}

// Concurrent callers take turns: the lock inside run() is all that guards `total`.
void callers_take_turns(int threads, int rounds) {
  ThreadPool pool(threads, {});
  long total = 0;
  const auto call = [&] {
    for (int round = 0; round < rounds; ++round) {
      pool.run([&](int thread) {
        if (thread == 0) ++total;
      });
    }
  };
  std::thread other(call);
  call();
  other.join();
  expect(total == 2L * rounds, "run: two callers ran at once", threads);
}

// A pool ends with its workers spinning, asleep, or never used.
void pools_end(int threads, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    ThreadPool pool(threads, {});
    if (round % 3 > 0) pool.run([](int) {});
    if (round % 3 > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

struct Case {
  const char* name;
  void (*run)(int threads, int rounds);
  int rounds;
};

constexpr Case kCases[] = {
    {"run publishes both ways", run_publishes_both_ways, 600}, {"barriers order ops", barriers_order_ops, 200},
    {"chunks are claimed once", chunks_are_claimed_once, 500}, {"sleepers wake", sleepers_wake, 20},
    {"callers take turns", callers_take_turns, 150},           {"pools end", pools_end, 30},
};

}  // namespace

int main() {
  for (const Case& test : kCases) {
    for (int threads = 1; threads <= 5; ++threads) test.run(threads, test.rounds);
    std::printf("thread pool: %s, 1 to 5 threads, %d rounds each\n", test.name, test.rounds);
  }
  return 0;
}
