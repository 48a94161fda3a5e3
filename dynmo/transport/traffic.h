// SPDX-License-Identifier: Apache-2.0
#pragma once

// Counts the messages of a group by sender, receiver and purpose. A decorator counts what its rank
// sends.

#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/traffic.h"
#include "dynmo/core/units.h"
#include "dynmo/transport/place.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

[[nodiscard]] Purpose purpose_of(Tag tag);  // requires a tag of transport/tags.h

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

  // Returns the count of messages that this rank has sent to another.
  [[nodiscard]] const MessageCount& sent(Member to, Purpose purpose) const {
    return row_[place(to, purpose)];
  }
  // Returns the counts of sent() as a list: by receiver, then in the order of kPurposes.
  [[nodiscard]] const std::vector<MessageCount>& row() const { return row_; }
  [[nodiscard]] Bytes sent_bytes() const { return bytes_; }

 private:
  [[nodiscard]] static std::size_t place(Member to, Purpose purpose) {
    return to.index() * kPurposes.size() + static_cast<std::size_t>(purpose);
  }

  Transport& inner_;
  std::vector<MessageCount> row_;
  Bytes bytes_;
};

// Returns the rows of all ranks. All ranks call it. Each rank gives its own list
// (CountingTransport::row). The messages of the call are not counted. Fails with kPeerLost.
[[nodiscard]] Expected<TrafficRows> gather_rows(Transport& transport, Tag tag,
                                                const std::vector<MessageCount>& mine);

}  // namespace dynmo::transport
