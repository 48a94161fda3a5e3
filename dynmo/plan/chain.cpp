// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "dynmo/core/check.h"
#include "dynmo/plan/chain_impl.h"

namespace dynmo::plan::internal {
namespace {

constexpr Wide kInfinite = ~Wide{0};
constexpr std::int64_t kSpeedParts = 5354228880;  // lcm(1..23)
constexpr std::int64_t kTieParts = 27720;         // lcm(1..12)
constexpr double kSlowestTie = 256;               // ties see slower ranks as this slow

std::size_t at(int index) { return static_cast<std::size_t>(index); }

class Probe {
 public:
  Probe(const Chain& chain, Wide bottleneck)
      : chain_(chain), limits_(work_limits(chain, bottleneck)) {}

  [[nodiscard]] bool fits(int rank, int first, int end) const {
    return chain_.fits(rank, first, end, limits_[at(rank)]);
  }

  // Finds the range of starts of each rank if empty ranks were allowed: rank s starts in [low[s],
  // high[s]]. Returns false if even then no cut exists. Filling greedily is exact for that easier
  // question, because what fits a rank still fits it with layers taken away.
  [[nodiscard]] bool find_windows() {
    const int ranks = chain_.size();
    const int layers = chain_.layers();
    high_.assign(at(ranks) + 1, 0);
    low_.assign(at(ranks) + 1, layers);
    for (int s = 0; s < ranks; ++s) {
      high_[at(s) + 1] = std::min(farthest_end(s, high_[at(s)]), layers - (ranks - s - 1));
    }
    if (high_[at(ranks)] != layers) return false;
    for (int s = ranks - 1; s >= 0; --s) {
      low_[at(s)] = std::max(nearest_first(s, low_[at(s) + 1]), s);
      if (low_[at(s)] > high_[at(s)]) return false;
    }
    return true;
  }

  [[nodiscard]] int low(int rank) const { return low_[at(rank)]; }
  [[nodiscard]] int high(int rank) const { return high_[at(rank)]; }

  // Returns the farthest end that fits for every start in the rank's window. If none fits, it is
  // the start itself.
  [[nodiscard]] std::vector<int> farthest_ends(int rank) const {
    std::vector<int> ends;
    int end = low(rank);
    for (int first = low(rank); first <= high(rank); ++first) {
      end = std::max(end, first);
      while (end < high(rank + 1) && fits(rank, first, end + 1)) ++end;
      ends.push_back(end);
    }
    return ends;
  }

  // Returns whether a cut without empty ranks exists. It is exact also if the greedy answer is not
  // (a heavy layer that a small rank must not start with). Requires find_windows().
  [[nodiscard]] bool has_cut() const {
    std::vector<int> next_good(1,
                               chain_.layers());  // by start: first feasible start at or after it
    int next_low = chain_.layers();
    for (int s = chain_.size() - 1; s >= 0; --s) {
      const std::vector<int> ends = farthest_ends(s);
      std::vector<int> good(ends.size());
      int following = chain_.layers() + 1;
      for (int first = high(s); first >= low(s); --first) {
        const int wanted = std::max(first + 1, next_low) - next_low;
        const bool feasible = wanted < static_cast<int>(next_good.size()) &&
                              next_good[at(wanted)] <= ends[at(first - low(s))];
        if (feasible) following = first;
        good[at(first - low(s))] = following;
      }
      next_good = std::move(good);
      next_low = low(s);
    }
    return next_good.front() == 0;
  }

 private:
  int farthest_end(int rank, int first) const {
    int good = first;
    int bad = chain_.layers() + 1;
    while (bad - good > 1) {
      const int middle = good + (bad - good) / 2;
      (fits(rank, first, middle) ? good : bad) = middle;
    }
    return good;
  }
  int nearest_first(int rank, int end) const {
    int good = end;
    int bad = -1;
    while (good - bad > 1) {
      const int middle = bad + (good - bad) / 2;
      (fits(rank, middle, end) ? good : bad) = middle;
    }
    return good;
  }

  const Chain& chain_;
  std::vector<std::int64_t> limits_;
  std::vector<int> low_;
  std::vector<int> high_;
};

bool greedy_works(const Chain& chain, Wide bottleneck) {
  return Probe(chain, bottleneck).find_windows();
}

bool exactly_works(const Chain& chain, Wide bottleneck) {
  Probe probe(chain, bottleneck);
  return probe.find_windows() && probe.has_cut();
}

// One rank's column of the dynamic program over cuts. For each start in its window it has the least
// sum of squared times of this and all later ranks, and the first end that reaches it.
struct Level {
  int low = 0;
  std::vector<Wide> best;
  std::vector<int> end;
};

// Fills a Level by divide and conquer. Squares of range sums are a Monge array, and limits that
// only cut off long ranges keep it one. So the leftmost best end never moves left as the start
// moves right. With recomputation they need not be one. Then the cut keeps the limits, and its sum
// of squares is small, not least.
class LevelSolver {
 public:
  LevelSolver(const Chain& chain, const Probe& probe, int rank, const Level& next)
      : chain_(chain), rank_(rank), next_(next), ends_(probe.farthest_ends(rank)) {
    level_.low = probe.low(rank);
    level_.best.assign(ends_.size(), kInfinite);
    level_.end.assign(ends_.size(), -1);
    first_good_.assign(next.best.size() + 1, std::numeric_limits<int>::max());
    for (std::size_t i = next.best.size(); i-- > 0;) {
      first_good_[i] =
          next.best[i] == kInfinite ? first_good_[i + 1] : next.low + static_cast<int>(i);
    }
    for (int i = 0; i < static_cast<int>(ends_.size()); ++i) {
      if (first_end(level_.low + i) <= ends_[at(i)]) rows_.push_back(level_.low + i);
    }
  }

  Level solve() && {
    solve(0, static_cast<int>(rows_.size()) - 1, 0, chain_.layers());
    return std::move(level_);
  }

 private:
  [[nodiscard]] int first_end(int start) const {
    const int index = std::max(start + 1, next_.low) - next_.low;
    return index < static_cast<int>(first_good_.size()) ? first_good_[at(index)]
                                                        : std::numeric_limits<int>::max();
  }

  [[nodiscard]] Wide cost(int start, int end) const {
    const Wide rest = next_.best[at(end - next_.low)];
    if (rest == kInfinite) return kInfinite;
    const auto time = static_cast<Wide>(chain_.work_of(rank_, start, end)) *
                      static_cast<Wide>(chain_.ranks[at(rank_)].tie_slowness);
    return time * time + rest;
  }

  void solve(int first_row, int last_row, int min_end, int max_end) {
    if (first_row > last_row) return;
    const int middle = first_row + (last_row - first_row) / 2;
    const int start = rows_[at(middle)];
    const auto slot = at(start - level_.low);
    for (int end = std::max(min_end, first_end(start)); end <= std::min(max_end, ends_[slot]);
         ++end) {
      const Wide candidate = cost(start, end);
      if (candidate < level_.best[slot]) {
        level_.best[slot] = candidate;
        level_.end[slot] = end;
      }
    }
    DYNMO_CHECK(level_.end[slot] >= 0, "an end for start {} of rank {}", start, rank_);
    solve(first_row, middle - 1, min_end, level_.end[slot]);
    solve(middle + 1, last_row, level_.end[slot], max_end);
  }

  const Chain& chain_;
  int rank_;
  const Level& next_;
  std::vector<int> ends_;
  Level level_;
  std::vector<int> first_good_;  // by next start: first one at or after it that leads to the end
  std::vector<int> rows_;        // starts that lead to the end
};

// Returns the best cut with `bottleneck` by the tie rule: least sum of squared times, then the
// leftmost. Requires that there is one.
std::vector<int> most_even_cut(const Chain& chain, Wide bottleneck) {
  Probe probe(chain, bottleneck);
  const bool any = probe.find_windows();
  const int ranks = chain.size();
  std::vector<Level> levels(at(ranks) + 1);
  levels.back() = {.low = chain.layers(), .best = {0}, .end = {-1}};
  for (int s = ranks - 1; s >= 0; --s) {
    levels[at(s)] = LevelSolver(chain, probe, s, levels[at(s) + 1]).solve();
  }
  DYNMO_CHECK(any && levels[0].best[0] != kInfinite, "a bottleneck that a cut has");
  std::vector<int> counts;
  int start = 0;
  for (int s = 0; s < ranks; ++s) {
    const int end = levels[at(s)].end[at(start - levels[at(s)].low)];
    counts.push_back(end - start);
    start = end;
  }
  return counts;
}

}  // namespace

std::vector<std::int64_t> work_limits(const Chain& chain, Wide bottleneck) {
  std::vector<std::int64_t> limits;
  for (const ChainRank& rank : chain.ranks) {
    const Wide most = bottleneck / static_cast<Wide>(rank.slowness);
    limits.push_back(
        static_cast<std::int64_t>(std::min(most, static_cast<Wide>(chain.most_work()))));
  }
  return limits;
}

Wide slowest_time(const Chain& chain) {
  std::int64_t slowness = 0;
  for (const ChainRank& rank : chain.ranks) slowness = std::max(slowness, rank.slowness);
  return static_cast<Wide>(chain.most_work()) * static_cast<Wide>(slowness);
}

Wide ideal_time(const Chain& chain) {
  return smallest(0, slowest_time(chain), [&](Wide bottleneck) {
    Wide sum = 0;
    for (const std::int64_t limit : work_limits(chain, bottleneck)) sum += static_cast<Wide>(limit);
    return sum >= static_cast<Wide>(chain.work.back());
  });
}

std::vector<std::int64_t> in_parts_of(std::span<const double> weights,
                                      std::span<const double> amounts) {
  // lcm(1..22), (1..18), (1..16), (1..12), (1..10): the most parts whose sum stays below 2^40.
  constexpr std::array<std::int64_t, 5> kParts = {232792560, 12252240, 720720, 27720, 2520};
  const auto count = static_cast<std::int64_t>(weights.size());
  const auto fine = std::find_if(kParts.begin(), kParts.end() - 1, [count](std::int64_t parts) {
    return parts <= (std::int64_t{1} << 40) / std::max<std::int64_t>(count, 1);
  });
  const double heaviest = weights.empty() ? 0 : *std::max_element(weights.begin(), weights.end());
  std::vector<std::int64_t> parts;
  for (const double amount : amounts) {
    const double share = heaviest > 0 ? amount / heaviest : 1;
    parts.push_back(std::llround(share * static_cast<double>(*fine)));
  }
  return parts;
}

std::vector<std::int64_t> quantized_prefix_sums(std::span<const double> weights) {
  std::vector<std::int64_t> sums = {0};
  for (const std::int64_t parts : in_parts_of(weights, weights)) {
    sums.push_back(sums.back() + parts);
  }
  return sums;
}

void set_speeds(Chain& chain, std::span<const double> speeds) {
  DYNMO_CHECK(speeds.size() == chain.ranks.size(), "a speed for each of {} ranks, got {}",
              chain.ranks.size(), speeds.size());
  const double fastest = *std::max_element(speeds.begin(), speeds.end());
  for (std::size_t i = 0; i < speeds.size(); ++i) {
    // A rank counts as at most a million times slower than another, because it is of no use even
    // then.
    const double ratio = std::min(fastest / speeds[i], 1e6);
    chain.ranks[i].slowness = std::llround(ratio * static_cast<double>(kSpeedParts));
    chain.ranks[i].tie_slowness =
        std::llround(std::min(ratio, kSlowestTie) * static_cast<double>(kTieParts));
  }
}

std::optional<std::vector<int>> best_cut(const Chain& chain) {
  DYNMO_CHECK(chain.size() >= 1 && chain.size() <= chain.layers(), "1 to {} ranks, got {}",
              chain.layers(), chain.size());
  const Wide most = slowest_time(chain);
  if (!exactly_works(chain, most)) return std::nullopt;
  const Wide bound = smallest(0, most, [&](Wide t) { return greedy_works(chain, t); });
  const Wide bottleneck =
      exactly_works(chain, bound)
          ? bound
          : smallest(bound + 1, most, [&](Wide t) { return exactly_works(chain, t); });
  return most_even_cut(chain, bottleneck);
}

namespace {

using Reached = std::vector<char>;  // by layer boundary

// Returns, for each rank, the boundaries up to which the ranks before it can hold all layers. Only
// memory counts. reached_backward() has those from which this rank and the later ones can.
std::vector<Reached> reached_forward(const Chain& chain) {
  std::vector<Reached> sets(at(chain.size()) + 1, Reached(at(chain.layers()) + 1, 0));
  sets[0][0] = 1;
  for (int s = 0; s < chain.size(); ++s) {
    int end = 0;
    int filled = 0;  // boundaries up to here are marked already
    for (int first = 0; first < chain.layers(); ++first) {
      end = std::max(end, first);
      while (end < chain.layers() &&
             chain.need(s, first, end + 1) <= chain.ranks[at(s)].memory_bytes) {
        ++end;
      }
      if (!sets[at(s)][at(first)]) continue;
      for (int j = std::max(filled, first) + 1; j <= end; ++j) sets[at(s) + 1][at(j)] = 1;
      filled = std::max(filled, end);
    }
  }
  return sets;
}

std::vector<Reached> reached_backward(const Chain& chain) {
  std::vector<Reached> sets(at(chain.size()) + 1, Reached(at(chain.layers()) + 1, 0));
  sets.back().back() = 1;
  for (int s = chain.size() - 1; s >= 0; --s) {
    int first = chain.layers();
    int filled = chain.layers();
    for (int end = chain.layers(); end > 0; --end) {
      first = std::min(first, end);
      while (first > 0 && chain.need(s, first - 1, end) <= chain.ranks[at(s)].memory_bytes) {
        --first;
      }
      if (!sets[at(s) + 1][at(end)]) continue;
      for (int i = std::min(filled, end) - 1; i >= first; --i) sets[at(s)][at(i)] = 1;
      filled = std::min(filled, first);
    }
  }
  return sets;
}

// Returns the least bytes with which `rank` could hold what the others leave, or nullopt if they
// cannot leave it anything.
std::optional<std::int64_t> min_need(const Chain& chain, int rank, const Reached& starts,
                                     const Reached& ends) {
  std::optional<std::int64_t> least;
  int next = chain.layers() + 1;  // first feasible end behind `first`
  for (int first = chain.layers() - 1; first >= 0; --first) {
    if (ends[at(first) + 1]) next = first + 1;
    if (!starts[at(first)] || next > chain.layers()) continue;
    const std::int64_t bytes = chain.need(rank, first, next);
    if (!least || bytes < *least) least = bytes;
  }
  return least;
}

}  // namespace

MemoryAdvice advise(const Chain& chain) {
  const auto forward = reached_forward(chain);
  const auto backward = reached_backward(chain);
  MemoryAdvice advice;
  std::int64_t min_extra = 0;
  for (int s = 0; s < chain.size(); ++s) {
    const auto bytes = min_need(chain, s, forward[at(s)], backward[at(s) + 1]);
    if (!bytes) continue;
    const std::int64_t extra = *bytes - chain.ranks[at(s)].memory_bytes;
    if (advice.rank < 0 || extra < min_extra) {
      advice = {.rank = s, .bytes = *bytes};
      min_extra = extra;
    }
  }
  if (advice.rank >= 0) return advice;
  const Wide whole = static_cast<Wide>(chain.need(0, 0, chain.layers()));
  const Wide extra = smallest(0, whole, [&](Wide more) {
    Chain roomy = chain;
    for (ChainRank& rank : roomy.ranks) {
      const auto room = std::numeric_limits<std::int64_t>::max() - rank.memory_bytes;
      rank.memory_bytes += std::min(room, static_cast<std::int64_t>(more));
    }
    return exactly_works(roomy, slowest_time(roomy));
  });
  return {.rank = -1, .bytes = static_cast<std::int64_t>(extra)};
}

}  // namespace dynmo::plan::internal
