// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/gather.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>

#include "dynmo/core/digest.h"

namespace dynmo::transport {

Expected<std::vector<std::string>> gather_texts(Transport& transport, Tag tag,
                                                std::string_view mine) {
  const std::uint64_t size = mine.size();
  DYNMO_ASSIGN(const auto sizes, all_gather(transport, tag, std::as_bytes(std::span(&size, 1))));
  std::vector<std::uint64_t> counts(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i)
    std::memcpy(&counts[i], sizes[i].data(), sizeof(std::uint64_t));
  std::vector<std::string> texts(sizes.size());
  const std::uint64_t largest = *std::max_element(counts.begin(), counts.end());
  if (largest == 0) return texts;
  std::string padded(mine);
  padded.resize(largest);
  DYNMO_ASSIGN(const auto all, all_gather(transport, tag, std::as_bytes(std::span(padded))));
  for (std::size_t i = 0; i < all.size(); ++i) {
    texts[i].assign(reinterpret_cast<const char*>(all[i].data()), counts[i]);
  }
  return texts;
}

Expected<std::vector<Json>> gather_json(Transport& transport, Tag tag, const Json& mine,
                                        std::string_view origin) {
  // Bytes that are not UTF-8, such as a name in a message of the system, are replaced.
  const std::string text =
      mine.is_null() ? "" : mine.dump(-1, ' ', false, Json::error_handler_t::replace);
  DYNMO_ASSIGN(const auto texts, gather_texts(transport, tag, text));
  std::vector<Json> values(texts.size());
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (texts[i].empty()) continue;
    DYNMO_ASSIGN(values[i], parse_json(texts[i], origin));
  }
  return values;
}

Expected<Json> first_json(Transport& transport, Tag tag, const Json& mine,
                          std::string_view origin) {
  DYNMO_ASSIGN(const auto values, gather_json(transport, tag, mine, origin));
  for (const Json& value : values) {
    if (!value.is_null()) return value;
  }
  return Json();
}

Expected<std::vector<std::vector<double>>> gather_numbers(Transport& transport, Tag tag,
                                                          std::span<const double> mine) {
  DYNMO_ASSIGN(const auto all, all_gather(transport, tag, std::as_bytes(mine)));
  std::vector<std::vector<double>> numbers(all.size(), std::vector<double>(mine.size()));
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::ranges::copy(all[i], std::as_writable_bytes(std::span(numbers[i])).begin());
  }
  return numbers;
}

Expected<void> agree(Transport& transport, Tag tag, std::string_view what, std::string_view text) {
  const std::string mine = digest_of(text).hex();
  DYNMO_ASSIGN(const auto all, all_gather(transport, tag, std::as_bytes(std::span(mine))));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const std::string_view theirs(reinterpret_cast<const char*>(all[rank].data()),
                                  all[rank].size());
    if (theirs == mine) continue;
    return make_error(ErrorCode::kInternal, "rank {} derived {} {}, rank {} derived {}",
                      transport.number_of(transport.rank()), what, mine,
                      transport.number_of(Member(static_cast<int>(rank))), theirs);
  }
  return {};
}

}  // namespace dynmo::transport
