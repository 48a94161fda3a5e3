// SPDX-License-Identifier: Apache-2.0
#pragma once

// Counts the messages of a group by sender, receiver and purpose. A decorator counts what its rank
// sends, and a matrix has the counts of all ranks.

#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/traffic.h"
#include "dynmo/core/units.h"
#include "dynmo/transport/place.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

[[nodiscard]] Purpose purpose_of(Tag tag);  // requires a tag of transport/tags.h

// The messages by sender, receiver and purpose. A value.
class Traffic {
 public:
  explicit Traffic(int ranks = 0);
  [[nodiscard]] int ranks() const { return ranks_; }
  // Returns one count. Requires ranks below ranks().
  [[nodiscard]] MessageCount& at(WorldRank from, WorldRank to, Purpose purpose);
  [[nodiscard]] const MessageCount& at(WorldRank from, WorldRank to, Purpose purpose) const;
  friend bool operator==(const Traffic&, const Traffic&) = default;

 private:
  [[nodiscard]] std::size_t place(WorldRank from, WorldRank to, Purpose purpose) const;
  int ranks_;
  std::vector<MessageCount> counts_;
};

// Passes all calls on to `inner`, which must outlive it, and counts a message when its send is
// posted. The same threads may use it as `inner`.
class CountingTransport final : public Transport {
 public:
  explicit CountingTransport(Transport& inner);

  [[nodiscard]] Member rank() const override { return inner_.rank(); }
  [[nodiscard]] int size() const override { return inner_.size(); }
  [[nodiscard]] int number_of(Member rank) const override { return inner_.number_of(rank); }
  [[nodiscard]] std::unique_ptr<Operation> send(Member to, Tag tag,
                                                std::span<const std::byte> bytes) override;
  [[nodiscard]] std::unique_ptr<Operation> receive(Member from, Tag tag,
                                                   std::span<std::byte> bytes) override {
    return inner_.receive(from, tag, bytes);
  }
  void abort(const Error& why) override { inner_.abort(why); }

  // Returns what this rank has sent.
  [[nodiscard]] const Traffic& sent() const { return sent_; }
  // Returns the same as a list: by receiver, then in the order of kPurposes.
  [[nodiscard]] std::vector<MessageCount> row() const;
  [[nodiscard]] Bytes sent_bytes() const { return bytes_; }

 private:
  Transport& inner_;
  Traffic sent_;
  Bytes bytes_;
};

// Returns the sum of the contributions of all ranks. All ranks call it. Its own messages are not
// counted.
[[nodiscard]] Expected<Traffic> gather_traffic(Transport& transport, Tag tag, const Traffic& mine);

// Returns the rows of all ranks. Each rank gives its own list (CountingTransport::row).
[[nodiscard]] Expected<TrafficRows> gather_rows(Transport& transport, Tag tag,
                                                const std::vector<MessageCount>& mine);

}  // namespace dynmo::transport
