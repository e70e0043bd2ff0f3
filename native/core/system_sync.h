// The policy of core/sync.h that ships: std::atomic, Linux futexes, and a spin that is bounded in time.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/sync.h"

namespace neoserve {

struct SystemSync {
  template <class T>
  class Atomic {
   public:
    constexpr Atomic(T value) : value_(value) {}  // NOLINT: as std::atomic
    T load(Site, std::memory_order order) const { return value_.load(order); }
    void store(Site, T value, std::memory_order order) { value_.store(value, order); }
    T fetch_add(Site, T amount, std::memory_order order) { return value_.fetch_add(amount, order); }
    T fetch_sub(Site, T amount, std::memory_order order) { return value_.fetch_sub(amount, order); }

   private:
    friend struct SystemSync;
    std::atomic<T> value_;
  };

  template <class T>
  class Plain {
   public:
    constexpr Plain(T value) : value_(value) {}  // NOLINT
    T get() const { return value_; }
    void set(T value) { value_ = value; }

   private:
    T value_;
  };

  // Spins until its time is up. The time is bounded, not the number of looks: a pause takes about 10 to 140 cycles,
  // depending on the processor. It covers the usual gap between ops (microseconds) and no more than what sleeping and
  // waking cost. A thread whose waits end asleep spins less and less, one whose waits end while it spins more again, so
  // that threads without a core of their own (a quota, a neighbour) leave it to those who have work.
  class Spin {
   public:
    bool again() {
      relax();
      if (++looks_ % kLooksPerClock != 0) return true;
      deadline_ = check_time(deadline_);
      return deadline_ != 0;
    }
    void hit() const {
      if (looks_ > 0) lengthen();
    }
    void miss() const { shorten(); }

   private:
    static constexpr uint32_t kLooksPerClock = 16;

    static void relax() {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      // `yield` is a no-op on Neoverse cores; `isb` empties the pipeline, some tens of cycles.
      __asm__ volatile("isb" ::: "memory");
#endif
    }
    // The deadline of a spin, which begins when `deadline` is 0; 0 when it has passed.
    static int64_t check_time(int64_t deadline);
    static void lengthen();
    static void shorten();

    uint32_t looks_ = 0;
    int64_t deadline_ = 0;  // nanoseconds of the steady clock; 0: it has not been read
  };

  // Sleeps while `word` is `seen`; may return at any time.
  static void futex_wait(Atomic<uint32_t>& word, uint32_t seen);
  static void futex_wake_all(Atomic<uint32_t>& word);
};

}  // namespace neoserve
