// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory that is mapped twice: once as the host sees it, with pages that can be closed, and once
// open, for what the device does.

#include <cstddef>
#include <cstdint>
#include <span>

namespace dynmo::strict {

enum class Access { kNone, kRead, kAll };

class Arena {
 public:
  // Reserves addresses; memory is taken when it is first written.
  Arena(const char* name, std::size_t bytes, Access access);

  // Returns `bytes` more at the host's address, a multiple of `alignment`.
  [[nodiscard]] std::byte* take(std::size_t bytes, std::size_t alignment);
  [[nodiscard]] bool contains(const void* at) const;
  // Returns the device's address of a host's one.
  [[nodiscard]] std::byte* open(const void* at) const;
  void protect(std::span<std::byte> pages, Access access) const;

 private:
  std::byte* host_ = nullptr;
  std::byte* open_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t taken_ = 0;
};

[[nodiscard]] std::size_t whole_pages(std::size_t bytes);

}  // namespace dynmo::strict
