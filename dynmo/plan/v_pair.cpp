// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/plan/v_pair_impl.h"

namespace dynmo::plan::internal {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

// The layers that no rank has taken yet: [first, end).
struct Middle {
  int first = 0;
  int end = 0;
};

// A set of middles: the possible `end`s for every `first`.
class MiddleSet {
 public:
  explicit MiddleSet(int layers)
      : words_(at(layers) / 64 + 1), bits_(words_ * (at(layers) + 1), 0) {}

  // Adds all middles from [first, low) to [first, high).
  void add(int first, int low, int high) {
    for (int end = low; end <= high;) {
      const int bit = end % 64;
      const int count = std::min(64 - bit, high - end + 1);
      bits_[at(first) * words_ + at(end) / 64] |= (~std::uint64_t{0} >> (64 - count)) << bit;
      end += count;
    }
  }

  // Calls visit(end) for the ends of `first`, the greatest first, until it returns false.
  template <typename Visit>
  void for_each_end(int first, Visit visit) const {
    for (std::size_t w = words_; w-- > 0;) {
      std::uint64_t word = bits_[at(first) * words_ + w];
      while (word != 0) {
        const int bit = 63 - std::countl_zero(word);
        if (!visit(static_cast<int>(w) * 64 + bit)) return;
        word &= ~(std::uint64_t{1} << bit);
      }
    }
  }

 private:
  std::size_t words_;
  std::vector<std::uint64_t> bits_;
};

// Tests whether some cut keeps every rank within a bottleneck.
class PairProbe {
 public:
  PairProbe(const Chain& chain, Wide bottleneck)
      : chain_(chain), limits_(work_limits(chain, bottleneck)), left_(limits_.size() + 1, 0) {
    for (std::size_t r = limits_.size(); r-- > 0;) left_[r] = left_[r + 1] + limits_[r];
  }

  // Like works(), if stages may be empty. Then fewer remaining layers are always better, so the
  // least `end` for each `first` suffices.
  [[nodiscard]] bool works_with_empty_stages() const {
    const int layers = chain_.layers();
    const int none = layers + 1;
    std::vector<int> least(at(layers) + 1, none);
    least[0] = layers;
    for (int rank = 0; rank < chain_.size(); ++rank) {
      std::vector<int> next(least.size(), none);
      for (int first = 0; first <= layers; ++first) {
        const int end = least[at(first)];
        if (end == none) continue;
        int back = nearest_back(rank, first, first, end);
        for (int front = first; front <= end && fits(rank, first, front); ++front) {
          back = next_back(rank, first, front, end, back);
          if (back <= front) return true;
          if (back < next[at(front)] && can_finish(rank + 1, front, back)) next[at(front)] = back;
        }
      }
      least = std::move(next);
    }
    for (int first = 0; first <= layers; ++first) {
      if (least[at(first)] <= first) return true;
    }
    return false;
  }

  // Fills the sets of middles that each rank may find, exactly. Every rank but the last takes at
  // least one layer at both ends. The last takes the rest.
  [[nodiscard]] bool works() {
    const int layers = chain_.layers();
    sets_.assign(1, MiddleSet(layers));
    sets_[0].add(0, layers, layers);
    for (int rank = 0; rank + 1 < chain_.size(); ++rank) {
      sets_.emplace_back(layers);
      for (int first = rank; first < layers; ++first) take_both_ends(rank, first);
    }
    return best_middle(chain_.size() - 1, fair_shares()).end > 0;
  }

  // Returns the layers of each stage. Requires that works() returned true.
  [[nodiscard]] std::vector<int> counts() const {
    const std::vector<std::int64_t> shares = fair_shares();
    const int last = chain_.size() - 1;
    std::vector<int> counts(2 * at(chain_.size()));
    Middle inner = best_middle(last, shares);
    counts[at(last)] = (inner.end - inner.first) / 2;
    counts[at(last) + 1] = inner.end - inner.first - counts[at(last)];
    for (int rank = last - 1; rank >= 0; --rank) {
      const Middle outer = best_outer(rank, inner, shares);
      counts[at(rank)] = inner.first - outer.first;
      counts[counts.size() - 1 - at(rank)] = outer.end - inner.end;
      inner = outer;
    }
    return counts;
  }

 private:
  [[nodiscard]] std::int64_t work(int first, int end) const {
    return chain_.work[at(end)] - chain_.work[at(first)];
  }
  [[nodiscard]] bool fits(int rank, int first, int end) const {
    return fits(rank, {first, end}, {end, end});
  }
  // Returns whether `rank` can hold the layers of `outer` that are not in `inner`.
  [[nodiscard]] bool fits(int rank, const Middle& outer, const Middle& inner) const {
    const std::int64_t own = work(outer.first, inner.first) + work(inner.end, outer.end);
    if (own > limits_[at(rank)]) return false;
    const std::int64_t bytes =
        chain_.need(rank, outer.first, inner.first) + chain_.need(rank, inner.end, outer.end);
    const std::int64_t excess = bytes - chain_.ranks[at(rank)].memory_bytes;
    return excess <= 0 || recomputes(rank, outer, inner, own, excess);
  }
  // Returns whether recomputation frees `excess` bytes and keeps the rank within its limit. `own`
  // is its work without recomputation.
  [[nodiscard]] bool recomputes(int rank, const Middle& outer, const Middle& inner,
                                std::int64_t own, std::int64_t excess) const {
    if (chain_.kept.empty()) return false;
    const auto saves = [&](int first, int end) {
      return chain_.activation[at(end)] - chain_.activation[at(first)] - chain_.kept[at(end)] +
             chain_.kept[at(first)];
    };
    const std::int64_t stashes = chain_.ranks[at(rank)].in_flight;
    const std::int64_t most = saves(outer.first, inner.first) + saves(inner.end, outer.end);
    if (excess > stashes * most) return false;
    const Wide all = static_cast<Wide>(stashes) * static_cast<Wide>(saves(0, chain_.layers()));
    const Wide added = static_cast<Wide>(excess) * static_cast<Wide>(chain_.added_parts) / all;
    return static_cast<Wide>(own) + added <= static_cast<Wide>(limits_[at(rank)]);
  }
  // Returns false if the layers [first, end) are too much work for the ranks from `rank` on.
  [[nodiscard]] bool can_finish(int rank, int first, int end) const {
    return work(first, end) <= left_[at(rank)];
  }

  // Returns the least `back` such that the rank can hold [first, front) and [back, end). Requires
  // that it can hold the first of them.
  [[nodiscard]] int nearest_back(int rank, int first, int front, int end) const {
    int good = end;
    int bad = front - 1;
    while (good - bad > 1) {
      const int middle = bad + (good - bad) / 2;
      (fits(rank, {first, end}, {front, middle}) ? good : bad) = middle;
    }
    return good;
  }

  // Returns the same as nearest_back(). `back` is its result for a shorter front, so no greater.
  [[nodiscard]] int next_back(int rank, int first, int front, int end, int back) const {
    back = std::max(back, front);
    while (back < end && !fits(rank, {first, end}, {front, back})) ++back;
    return back;
  }

  // Adds to the next rank's set the middles left when `rank` takes a front from `first` on and a
  // back.
  void take_both_ends(int rank, int first) {
    const int rest = 2 * (chain_.size() - 1 - rank);  // layers that the ranks behind need
    for (int front = first + 1; front + rest < chain_.layers() && fits(rank, first, front);
         ++front) {
      const int farthest = last_end(rank + 1, front);
      int marked = chain_.layers() + 1;  // ends from here on are in the set already
      sets_[at(rank)].for_each_end(first, [&](int end) {
        if (end - 1 < front + rest || marked <= front + rest) return false;
        // The back comes nearer as the end does, mostly by one step or two.
        int least = marked;
        if (marked > end) {
          least = std::max(nearest_back(rank, first, front, end), front + rest);
        } else {
          while (least > front + rest && fits(rank, {first, end}, {front, least - 1})) --least;
        }
        sets_[at(rank) + 1].add(front, least, std::min({end - 1, marked - 1, farthest}));
        marked = least;
        return true;
      });
    }
  }
  [[nodiscard]] int last_end(int rank, int first) const {
    const std::int64_t most = chain_.work[at(first)] + left_[at(rank)];
    const auto after = std::upper_bound(chain_.work.begin(), chain_.work.end(), most);
    return static_cast<int>(after - chain_.work.begin()) - 1;
  }

  // Returns the middle of the set of `rank` that it can hold whole and that is nearest to its
  // share. Its end is 0 if there is none.
  [[nodiscard]] Middle best_middle(int rank, const std::vector<std::int64_t>& shares) const {
    Middle best;
    std::int64_t least = 0;
    for (int first = rank; first < chain_.layers(); ++first) {
      sets_[at(rank)].for_each_end(first, [&](int end) {
        if (!fits(rank, first, end)) return true;
        const std::int64_t off = std::abs(work(first, end) - shares[at(rank)]);
        if (best.end == 0 || off < least || (off == least && first == best.first)) {
          best = {first, end};
          least = off;
        }
        return true;
      });
    }
    return best;
  }

  // Returns a middle of the set of `rank` from which `rank` can take both ends so that `inner` is
  // left. Chooses the one that gives `rank` the work nearest to its share.
  [[nodiscard]] Middle best_outer(int rank, const Middle& inner,
                                  const std::vector<std::int64_t>& shares) const {
    Middle best;
    std::int64_t least = 0;
    for (int first = rank; first < inner.first; ++first) {
      if (!fits(rank, first, inner.first)) continue;
      sets_[at(rank)].for_each_end(first, [&](int end) {
        if (end <= inner.end) return false;
        if (!fits(rank, {first, end}, inner)) return true;
        const std::int64_t off =
            std::abs(work(first, inner.first) + work(inner.end, end) - shares[at(rank)]);
        if (best.end == 0 || off < least || (off == least && first == best.first)) {
          best = {first, end};
          least = off;
        }
        return true;
      });
    }
    DYNMO_CHECK(best.end > 0, "a way to rank {}'s middle", rank);
    return best;
  }

  [[nodiscard]] std::vector<std::int64_t> fair_shares() const {
    return work_limits(chain_, ideal_time(chain_));
  }

  const Chain& chain_;
  std::vector<std::int64_t> limits_;
  std::vector<std::int64_t> left_;  // sums of the limits of this rank and those behind
  std::vector<MiddleSet> sets_;     // by rank
};

// Returns a lower bound of the time of a cut: all work spread evenly, or the heaviest and the
// lightest layer on the fastest rank.
Wide min_bottleneck(const Chain& chain) {
  std::int64_t heaviest = 0;
  std::int64_t lightest = chain.work.back();
  for (std::size_t i = 1; i < chain.work.size(); ++i) {
    heaviest = std::max(heaviest, chain.work[i] - chain.work[i - 1]);
    lightest = std::min(lightest, chain.work[i] - chain.work[i - 1]);
  }
  std::int64_t fastest = chain.ranks.front().slowness;
  for (const ChainRank& rank : chain.ranks) fastest = std::min(fastest, rank.slowness);
  return std::max(ideal_time(chain),
                  static_cast<Wide>(heaviest + lightest) * static_cast<Wide>(fastest));
}

// Returns a unit of which all bottlenecks are whole multiples.
Wide bottleneck_unit(const Chain& chain) {
  std::int64_t unit = 0;
  for (const ChainRank& rank : chain.ranks) unit = std::gcd(unit, rank.slowness);
  return static_cast<Wide>(unit);
}

// Returns the least bottleneck from `low` to `most`, in steps of `unit`, that `works`, or nullopt.
// The answer is usually close to `low`, so the steps grow from there.
template <typename Works>
std::optional<Wide> smallest_from(Wide low, Wide most, Wide unit, Works works) {
  low = (low + unit - 1) / unit;  // in units from here on
  most = (most + unit - 1) / unit;
  Wide step = low / 256 + 1;
  Wide high = std::min(low, most);
  while (!works(high * unit)) {
    if (high == most) return std::nullopt;
    low = high + 1;
    high = std::min(high + step, most);
    step *= 2;
  }
  return smallest(low, high, [&](Wide units) { return works(units * unit); }) * unit;
}

}  // namespace

std::optional<std::vector<int>> best_v_pair(const Chain& chain) {
  DYNMO_CHECK(chain.size() >= 1 && 2 * chain.size() <= chain.layers(), "1 to {} ranks, got {}",
              chain.layers() / 2, chain.size());
  const Wide most = slowest_time(chain);
  const Wide unit = bottleneck_unit(chain);
  const auto bound = smallest_from(min_bottleneck(chain), most, unit, [&](Wide bottleneck) {
    return PairProbe(chain, bottleneck).works_with_empty_stages();
  });
  if (!bound) return std::nullopt;
  std::optional<PairProbe> best;  // of the least candidate that worked: it is the last that did
  const auto bottleneck = smallest_from(*bound, most, unit, [&](Wide candidate) {
    PairProbe probe(chain, candidate);
    if (!probe.works()) return false;
    best.emplace(std::move(probe));
    return true;
  });
  if (!bottleneck) return std::nullopt;
  return best->counts();
}

bool v_pair_fits(const Chain& chain) { return PairProbe(chain, slowest_time(chain)).works(); }

std::int64_t v_pair_bytes(int layers, int ranks) {
  return std::int64_t{ranks} * (layers + 1) * (layers / 64 + 1) * 8;
}

}  // namespace dynmo::plan::internal
