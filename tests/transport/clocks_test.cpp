// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/clocks.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>

#include "dynmo/core/rng.h"
#include "dynmo/transport/in_process.h"
#include "dynmo/transport/testing/fault.h"

namespace dynmo::transport {
namespace {

// A clock whose rate changes from time to time. True time is that of the peer.
struct DriftingClock {
  double offset_ns = 0;
  double piece_ns = 1;  // each rate holds for so long
  std::array<double, 4> rates = {};

  [[nodiscard]] double offset_at(double time_ns) const {
    double offset = offset_ns;
    for (std::size_t i = 0; i < rates.size(); ++i) {
      const double begin = static_cast<double>(i) * piece_ns;
      const double end = i + 1 < rates.size() ? begin + piece_ns : INFINITY;
      offset += rates[i] * std::max(0.0, std::min(time_ns, end) - begin);
    }
    return offset;
  }
  [[nodiscard]] std::int64_t at(double time_ns) const {
    return std::llround(time_ns + offset_at(time_ns));
  }
};

double log_uniform(Rng& rng, double low, double high) {
  return low * std::pow(high / low, rng.uniform());
}

// Trips with other delays there and back, from `time_ns` on, which becomes the time of the last.
std::vector<ClockTrip> draw_trips(Rng& rng, const DriftingClock& clock, double& time_ns) {
  const double there = log_uniform(rng, 1e3, 1e8);
  const double back = rng.below(2) == 0 ? there : log_uniform(rng, 1e3, 1e8);
  std::vector<ClockTrip> trips(1 + rng.below(8));
  for (ClockTrip& trip : trips) {
    trip.asked_ns = clock.at(time_ns);
    time_ns += there * (1 + rng.uniform());
    trip.received_ns = std::llround(time_ns);
    time_ns += log_uniform(rng, 1e2, 1e7);
    trip.answered_ns = std::llround(time_ns);
    time_ns += back * (1 + rng.uniform());
    trip.back_ns = clock.at(time_ns);
  }
  return trips;
}

TEST(Clocks, TheTrueOffsetLiesWithinTheStatedError) {
  constexpr std::int64_t kRounding = 2;
  for (std::uint64_t seed = 0; seed < 10000; ++seed) {
    Rng rng(mix_key({0xC10C5, seed}));
    const double length = log_uniform(rng, 1e6, 3.6e12);
    DriftingClock clock{.offset_ns = (rng.uniform() - 0.5) * 1e14, .piece_ns = length / 3};
    for (double& rate : clock.rates) rate = (2 * rng.uniform() - 1) * 0.99 * kMaxDrift;
    double first_end = 0;
    const ClockReading first = reading_of(draw_trips(rng, clock, first_end));
    const double last_begin = first_end + length;
    double last_end = last_begin;
    const ClockReading last = reading_of(draw_trips(rng, clock, last_end));
    const ClockFit fit{.first = first, .last = last};
    for (int i = 0; i < 8; ++i) {
      const double time_ns = rng.uniform() * 1.2 * last_end;
      const ClockReading told = fit.at(clock.at(time_ns));
      const auto error = std::abs(static_cast<double>(told.offset_ns) - clock.offset_at(time_ns));
      ASSERT_LE(error, static_cast<double>(told.error_ns + kRounding))
          << "seed " << seed << ", time " << time_ns;
      // It is not just large: twice what the nearer measurement allows.
      const auto nearer = [&](const ClockReading& reading) {
        return static_cast<double>(reading.error_ns) +
               kMaxDrift * std::abs(static_cast<double>(told.at_ns - reading.at_ns));
      };
      ASSERT_LE(static_cast<double>(told.error_ns - kRounding),
                2 * std::min(nearer(first), nearer(last)) + kMaxDrift * 1e9)
          << "seed " << seed << ", time " << time_ns;
    }
  }
}

TEST(Clocks, TheTripThatLeftLeastRoomCounts) {
  const ClockTrip slow{.asked_ns = 0, .received_ns = 10900, .answered_ns = 10950, .back_ns = 1000};
  const ClockTrip fast{
      .asked_ns = 2000, .received_ns = 12100, .answered_ns = 12700, .back_ns = 2800};
  const ClockReading reading = reading_of(std::array{slow, fast, slow});
  EXPECT_EQ(reading.offset_ns, -10000);
  EXPECT_EQ(reading.error_ns, 101);  // half of the way there and back, and the drift in 800 ns
  EXPECT_EQ(reading.at_ns, 2400);
}

TEST(Clocks, TheOffsetIsOnTheLineBetweenTwoMeasurements) {
  constexpr std::int64_t kSecond = 1000000000;
  const ClockFit fit{.first = {.at_ns = 0, .offset_ns = 3 * kSecond, .error_ns = 1000},
                     .last = {.at_ns = 100 * kSecond,
                              .offset_ns = 3 * kSecond + 2000000,  // 20 millionths
                              .error_ns = 500}};
  EXPECT_FALSE(fit.is_shared());
  EXPECT_EQ(fit.at(99 * kSecond).offset_ns, 3 * kSecond + 1980000);
  EXPECT_EQ(fit.at(99 * kSecond).error_ns, 500 + 100000 + 20000);
  EXPECT_EQ(fit.at(100 * kSecond).error_ns, 500);
  EXPECT_EQ(fit.at(101 * kSecond).offset_ns, 3 * kSecond + 2020000);
}

TEST(Clocks, AClockThatStoodStillHasThatError) {
  constexpr std::int64_t kSecond = 1000000000;
  const ClockFit fit{.first = {.at_ns = 0, .offset_ns = 0, .error_ns = 1000},
                     .last = {.at_ns = 10 * kSecond, .offset_ns = -5 * kSecond, .error_ns = 1000}};
  for (std::int64_t time = 0; time <= 12 * kSecond; time += kSecond / 4) {
    const ClockReading told = fit.at(time);
    for (const std::int64_t truth : {std::int64_t{0}, -5 * kSecond}) {  // still, or again
      EXPECT_LE(std::abs(told.offset_ns - truth), told.error_ns) << time;
    }
  }
}

std::int64_t steady_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

struct OffsetClock {
  std::string id = {};
  std::int64_t offset_ns = 0;  // to the clock of this machine

  [[nodiscard]] RankClock clock() const {
    return {.id = id, .now_ns = [offset = offset_ns] { return steady_ns() + offset; }};
  }
};

// Returns what each rank reads. All agree.
std::vector<ClockReading> read_by_all(const std::vector<OffsetClock>& clocks) {
  std::vector<std::vector<ClockReading>> readings(clocks.size());
  const auto status =
      run_ranks(static_cast<int>(clocks.size()), [&](Transport& group) -> Expected<void> {
        const std::size_t self = group.rank().index();
        DYNMO_ASSIGN(readings[self], read_clocks(group, clocks[self].clock()));
        return {};
      });
  EXPECT_TRUE(status.has_value()) << status.error().message;
  for (const auto& each : readings) EXPECT_EQ(each, readings.front());
  return readings.front();
}

TEST(Clocks, AllRanksGetTheSameReadings) {
  constexpr std::int64_t kHour = 3600000000000;
  const std::vector<OffsetClock> clocks = {{"a", 5 * kHour}, {"b", -kHour},    {"a", 5 * kHour},
                                           {"c", 7 * kHour}, {"", 1},          {"b", -kHour},
                                           {"d", 9 * kHour}, {"", 2},          {"e", kHour},
                                           {"f", 0},         {"d", 9 * kHour}, {"g", 3}};
  const std::vector<ClockReading> readings = read_by_all(clocks);
  ASSERT_EQ(readings.size(), clocks.size());
  for (std::size_t rank = 0; rank < clocks.size(); ++rank) {
    const ClockReading& reading = readings[rank];
    const std::int64_t truth = clocks[rank].offset_ns - clocks[0].offset_ns;
    EXPECT_LE(std::abs(reading.offset_ns - truth), reading.error_ns) << "rank " << rank;
    EXPECT_EQ(reading.error_ns == 0, clocks[rank].id == "a") << "rank " << rank;
  }
  for (const auto& [rank, other] : {std::pair(5, 1), std::pair(10, 6)}) {
    EXPECT_EQ(readings[static_cast<std::size_t>(rank)], readings[static_cast<std::size_t>(other)]);
  }
}

TEST(Clocks, ARefutedNameHasTheErrorOfTheRounds) {
  constexpr std::int64_t kMinute = 60000000000;
  const std::vector<OffsetClock> clocks = {{"a", 0}, {"a", kMinute}, {"b", 5}, {"b", -kMinute}};
  const std::vector<ClockReading> readings = read_by_all(clocks);
  for (std::size_t rank = 1; rank < clocks.size(); ++rank) {
    EXPECT_LE(std::abs(readings[rank].offset_ns - clocks[rank].offset_ns), readings[rank].error_ns);
    EXPECT_GT(readings[rank].error_ns, 0);
    EXPECT_LT(readings[rank].error_ns, kMinute);
  }
}

TEST(Clocks, OneClockTakesTwoRoundsAndStaysExact) {
  std::array<int, 3> sends = {};
  const auto status = run_ranks(3, [&](Transport& inner) -> Expected<void> {
    int& count = sends[inner.rank().index()];
    const auto group = with_faults(inner, {{.kind = Fault::Kind::kCall,
                                            .count = std::numeric_limits<int>::max(),
                                            .call = [&count] { ++count; }}});
    DYNMO_ASSIGN(const auto readings, read_clocks(*group, OffsetClock{"a", 17}.clock()));
    for (const ClockReading& reading : readings) {
      const ClockFit fit{.first = reading, .last = reading};
      EXPECT_TRUE(fit.is_shared());
      EXPECT_EQ(fit.at(reading.at_ns + 12345).offset_ns, 0);
      EXPECT_EQ(fit.at(reading.at_ns + 12345).error_ns, 0);
    }
    return {};
  });
  EXPECT_TRUE(status.has_value()) << status.error().message;
  EXPECT_EQ(sends, (std::array{4, 4, 4}));
}

// Each message of each rank in turn is the last one: the others end with that error.
TEST(Clocks, ALossAtAnyMessageEndsAllRanks) {
  constexpr int kRanks = 5;
  for (int lost = 0; lost < kRanks; ++lost) {
    for (const Fault::On on : {Fault::On::kSend, Fault::On::kReceive}) {
      bool struck = true;
      for (int nth = 0; struck; ++nth) {
        struck = false;
        const auto status = run_ranks(kRanks, [&](Transport& inner) -> Expected<void> {
          std::vector<Fault> faults;
          if (inner.rank() == Member(lost)) {
            faults.push_back({.kind = Fault::Kind::kCall, .on = on, .first = nth, .call = [&] {
                                struck = true;
                                inner.abort(make_error(ErrorCode::kPeerLost, "rank was lost"));
                              }});
          }
          const auto group = with_faults(inner, std::move(faults));
          const OffsetClock own{std::to_string(inner.rank().value), 1000 * inner.rank().value};
          const auto readings = read_clocks(*group, own.clock());
          if (!readings) return readings.error();
          return {};
        });
        EXPECT_EQ(status.has_value(), !struck) << "rank " << lost << ", message " << nth;
        if (!status) {
          EXPECT_EQ(status.error().message, "rank was lost");
        }
      }
    }
  }
}

}  // namespace
}  // namespace dynmo::transport
