// Page-aligned memory for weights, KV pools and arenas.
#pragma once

#include <cstddef>
#include <cstdint>

namespace neoserve {

constexpr size_t kCacheLine = 64;

constexpr size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Blocks of at least this size are put on huge pages where the system has them.
constexpr size_t kLargeMapping = size_t{2} << 20;

// How a block is mapped, in bytes: where it starts, how long it is in whole pages, and what is asked of the system so
// that an aligned start lies inside.
struct MappingLayout {
  size_t alignment, length, mapped;
};

// The layout of a block with pages of `page` bytes. Throws std::bad_alloc when the sizes overflow.
MappingLayout mapping_layout(size_t bytes, size_t page);

// The largest transparent huge page: what one full table of eight-byte entries maps (x86-64, AArch64).
size_t huge_page_size(size_t page);

// Zero-filled anonymous memory; committed by the system on first touch, placed as the calling thread's policy says
// (core/placement.h). Movable, not copyable. Throws std::bad_alloc when the system refuses.
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
  bool map_huge(size_t bytes);
  void map_ordinary(size_t bytes);

  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
};

// The system's page size in bytes, read at run time (4 KiB, 16 KiB or 64 KiB).
size_t system_page_size();

}  // namespace neoserve
