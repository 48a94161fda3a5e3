// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <limits>
#include <tuple>
#include <utility>

#include "dynmo/plan/recompute_memory_impl.h"

namespace dynmo::plan::internal {
namespace {

// Finds the items to recompute by branch and bound, the fewest seconds per saved byte first.
class MinTime {
 public:
  MinTime(const RankMemory& rank, std::int64_t limit, int max_sets)
      : rank_(rank), limit_(limit), max_sets_(max_sets) {
    for (std::size_t i = 0; i < rank.items.size(); ++i) {
      if (rank.items[i].saved() > 0) order_.push_back(i);
    }
    const auto key = [&](std::size_t i) {
      const Item& item = rank.items[i];
      return std::tuple(item.seconds / static_cast<double>(item.saved()), item.stage, -item.saved(),
                        i);
    };
    std::sort(order_.begin(), order_.end(),
              [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
    chosen_.assign(rank.items.size(), false);
  }

  std::vector<bool> find() {
    greedy();
    if (best_seconds_ == 0) return best_;
    sort_by_point();
    chosen_.assign(rank_.items.size(), false);
    extend(0, 0);
    return best_;
  }

 private:
  // Chooses items, the fewest seconds per saved byte first, until the rank fits. Then removes those
  // that are not needed, the slowest first.
  void greedy() {
    for (const std::size_t i : order_) {
      if (rank_.peak(chosen_) <= limit_) break;
      chosen_[i] = true;
    }
    std::vector<std::size_t> slowest = order_;
    std::stable_sort(slowest.begin(), slowest.end(), [&](std::size_t a, std::size_t b) {
      return rank_.items[a].seconds > rank_.items[b].seconds;
    });
    for (const std::size_t i : slowest) {
      if (!chosen_[i]) continue;
      chosen_[i] = false;
      if (rank_.peak(chosen_) > limit_) chosen_[i] = true;
    }
    best_ = chosen_;
    best_seconds_ = 0;
    for (const std::size_t i : order_) best_seconds_ += chosen_[i] ? rank_.items[i].seconds : 0;
  }

  // Returns a lower bound of the seconds that items from order_[next] on must add. It treats items
  // as divisible and takes those with the fewest seconds per byte first.
  [[nodiscard]] double bound(std::size_t next) const {
    double max_s = 0;
    for (std::size_t p = 0; p < rank_.points.size(); ++p) {
      const std::int64_t excess = rank_.at(rank_.points[p], chosen_) - limit_;
      if (excess > 0) max_s = std::max(max_s, divisible(p, excess, next));
    }
    return max_s;
  }

  [[nodiscard]] double divisible(std::size_t p, std::int64_t excess, std::size_t next) const {
    auto rest = static_cast<double>(excess);
    double seconds = 0;
    for (const std::size_t k : cheapest_[p]) {
      if (k < next) continue;
      const Item& item = rank_.items[order_[k]];
      const double gain = gain_of(rank_.points[p], item);
      if (gain >= rest) return seconds + item.seconds * rest / gain;
      seconds += item.seconds;
      rest -= gain;
    }
    return std::numeric_limits<double>::infinity();
  }

  // Returns the most bytes by which recomputing an item lowers the memory at a point.
  [[nodiscard]] static double gain_of(const Point& point, const Item& item) {
    return static_cast<double>((point.held[item.stage] - point.restored[item.stage]) *
                               item.saved());
  }

  // Sorts, for each point, the places in order_ of the items that lower it, by seconds per byte.
  void sort_by_point() {
    for (const Point& point : rank_.points) {
      std::vector<std::size_t>& places = cheapest_.emplace_back();
      for (std::size_t k = 0; k < order_.size(); ++k) {
        if (gain_of(point, rank_.items[order_[k]]) > 0) places.push_back(k);
      }
      if (rank_.stages == 1) continue;  // order_ is every point's
      const auto price = [&](std::size_t k) {
        const Item& item = rank_.items[order_[k]];
        return item.seconds / gain_of(point, item);
      };
      std::stable_sort(places.begin(), places.end(),
                       [&](std::size_t a, std::size_t b) { return price(a) < price(b); });
    }
  }

  void extend(std::size_t next, double seconds) {
    if (++nodes_ > max_sets_) return;
    if (rank_.peak(chosen_) <= limit_) {
      if (seconds < best_seconds_) {
        best_seconds_ = seconds;
        best_ = chosen_;
      }
      return;
    }
    // The bound is lowered a little, so that rounding does not cut off the best set.
    if (next == order_.size() || seconds + bound(next) * (1 - 1e-12) >= best_seconds_) return;
    const std::size_t i = order_[next];
    chosen_[i] = true;
    extend(next + 1, seconds + rank_.items[i].seconds);
    chosen_[i] = false;
    // The first of layers that are alike are chosen, so that others with them need no test.
    std::size_t other = next + 1;
    while (other < order_.size() && rank_.items[order_[other]].same_choice(rank_.items[i])) ++other;
    extend(other, seconds);
  }

  const RankMemory& rank_;
  std::int64_t limit_;
  int max_sets_;
  std::vector<std::size_t> order_;  // of items that save anything, by seconds a byte
  std::vector<std::vector<std::size_t>> cheapest_;  // by point
  std::vector<bool> chosen_;
  std::vector<bool> best_;
  double best_seconds_ = 0;
  int nodes_ = 0;
};

}  // namespace

bool Point::covers(const Point& other) const {
  return std::ranges::equal(held, other.held, std::greater_equal<>()) &&
         std::ranges::equal(restored, other.restored, std::greater_equal<>()) &&
         (other.backward < 0 || other.backward == backward);
}

std::int64_t RankMemory::at(const Point& point, const std::vector<bool>& chosen) const {
  std::int64_t bytes = state;
  std::int64_t freed = 0;  // of the micro-batch in B, by the layers behind an item
  std::int64_t most = 0;
  for (std::size_t i = items.size(); i-- > 0;) {
    const Item& item = items[i];
    const std::int64_t now = chosen[i] ? item.kept : item.activation;
    const std::int64_t saved = chosen[i] ? std::max<std::int64_t>(item.saved(), 0) : 0;
    bytes += point.held[item.stage] * now + point.restored[item.stage] * saved;
    if (static_cast<int>(item.stage) != point.backward) continue;
    most = std::max(most, saved - freed);
    freed += now;
  }
  return bytes + most;
}

std::int64_t RankMemory::peak(const std::vector<bool>& chosen) const {
  std::int64_t peak = state;
  for (const Point& point : points) peak = std::max(peak, at(point, chosen));
  return peak;
}

std::vector<bool> RankMemory::all() const {
  std::vector<bool> chosen;
  for (const Item& item : items) chosen.push_back(item.saved() > 0);
  return chosen;
}

Bytes input_bytes(const cost::ModelCost& model, std::size_t layer) {
  return layer == 0 ? Bytes{0} : model.layers[layer - 1].boundary_bytes;
}

std::vector<Point> points_of(const std::vector<schedule::Action>& list,
                             const std::vector<int>& local, const std::vector<bool>& frozen,
                             std::size_t stages) {
  using schedule::ActionKind;
  std::vector<Point> points;
  Point now{.held = std::vector<int>(stages), .restored = std::vector<int>(stages)};
  for (const schedule::Action& action : list) {
    const std::size_t global = action.stage.index();
    if (frozen[global]) continue;
    const auto stage = static_cast<std::size_t>(local[global]);
    switch (action.kind) {
      case ActionKind::kForward:
        ++now.held[stage];
        points.push_back(now);
        break;
      case ActionKind::kInputGradient:
        ++now.restored[stage];
        points.push_back(now);
        break;
      case ActionKind::kWeightGradient:
        --now.restored[stage];
        --now.held[stage];
        break;
      default:
        now.backward = static_cast<int>(stage);
        points.push_back(now);
        now.backward = -1;
        --now.held[stage];
    }
  }
  std::sort(points.begin(), points.end(), std::greater<>());
  points.erase(std::unique(points.begin(), points.end()), points.end());
  std::vector<Point> largest;
  for (const Point& point : points) {
    const bool covered = std::any_of(largest.begin(), largest.end(),
                                     [&](const Point& other) { return other.covers(point); });
    if (!covered) largest.push_back(point);
  }
  return largest;
}

Expected<std::vector<RankMemory>> memory_of(const Plan& plan, const cost::ModelCost& model,
                                            int micro_batches) {
  DYNMO_TRY(cost::validate(model, micro_batches));
  DYNMO_TRY(validate(plan, model.size()));
  const int prefix = model.frozen_layers();
  DYNMO_ASSIGN(const schedule::Schedule schedule, schedule_of(plan, micro_batches, prefix));
  std::vector<RankMemory> ranks(static_cast<std::size_t>(plan.ranks));
  std::vector<int> local;
  std::vector<bool> frozen;
  for (std::size_t s = 0; s < plan.stages.size(); ++s) {
    const PlanStage& stage = plan.stages[s];
    RankMemory& rank = ranks[stage.rank.index()];
    local.push_back(static_cast<int>(rank.stages));
    frozen.push_back(schedule.shape.stages[s].frozen);
    for (auto i = static_cast<std::size_t>(stage.layers.first.value);
         i < static_cast<std::size_t>(stage.layers.end()); ++i) {
      const cost::LayerCost& layer = model.layers[i];
      rank.state += cost::state_bytes(layer).value;
      if (static_cast<int>(i) < prefix) continue;
      rank.items.push_back({.layer = LayerId(static_cast<std::int32_t>(i)),
                            .stage = rank.stages,
                            .activation = layer.activation_bytes.value,
                            .kept = input_bytes(model, i).value,
                            .seconds = layer.forward_s});
    }
    ++rank.stages;
  }
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    ranks[r].points = points_of(schedule.ranks[r], local, frozen, ranks[r].stages);
  }
  return ranks;
}

std::vector<bool> least_time_set(const RankMemory& rank, std::int64_t limit, int max_sets) {
  return MinTime(rank, limit, max_sets).find();
}

}  // namespace dynmo::plan::internal
