// SPDX-License-Identifier: Apache-2.0
#pragma once

// The worlds of one exploration share this: memberships and messages, each once, and what has come
// of each event. The state machine is a pure function, and few of its states make many worlds; so a
// world refers to them, is cheap to copy, and most events are looked up.

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "dynmo/elastic/membership.h"

namespace dynmo::elastic {

struct Packet {
  Message message;
  std::uint64_t hash = 0;  // of all that it says
};

struct Known {
  Membership membership;
  MemberId leader;         // in its eyes
  std::uint64_t hash = 0;  // of all that its future depends on
};

class Memberships {
 public:
  enum class Keep {
    kEach,  // each as it comes, and no hashes: for the few events of one schedule
    kOnce,
    // And the order in which a leader was told is forgotten: nothing that it does depends on it but
    // the order in which it names views and members, which nobody looks at.
    kOnceByMember,
  };
  explicit Memberships(Keep keep) : keep_(keep) {}

  struct Outcome {
    const Known* after = nullptr;
    std::vector<Action> actions;
    std::vector<const Packet*> packets;  // by action: of those that send
  };

  const Known* known(Membership membership);
  const Packet* packet(const Message& message);
  const Outcome& handled(const Known* known, const Event& event);
  // The same for a message, which need not be looked at again.
  const Outcome& handled(const Known* known, MemberId from, const Packet* packet);

 private:
  struct Key {
    const Known* known;
    std::uint64_t event;
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct HashOfKey {
    std::size_t operator()(const Key& key) const noexcept {
      return (reinterpret_cast<std::uintptr_t>(key.known) >> 4) * 0x9e3779b97f4a7c15ULL ^ key.event;
    }
  };
  const Outcome& handled(const Key& key, const Event& event);
  Outcome outcome_of(const Known* known, const Event& event);

  Keep keep_;
  std::deque<Known> each_known_;
  std::deque<Packet> each_packet_;
  std::deque<Outcome> each_outcome_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Known>> memberships_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Packet>> packets_;
  std::unordered_map<Key, Outcome, HashOfKey> outcomes_;
};

}  // namespace dynmo::elastic
