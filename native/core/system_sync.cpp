#include "core/system_sync.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>

namespace neoserve {
namespace {

// Nanoseconds that a wait may spin. A sleep and its wake-up cost some microseconds to tens of them; spinning about as
// long as that is at most about twice as dear as knowing the length of the wait (Karlin, Li, Manasse, Owicki: Empirical
// studies of competitive spinning, SOSP 1991). The upper bound also spans the sampling between two replays of a step.
constexpr int32_t kLongestSpin = 100'000, kShortestSpin = 1'000;

thread_local int32_t spin_time = kLongestSpin;

int64_t now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace

// std::atomic<uint32_t> is one futex word (lock-free, same size); std::atomic::wait needs libstdc++ 11.
static_assert(sizeof(SystemSync::Atomic<uint32_t>) == sizeof(uint32_t));

int64_t SystemSync::Spin::check_time(int64_t deadline) {
  const int64_t time = now();
  if (deadline == 0) return time + spin_time;
  return time < deadline ? deadline : 0;
}

void SystemSync::Spin::lengthen() {
  spin_time = std::min(kLongestSpin, spin_time + kLongestSpin / 8);
}

void SystemSync::Spin::shorten() {
  spin_time = std::max(kShortestSpin, spin_time / 2);
}

void SystemSync::futex_wait(Atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word.value_), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void SystemSync::futex_wake_all(Atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word.value_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace neoserve
