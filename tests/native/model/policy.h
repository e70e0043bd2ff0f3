// The policy of native/core/sync.h that runs on the model.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "core/sync.h"
#include "explorer.h"

namespace model {

template <class T>
uint64_t to_word(T value) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<uint64_t>(value);
  } else {
    return static_cast<uint64_t>(static_cast<int64_t>(value));
  }
}

template <class T>
T from_word(uint64_t word) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(word);
  } else {
    return static_cast<T>(word);
  }
}

struct ModelSync {
  template <class T>
  class Atomic {
   public:
    Atomic(T value) : location_(new_location(to_word(value), current_lifetime())) {}
    T load(neoserve::Site site, std::memory_order order) const {
      return from_word<T>(act(Kind::kLoad, location_, static_cast<int>(site), order, 0));
    }
    void store(neoserve::Site site, T value, std::memory_order order) {
      act(Kind::kStore, location_, static_cast<int>(site), order, to_word(value));
    }
    T fetch_add(neoserve::Site site, T amount, std::memory_order order) {
      return from_word<T>(act(Kind::kAdd, location_, static_cast<int>(site), order, to_word(amount)));
    }
    T fetch_sub(neoserve::Site site, T amount, std::memory_order order) {
      return from_word<T>(act(Kind::kAdd, location_, static_cast<int>(site), order, uint64_t{0} - to_word(amount)));
    }
    int location() const { return location_; }

   private:
    int location_;
  };

  template <class T>
  class Plain {
   public:
    Plain(T value) : variable_(new_plain(to_word(value))) {}
    T get() const { return from_word<T>(read_plain(variable_)); }
    void set(T value) { write_plain(variable_, to_word(value)); }

   private:
    int variable_;
  };

  // One look before sleeping: further looks that change nothing lead to the same states.
  struct Spin {
    bool again() { return false; }
    void hit() const {}
    void miss() const {}
  };

  static void futex_wait(Atomic<uint32_t>& word, uint32_t seen) {
    act(Kind::kFutexWait, word.location(), -1, std::memory_order_relaxed, seen);
  }
  static void futex_wake_all(Atomic<uint32_t>& word) {
    act(Kind::kFutexWake, word.location(), -1, std::memory_order_relaxed, 0);
  }
};

}  // namespace model
