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
  // Channels are even for activations, odd for gradients (schedule/lowering.h), and so are the
  // blocks of tags that lanes have.
  static_assert(kChannelTags / 2 % 2 == 0);
  return (tag - kFirstScheduleTag) % 2 == 0 ? Purpose::kActivation : Purpose::kGradient;
}

Traffic::Traffic(int ranks) : ranks_(ranks) {
  const auto size = static_cast<std::size_t>(ranks);
  counts_.resize(size * size * kPurposes.size());
}

std::size_t Traffic::place(WorldRank from, WorldRank to, Purpose purpose) const {
  DYNMO_CHECK(from.value >= 0 && from.value < ranks_ && to.value >= 0 && to.value < ranks_,
              "ranks below {}, got {} and {}", ranks_, from, to);
  const auto size = static_cast<std::size_t>(ranks_);
  return (from.index() * size + to.index()) * kPurposes.size() + static_cast<std::size_t>(purpose);
}

MessageCount& Traffic::at(WorldRank from, WorldRank to, Purpose purpose) {
  return counts_[place(from, to, purpose)];
}
const MessageCount& Traffic::at(WorldRank from, WorldRank to, Purpose purpose) const {
  return counts_[place(from, to, purpose)];
}

CountingTransport::CountingTransport(Transport& inner) : inner_(inner), sent_(inner.size()) {}

std::unique_ptr<Operation> CountingTransport::send(Member to, Tag tag,
                                                   std::span<const std::byte> bytes) {
  MessageCount& count = sent_.at(WorldRank(rank().value), WorldRank(to.value), purpose_of(tag));
  ++count.messages;
  count.bytes += Bytes{static_cast<std::int64_t>(bytes.size())};
  bytes_ += Bytes{static_cast<std::int64_t>(bytes.size())};
  return inner_.send(to, tag, bytes);
}

std::vector<MessageCount> CountingTransport::row() const {
  std::vector<MessageCount> counts;
  for (int to = 0; to < sent_.ranks(); ++to) {
    for (const Purpose purpose : kPurposes) {
      counts.push_back(sent_.at(WorldRank(rank().value), WorldRank(to), purpose));
    }
  }
  return counts;
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

Expected<Traffic> gather_traffic(Transport& transport, Tag tag, const Traffic& mine) {
  // A rank's own row: (messages, bytes) by receiver and purpose.
  std::vector<std::int64_t> row;
  for (int to = 0; to < mine.ranks(); ++to) {
    for (const Purpose purpose : kPurposes) {
      const MessageCount& count =
          mine.at(WorldRank(transport.rank().value), WorldRank(to), purpose);
      row.push_back(count.messages);
      row.push_back(count.bytes.value);
    }
  }
  DYNMO_ASSIGN(const auto rows, all_gather(transport, tag, std::as_bytes(std::span(row))));
  Traffic all(transport.size());
  for (int from = 0; from < all.ranks(); ++from) {
    std::memcpy(row.data(), rows[static_cast<std::size_t>(from)].data(),
                row.size() * sizeof(row[0]));
    auto next = row.begin();
    for (int to = 0; to < all.ranks(); ++to) {
      for (const Purpose purpose : kPurposes) {
        MessageCount& count = all.at(WorldRank(from), WorldRank(to), purpose);
        count.messages = *next++;
        count.bytes = Bytes{*next++};
      }
    }
  }
  return all;
}

}  // namespace dynmo::transport
