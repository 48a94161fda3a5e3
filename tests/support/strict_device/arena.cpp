// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>
#include <unistd.h>

#include "arena_impl.h"
#include "dynmo/core/check.h"

namespace dynmo::strict {
namespace {

int flags_of(Access access) {
  if (access == Access::kNone) return PROT_NONE;
  return access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
}

}  // namespace

std::size_t whole_pages(std::size_t bytes) {
  static const auto kPage = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + kPage - 1) / kPage * kPage;
}

Arena::Arena(const char* name, std::size_t bytes, Access access) : bytes_(bytes) {
  const int file = ::memfd_create(name, MFD_CLOEXEC);
  DYNMO_CHECK(file >= 0 && ::ftruncate(file, static_cast<off_t>(bytes)) == 0, "{} bytes of memory",
              bytes);
  const auto map = [&](int protection) {
    void* const at = ::mmap(nullptr, bytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    DYNMO_CHECK(at != MAP_FAILED, "{} bytes of addresses", bytes);
    return static_cast<std::byte*>(at);
  };
  host_ = map(flags_of(access));
  open_ = map(PROT_READ | PROT_WRITE);
  ::close(file);
}

std::byte* Arena::take(std::size_t bytes, std::size_t alignment) {
  taken_ = (taken_ + alignment - 1) / alignment * alignment;
  DYNMO_CHECK(bytes_ - taken_ >= bytes, "memory for {} bytes more, of {} bytes {} are taken", bytes,
              bytes_, taken_);
  std::byte* const at = host_ + taken_;
  taken_ += bytes;
  return at;
}

bool Arena::contains(const void* at) const { return at >= host_ && at < host_ + bytes_; }

std::byte* Arena::open(const void* at) const {
  return open_ + (static_cast<const std::byte*>(at) - host_);
}

void Arena::protect(std::span<std::byte> pages, Access access) const {
  const int done = ::mprotect(pages.data(), whole_pages(pages.size()), flags_of(access));
  DYNMO_CHECK(done == 0, "the protection of {} bytes changed", pages.size());
}

}  // namespace dynmo::strict
