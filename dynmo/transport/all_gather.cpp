// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include "dynmo/core/check.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

Expected<std::vector<std::vector<std::byte>>> all_gather(Transport& transport, Tag tag,
                                                         std::span<const std::byte> mine) {
  DYNMO_CHECK(tag >= 0, "a tag of at least 0, got {}", tag);
  const auto size = static_cast<std::size_t>(transport.size());
  const std::size_t self = transport.rank().index();
  std::vector<std::vector<std::byte>> all(size, std::vector<std::byte>(mine.size()));
  all[self].assign(mine.begin(), mine.end());
  if (mine.empty()) return all;

  // Every rank posts its receives first, so that each send finds its receive in any order of the
  // ranks. Peers are in the order of distance, so that not all ranks begin with rank 0.
  std::vector<std::unique_ptr<Operation>> operations;
  for (std::size_t distance = 1; distance < size; ++distance) {
    const std::size_t from = (self + size - distance) % size;
    operations.push_back(transport.receive(Member(static_cast<int>(from)), tag, all[from]));
  }
  for (std::size_t distance = 1; distance < size; ++distance) {
    const std::size_t to = (self + distance) % size;
    operations.push_back(transport.send(Member(static_cast<int>(to)), tag, mine));
  }
  // Waits for all, even after an error, because an operation may be destroyed early only if the
  // group has failed. Then these waits return at once.
  std::optional<Error> first;
  for (const auto& operation : operations) {
    const auto done = operation->wait();
    if (!done && !first) first = done.error();
  }
  if (first) return *first;
  return all;
}

}  // namespace dynmo::transport
