#include "core/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <utility>

#include "core/placement.h"

namespace neoserve {

size_t system_page_size() {
  return static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

size_t huge_page_size(size_t page) {
  return page * (page / sizeof(uint64_t));
}

MappingLayout mapping_layout(size_t bytes, size_t page) {
  const size_t huge = huge_page_size(page);
  // Large blocks start on a huge-page border so that the first and last megabytes can be huge pages too. With pages of
  // 64 KiB the largest huge page has 512 MiB, but recent kernels also have some of 2 MiB.
  const size_t alignment = bytes >= huge ? huge : std::max(page, bytes >= kLargeMapping ? kLargeMapping : page);
  const size_t length = round_up(bytes, page);
  if (length < bytes || length + alignment < length) throw std::bad_alloc();
  return {alignment, length, length + (alignment > page ? alignment : 0)};
}

Memory::Memory(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  if (!map_huge(bytes)) map_ordinary(bytes);
  add_mapping(data_, bytes);
}

// A block smaller than a page of the pool would waste most of it.
bool Memory::map_huge(size_t bytes) {
  const size_t huge = reserved_huge_page_size();
  if (huge == 0 || bytes < huge || bytes + huge < bytes) return false;
  const size_t length = round_up(bytes, huge);
  mapping_ = map_reserved(length);
  if (mapping_ == nullptr) return false;
  mapped_ = length;
  data_ = static_cast<uint8_t*>(mapping_);
  bind_to_nodes(mapping_, length);
  return true;
}

void Memory::map_ordinary(size_t bytes) {
  const MappingLayout layout = mapping_layout(bytes, system_page_size());
  mapped_ = layout.mapped;
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  data_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<size_t>(mapping_), layout.alignment));
  bind_to_nodes(data_, layout.length);
  if (bytes >= kLargeMapping) advise_huge_pages(data_, layout.length);
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_(std::exchange(other.mapped_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

Memory::~Memory() {
  if (mapping_ == nullptr) return;
  remove_mapping(data_);
  munmap(mapping_, mapped_);
}

}  // namespace neoserve
