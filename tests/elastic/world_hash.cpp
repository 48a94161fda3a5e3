// SPDX-License-Identifier: Apache-2.0
// What tells two worlds apart.
#include <cstdint>

#include "tests/elastic/world.h"

namespace dynmo::elastic {
namespace {

// A sum of these does not depend on the order of its terms.
std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ value >> 32) * 0xd6e8feb86659fd93ULL;
  value = (value ^ value >> 32) * 0xd6e8feb86659fd93ULL;
  return value ^ value >> 32;
}

class Hash {
 public:
  template <typename T>
  void add(T value) {
    value_ = mixed(value_ * 0x9e3779b97f4a7c15ULL + static_cast<std::uint64_t>(value) + 1);
  }
  [[nodiscard]] std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0x243f6a8885a308d3ULL;
};

}  // namespace

// `reduced` leaves out what has no effect any more:
// - Copies of a member that is down in a world without steps: nobody reads them. (With steps,
// check_decision looks at what was there.)
// - The newest group told as failed where it is older than the installed one: it is compared with
//   the installed and with forming ones alone, whose numbers only grow.
// goes_down() and Memberships do the rest.
std::uint64_t World::hash_of(const Node& one) const {
  const bool reduced = options_.reduced;
  Hash hash;
  hash.add(one.up);
  hash.add(one.done_group);
  hash.add(one.done_step);
  hash.add(one.voted);
  hash.add(one.yes);
  hash.add(one.heard);
  hash.add(one.step);
  if (!reduced || one.up || options_.steps > 0) {
    hash.add(one.copies.size());
    for (const Copy& copy : one.copies) {
      hash.add(copy.layer);
      hash.add(copy.step);
      hash.add(copy.kind);
      hash.add(copy.token);
      hash.add(copy.fetched);
    }
  }
  if (!one.up) return hash.value();
  hash.add(one.known->hash);
  hash.add(one.kept);
  hash.add(one.stopped);
  hash.add(one.main);
  hash.add(one.group);
  hash.add(one.first_step);
  hash.add(one.complete);
  hash.add(one.updated);
  hash.add(one.applied);
  const bool old = one.failed < static_cast<int>(one.membership().standing.installed.generation);
  hash.add(reduced && old ? std::int8_t{0} : one.failed);
  for (int b = 0; b < size(); ++b) hash.add(one.told[idx(b)]);
  return hash.value();
}

std::uint64_t World::hash() const {
  Hash hash;
  for (const auto& one : nodes_) {
    if (one->hash == 0) one->hash = hash_of(*one);
    hash.add(one->hash);
  }
  std::array<std::array<std::int8_t, kMaxNodes>, kMaxNodes> count = {};
  std::uint64_t flight = 0;
  for (const InFlight& one : flight_) {
    const auto place = static_cast<std::uint64_t>((one.from * kMaxNodes + one.to) * 256 +
                                                  count[idx(one.from)][idx(one.to)]++);
    flight += mixed(one.packet->hash + mixed(place + 1));
  }
  hash.add(flight);
  for (int a = 0; a < size(); ++a) {
    for (int b = 0; b < a; ++b) hash.add(link(a, b));
  }
  hash.add(faults_);
  hash.add(changes_);
  hash.add(joins_);
  for (const Planned& change : planned_) {
    hash.add(change.base.generation);
    for (const Member& member : change.base.members) hash.add(member.number);
    hash.add(change.next.generation);
    for (const Member& member : change.next.members) hash.add(member.number);
  }
  hash.add(checkpoints_);
  hash.add(checkpoint_);
  for (const auto& [generation, step] : snapshots_) {
    hash.add(generation);
    hash.add(step);
  }
  return hash.value();
}

}  // namespace dynmo::elastic
