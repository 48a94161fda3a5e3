// SPDX-License-Identifier: Apache-2.0
#pragma once

// The clocks of a group's ranks, compared with that of rank 0. Ranks of one host share a steady
// clock. The offsets of other clocks are measured by messages, as NTP does.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

// The rates of two clocks differ by at most this, a quartz by half of it. All bounds rely on it.
inline constexpr double kMaxDrift = 1e-4;

// One question to a peer, and its answer. The peer's times are those of its own clock.
struct ClockTrip {
  std::int64_t asked_ns = 0;
  std::int64_t received_ns = 0;  // peer
  std::int64_t answered_ns = 0;  // peer
  std::int64_t back_ns = 0;
};

// The result of one measurement of a clock.
struct ClockReading {
  std::int64_t at_ns = 0;      // time of the measurement by the rank's clock
  std::int64_t offset_ns = 0;  // clock of the rank minus clock of the other one
  std::int64_t error_ns = 0;   // bound on the error of the offset; 0: the clock is shared
  friend bool operator==(const ClockReading&, const ClockReading&) = default;
};

// Returns the offset by the trip with the smallest error. The error is half of the trip's time on
// the way, plus the drift meanwhile. It is a bound for any delays in the two directions. Requires a
// trip.
[[nodiscard]] ClockReading reading_of(std::span<const ClockTrip> trips);

// A rank's clock from the first measurement of a group to the last one.
struct ClockFit {
  ClockReading first;
  ClockReading last;

  // Returns whether the rank and rank 0 read the same clock.
  [[nodiscard]] bool is_shared() const;
  // Returns the offset at a time of the rank's clock, with its error. The offset lies on the line
  // through both measurements, as far as kMaxDrift allows that. A clock that stood still, as that
  // of a suspended machine, contradicts kMaxDrift. Then the error covers both measurements.
  [[nodiscard]] ClockReading at(std::int64_t time_ns) const;
};

// The clock of this rank. Ranks with the same `id` have the same clock. An empty id means that no
// other rank has it.
struct RankClock {
  std::string id = {};
  std::function<std::int64_t()> now_ns = {};
};

// Compares all clocks with that of rank 0. Returns a reading for each rank, the same on all ranks.
// All ranks of the group call this function. Fails with kPeerLost.
//
// Takes two rounds of all ranks if there is one clock. Otherwise one rank of each clock also asks
// another one, in a binary tree below rank 0. Pairs ask at the same time. So with C clocks that
// takes log2(C) times a few round trips. Errors add up on the way from rank 0.
//
// An `id` may be wrong: a copy of a virtual machine has the boot of its original. If the two rounds
// refute it, the reading follows from them.
[[nodiscard]] Expected<std::vector<ClockReading>> read_clocks(Transport& group,
                                                              const RankClock& own);

}  // namespace dynmo::transport
