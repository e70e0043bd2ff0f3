#include "core/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>
#include <utility>

namespace neoserve {
namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

size_t system_page_size() {
  return static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

Memory::Memory(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  // Large blocks start on a huge-page border so that the first and last megabytes can be huge pages too.
  const size_t alignment = bytes >= kHugePage ? kHugePage : system_page_size();
  const size_t length = round_up(bytes, system_page_size());
  if (length < bytes || length + alignment < length) throw std::bad_alloc();
  mapped_ = length + (alignment > system_page_size() ? alignment : 0);
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  data_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<size_t>(mapping_), alignment));
  // Only advice: a kernel without transparent huge pages refuses it and ordinary pages serve.
  if (bytes >= kHugePage) (void)madvise(data_, length, MADV_HUGEPAGE);
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
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

}  // namespace neoserve
