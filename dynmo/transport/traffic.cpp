// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/traffic.h"

#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/transport/tags.h"

namespace dynmo::transport {

Purpose purpose_of(Tag tag) {
  DYNMO_CHECK(tag >= 0, "a tag of at least 0, got {}", tag);
  if (tag < kFirstMigrationTag) return Purpose::kControl;
  if (tag < kFirstReductionTag) return Purpose::kMigration;
  if (tag < kFirstScheduleTag) return Purpose::kReduction;
  // Channels are even for activations and odd for gradients (schedule/lowering.h). A lane's block
  // of tags has an even size, so its tags have the same parity.
  static_assert(kChannelTags / 2 % 2 == 0);
  return (tag - kFirstScheduleTag) % 2 == 0 ? Purpose::kActivation : Purpose::kGradient;
}

CountingTransport::CountingTransport(Transport& inner)
    : inner_(inner), row_(static_cast<std::size_t>(inner.size()) * kPurposes.size()) {}

std::unique_ptr<Operation> CountingTransport::send(Member to, Tag tag,
                                                   std::span<const std::byte> bytes) {
  add(row_[place(to, purpose_of(tag))], {1, Bytes{static_cast<std::int64_t>(bytes.size())}});
  bytes_ += Bytes{static_cast<std::int64_t>(bytes.size())};
  return inner_.send(to, tag, bytes);
}

Expected<TrafficRows> gather_rows(Transport& transport, Tag tag,
                                  const std::vector<MessageCount>& mine) {
  std::vector<std::int64_t> numbers;
  for (const MessageCount& count : mine) {
    numbers.push_back(count.messages);
    numbers.push_back(count.bytes.value);
  }
  DYNMO_ASSIGN(const auto all, all_gather(transport, tag, std::as_bytes(std::span(numbers))));
  std::vector<TrafficRow> rows;
  for (std::size_t from = 0; from < all.size(); ++from) {
    std::memcpy(numbers.data(), all[from].data(), numbers.size() * sizeof(numbers[0]));
    auto next = numbers.begin();
    for (int to = 0; to < transport.size(); ++to) {
      for (const Purpose purpose : kPurposes) {
        TrafficRow& row = rows.emplace_back();
        row.from = WorldRank(static_cast<std::int32_t>(from));
        row.to = WorldRank(to);
        row.purpose = purpose;
        row.count.messages = *next++;
        row.count.bytes = Bytes{*next++};
      }
    }
  }
  return sums_of(std::move(rows));
}

}  // namespace dynmo::transport
