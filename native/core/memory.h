// Page-aligned memory for weights, KV pools and arenas.
#pragma once

#include <cstddef>
#include <cstdint>

namespace neoserve {

constexpr size_t kCacheLine = 64;

constexpr size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Zero-filled anonymous memory; committed by the system on first touch, advised for huge pages when large.
// Movable, not copyable. Throws std::bad_alloc when the system refuses.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes);
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
};

// The system's page size in bytes, read at run time (4 KiB, 16 KiB or 64 KiB).
size_t system_page_size();

}  // namespace neoserve
