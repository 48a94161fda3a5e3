// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/clocks.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>

#include "dynmo/core/check.h"
#include "dynmo/core/digest.h"
#include "dynmo/transport/tags.h"

namespace dynmo::transport {
namespace {

constexpr std::size_t kTrips = 8;

// Returns the largest change of an offset in this time, rounded up.
std::int64_t drift_ns(std::int64_t time_ns) {
  return std::llround(std::ceil(std::abs(static_cast<double>(time_ns)) * kMaxDrift));
}

// Bounds of an offset.
struct OffsetRange {
  std::int64_t low = 0;
  std::int64_t high = 0;

  [[nodiscard]] std::int64_t middle() const { return low + (high - low) / 2; }
  [[nodiscard]] std::int64_t error() const { return (high - low + 1) / 2; }
};

OffsetRange range_at(const ClockReading& reading, std::int64_t time_ns) {
  const std::int64_t error = reading.error_ns + drift_ns(time_ns - reading.at_ns);
  return {reading.offset_ns - error, reading.offset_ns + error};
}

// The message of every rank in the first and the last round.
struct ClockHello {
  Digest id;  // 0: no other rank has it
  std::int64_t now_ns = 0;
  ClockReading reading = {};  // against its parent in the tree
};
static_assert(std::is_trivially_copyable_v<ClockHello>);

Expected<std::vector<ClockHello>> gather_hellos(Transport& group, Tag tag, const ClockHello& mine) {
  DYNMO_ASSIGN(const auto all, all_gather(group, tag, std::as_bytes(std::span(&mine, 1))));
  std::vector<ClockHello> hellos(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::memcpy(&hellos[i], all[i].data(), sizeof(ClockHello));
  }
  return hellos;
}

// Receives of one peer, posted before the first message to it. So no message waits for its receive,
// which would look like a delay of the link.
template <typename Message>
class PostedReceives {
 public:
  PostedReceives(Transport& group, Member peer, Tag tag) {
    for (Message& message : messages_) {
      receives_.push_back(group.receive(peer, tag, std::as_writable_bytes(std::span(&message, 1))));
    }
  }
  [[nodiscard]] Expected<Message> take() {
    const std::size_t i = taken_++;
    DYNMO_TRY(receives_[i]->wait());
    return messages_[i];
  }
  // Waits for all receives after the group has failed. Then nothing writes to this memory any more.
  void abandon() {
    while (taken_ < receives_.size()) static_cast<void>(take());
  }

 private:
  std::array<Message, kTrips> messages_ = {};
  std::vector<std::unique_ptr<Operation>> receives_;
  std::size_t taken_ = 0;
};

using Question = std::byte;
using Answer = std::array<std::int64_t, 2>;  // arrival of the question, and departure

template <typename Message>
Expected<void> send_message(Transport& group, Member peer, Tag tag, const Message& message) {
  return group.send(peer, tag, std::as_bytes(std::span(&message, 1)))->wait();
}

Expected<std::vector<ClockTrip>> ask_clock(Transport& group, Member peer, Tag tag,
                                           const RankClock& own) {
  PostedReceives<Answer> answers(group, peer, tag);
  std::vector<ClockTrip> trips;
  for (std::size_t i = 0; i < kTrips; ++i) {
    ClockTrip trip{.asked_ns = own.now_ns()};
    const auto sent = send_message(group, peer, tag, Question{});
    const auto answer = sent ? answers.take() : Expected<Answer>(sent.error());
    trip.back_ns = own.now_ns();
    if (!answer) {
      answers.abandon();
      return answer.error();
    }
    trip.received_ns = (*answer)[0];
    trip.answered_ns = (*answer)[1];
    trips.push_back(trip);
  }
  return trips;
}

Expected<void> answer_clock(Transport& group, Member peer, Tag tag, const RankClock& own) {
  PostedReceives<Question> questions(group, peer, tag);
  for (std::size_t i = 0; i < kTrips; ++i) {
    const auto question = questions.take();
    const std::int64_t received_ns = own.now_ns();
    const auto sent = question ? send_message(group, peer, tag, Answer{received_ns, own.now_ns()})
                               : Expected<void>(question.error());
    if (!sent) {
      questions.abandon();
      return sent.error();
    }
  }
  return {};
}

// Returns, for each rank, the lowest rank with the same clock.
std::vector<std::size_t> clock_ranks(const std::vector<ClockHello>& hellos) {
  std::vector<std::size_t> first;
  for (std::size_t rank = 0; rank < hellos.size(); ++rank) {
    const auto same = std::ranges::find(hellos, hellos[rank].id, &ClockHello::id);
    first.push_back(hellos[rank].id == Digest{} ? rank
                                                : static_cast<std::size_t>(same - hellos.begin()));
  }
  return first;
}

// Returns the parent in the tree of clocks: the index without its lowest bit.
std::size_t parent_of(std::size_t clock) { return clock & (clock - 1); }

// Asks the parent's clock and answers the children of clock `index`.
Expected<std::optional<ClockReading>> take_part(Transport& group, Tag tag, const RankClock& own,
                                                const std::vector<std::size_t>& clocks,
                                                std::size_t index) {
  const auto member = [&](std::size_t clock) { return Member(static_cast<int>(clocks[clock])); };
  for (std::size_t bit = 1; bit < clocks.size(); bit *= 2) {
    if ((index & bit) != 0) {
      DYNMO_ASSIGN(const auto trips, ask_clock(group, member(parent_of(index)), tag, own));
      return std::optional(reading_of(trips));
    }
    if (index + bit < clocks.size()) {
      DYNMO_TRY(answer_clock(group, member(index + bit), tag, own));
    }
  }
  return std::optional<ClockReading>();
}

// Returns the range of the offset between two ranks that the first and the last round permit. No
// message is received before it was sent.
OffsetRange refuted_range(const ClockHello& first, const ClockHello& last,
                          const ClockHello& other_first, const ClockHello& other_last) {
  return {first.now_ns - other_last.now_ns, last.now_ns - other_first.now_ns};
}

}  // namespace

ClockReading reading_of(std::span<const ClockTrip> trips) {
  DYNMO_CHECK(!trips.empty(), "a trip, got none");
  std::optional<ClockReading> best;
  for (const ClockTrip& trip : trips) {
    // The question arrived after it was sent, and so did the answer.
    const OffsetRange range{trip.asked_ns - trip.received_ns, trip.back_ns - trip.answered_ns};
    const std::int64_t time_ns = trip.back_ns - trip.asked_ns;
    const std::int64_t error_ns = std::max(range.error(), std::int64_t{0}) + drift_ns(time_ns);
    if (best && best->error_ns <= error_ns) continue;
    best = {
        .at_ns = trip.asked_ns + time_ns / 2, .offset_ns = range.middle(), .error_ns = error_ns};
  }
  return *best;
}

bool ClockFit::is_shared() const {
  return first.offset_ns == 0 && last.offset_ns == 0 && first.error_ns == 0 && last.error_ns == 0;
}

ClockReading ClockFit::at(std::int64_t time_ns) const {
  if (is_shared()) return {.at_ns = time_ns};
  const std::int64_t time = last.at_ns - first.at_ns;
  const std::int64_t change = last.offset_ns - first.offset_ns;
  const double drift = time > 0 ? static_cast<double>(change) / static_cast<double>(time) : 0;
  const OffsetRange before = range_at(first, time_ns);
  const OffsetRange after = range_at(last, time_ns);
  const bool agree = std::abs(change) <= first.error_ns + last.error_ns + drift_ns(time);
  const OffsetRange both =
      agree ? OffsetRange{std::max(before.low, after.low), std::min(before.high, after.high)}
            : OffsetRange{std::min(before.low, after.low), std::max(before.high, after.high)};
  const std::int64_t line =
      last.offset_ns + std::llround(drift * static_cast<double>(time_ns - last.at_ns));
  const std::int64_t offset = std::clamp(line, both.low, both.high);
  return {.at_ns = time_ns,
          .offset_ns = offset,
          .error_ns = std::max(both.high - offset, offset - both.low)};
}

Expected<std::vector<ClockReading>> read_clocks(Transport& group, const RankClock& own) {
  const Tag tag = control_tag(Control::kClocks);
  const std::size_t self = group.rank().index();
  ClockHello mine{.id = own.id.empty() ? Digest{} : digest_of(own.id), .now_ns = own.now_ns()};
  DYNMO_ASSIGN(const auto first, gather_hellos(group, tag, mine));
  const std::vector<std::size_t> clock_of = clock_ranks(first);
  std::vector<std::size_t> clocks;  // by index in the tree: the rank that takes part
  for (std::size_t rank = 0; rank < clock_of.size(); ++rank) {
    if (clock_of[rank] == rank) clocks.push_back(rank);
  }
  if (const auto at = std::ranges::find(clocks, self); at != clocks.end()) {
    const auto index = static_cast<std::size_t>(at - clocks.begin());
    DYNMO_ASSIGN(const auto reading, take_part(group, tag, own, clocks, index));
    if (reading) mine.reading = *reading;
  }
  mine.now_ns = own.now_ns();
  DYNMO_ASSIGN(const auto last, gather_hellos(group, tag, mine));

  std::vector<ClockReading> readings(first.size());
  readings[0].at_ns = last[0].now_ns;
  // The measurements along a path from rank 0 were made at different times.
  const std::int64_t spread = 2 * drift_ns(last[0].now_ns - first[0].now_ns);
  for (std::size_t index = 1; index < clocks.size(); ++index) {
    ClockReading& reading = readings[clocks[index]];
    const ClockReading& parent = readings[clocks[parent_of(index)]];
    reading = last[clocks[index]].reading;
    reading.offset_ns += parent.offset_ns;
    reading.error_ns += parent.error_ns + spread;
  }
  for (std::size_t rank = 0; rank < clock_of.size(); ++rank) {
    const std::size_t other = clock_of[rank];
    if (other == rank) continue;
    // Copies the whole reading, so that ranks of one clock agree to the nanosecond.
    readings[rank] = readings[other];
    const OffsetRange range = refuted_range(first[rank], last[rank], first[other], last[other]);
    if (range.low <= 0 && range.high >= 0) continue;
    readings[rank].at_ns = last[rank].now_ns;
    readings[rank].offset_ns += range.middle();
    readings[rank].error_ns += range.error() + spread;
  }
  return readings;
}

}  // namespace dynmo::transport
