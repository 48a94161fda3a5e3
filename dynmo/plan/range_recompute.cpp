// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/plan/range_recompute_impl.h"

namespace dynmo::plan::internal {
namespace {

__extension__ typedef __int128 PriceProduct;

// The most sets tried for one range. That is exact up to some ten layers, and nearly always beyond.
constexpr int kMaxSetsOfRange = 2'000;

}  // namespace

RangeRecompute::RangeRecompute(Recompute choice, const cost::ModelCost& model,
                               std::vector<std::int64_t> forward, std::vector<Point> points,
                               std::int64_t memory)
    : choice_(choice),
      model_(model),
      frozen_(model.frozen_layers()),
      forward_(std::move(forward)),
      points_(std::move(points)),
      memory_(memory) {
  for (int i = 0; i < model.size(); ++i) {
    const auto layer = static_cast<std::size_t>(i);
    const cost::LayerCost& cost = model.layers[layer];
    const bool trained = i >= frozen_;
    const bool in_whole = trained && i >= 1;
    const std::int64_t bytes = trained ? cost.activation_bytes.value : 0;
    const std::int64_t saved = bytes - input_bytes(model, layer).value;
    const bool chosen = choice == Recompute::kWhole ? in_whole : trained && saved > 0;
    all_parts_ += forward_[layer];
    sums_.state.push_back(sums_.state.back() + cost::state_bytes(cost).value);
    sums_.activation.push_back(sums_.activation.back() + bytes);
    sums_.saved.push_back(sums_.saved.back() + (chosen ? saved : 0));
    sums_.added.push_back(sums_.added.back() + (in_whole ? forward_[layer] : 0));
    sums_.added_s.push_back(sums_.added_s.back() + (in_whole ? cost.forward_s : 0));
  }
}

template <typename SavedOf>
std::int64_t RangeRecompute::bytes_with(int first, int end, const SavedOf& saved_of) const {
  std::int64_t saved = 0;
  std::int64_t kept = 0;     // by the layers so far: a fused B has freed them
  std::int64_t largest = 0;  // restored beyond what was freed
  for (int i = end; i-- > std::max(first, frozen_);) {
    const std::int64_t own = saved_of(i);
    largest = std::max(largest, own - kept);
    saved += own;
    kept += sum(sums_.activation, i, i + 1) - own;
  }
  const std::int64_t state = sum(sums_.state, first, end);
  std::int64_t bytes = state;
  for (const Point& point : points_) {
    bytes = std::max(bytes, state + point.held[0] * kept +
                                point.restored[0] * std::max<std::int64_t>(saved, 0) +
                                (point.backward >= 0 ? largest : 0));
  }
  return bytes;
}

std::int64_t RangeRecompute::min_bytes(int first, int end) const {
  return bytes_with(first, end, [this](int layer) { return sum(sums_.saved, layer, layer + 1); });
}

bool RangeRecompute::within(int first, int end, std::int64_t limit) {
  if (min_bytes(first, end) > memory_) return false;
  if (limit >= all_parts_) return true;
  Range& known = range(first, end);
  if (known.upper <= limit) return true;
  if (known.lower > limit) return false;
  solve(known, first, end);
  return known.upper <= limit;
}

std::int64_t RangeRecompute::parts(int first, int end) { return range(first, end).upper; }

double RangeRecompute::seconds(int first, int end) {
  Range& known = range(first, end);
  if (known.seconds < 0) solve(known, first, end);
  return known.seconds;
}

RangeRecompute::Range& RangeRecompute::range(int first, int end) {
  const std::int64_t key = std::int64_t{first} * (model_.size() + 1) + end;
  const auto [entry, fresh] = ranges_.try_emplace(key);
  if (fresh) entry->second = bounds(first, end);
  return entry->second;
}

RankMemory RangeRecompute::memory_of_range(int first, int end) const {
  RankMemory rank{
      .state = sum(sums_.state, first, end), .stages = 1, .items = {}, .points = points_};
  for (int i = std::max(first, frozen_); i < end; ++i) {
    const auto layer = static_cast<std::size_t>(i);
    rank.items.push_back({.layer = LayerId(i),
                          .stage = 0,
                          .activation = model_.layers[layer].activation_bytes.value,
                          .kept = input_bytes(model_, layer).value,
                          .seconds = static_cast<double>(forward_[layer])});
  }
  return rank;
}

// Bounds the parts of the least set of layers to recompute (see parts()). The lower bound treats
// layers as divisible, cheapest per byte first. The upper bound takes whole layers in the same
// order, without those that prove unnecessary.
RangeRecompute::Range RangeRecompute::bounds(int first, int end) const {
  if (choice_ == Recompute::kWhole) {
    const std::int64_t parts = sum(sums_.added, first, end);
    const double seconds = sums_.added_s[static_cast<std::size_t>(end)] -
                           sums_.added_s[static_cast<std::size_t>(first)];
    return {.lower = parts, .upper = parts, .seconds = seconds};
  }
  const std::int64_t state = sum(sums_.state, first, end);
  const std::int64_t activation = sum(sums_.activation, first, end);
  std::int64_t most = 0;
  for (const Point& point : points_) most = std::max<std::int64_t>(most, point.held[0]);
  if (state + most * activation <= memory_) return {.lower = 0, .upper = 0, .seconds = 0};
  struct Choice {
    std::int64_t saved;
    std::int64_t parts;
    int layer;
  };
  std::vector<Choice> choices;
  for (int i = std::max(first, frozen_); i < end; ++i) {
    const std::int64_t saved = sum(sums_.saved, i, i + 1);
    if (saved > 0) choices.push_back({saved, forward_[static_cast<std::size_t>(i)], i});
  }
  std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
    const auto left = static_cast<PriceProduct>(a.parts) * b.saved;
    const auto right = static_cast<PriceProduct>(b.parts) * a.saved;
    return left != right ? left < right : a.layer < b.layer;
  });
  Range range;
  double lower = 0;
  for (const Point& point : points_) {
    const std::int64_t gained = point.held[0] - point.restored[0];
    double rest = static_cast<double>(state + point.held[0] * activation - memory_);
    double parts = 0;
    for (const Choice& choice : choices) {
      if (rest <= 0) break;
      const auto gain = static_cast<double>(gained * choice.saved);
      if (gain <= 0) break;
      parts += static_cast<double>(choice.parts) * std::min(1.0, rest / gain);
      rest -= gain;
    }
    lower = std::max(lower, parts);
  }
  range.lower = static_cast<std::int64_t>(std::floor(lower * (1 - 1e-12)));
  // If the first choices fit, more of them fit too.
  std::vector<std::int64_t> saved(static_cast<std::size_t>(end));  // by layer
  const auto fits = [&](std::size_t taken) {
    for (std::size_t i = 0; i < choices.size(); ++i) {
      saved[static_cast<std::size_t>(choices[i].layer)] = i < taken ? choices[i].saved : 0;
    }
    return bytes_with(first, end,
                      [&](int layer) { return saved[static_cast<std::size_t>(layer)]; }) <= memory_;
  };
  std::size_t enough = 0;
  for (std::size_t surely = choices.size(); enough < surely;) {
    const std::size_t middle = (enough + surely) / 2;
    if (fits(middle)) {
      surely = middle;
    } else {
      enough = middle + 1;
    }
  }
  for (const Choice& choice : std::span(choices).first(enough)) range.upper += choice.parts;
  const bool alike = std::all_of(choices.begin(), choices.end(), [&](const Choice& choice) {
    return choice.saved == choices[0].saved && choice.parts == choices[0].parts;
  });
  if (alike) range.lower = range.upper;
  return range;
}

void RangeRecompute::solve(Range& range, int first, int end) const {
  const RankMemory rank = memory_of_range(first, end);
  const std::vector<bool> chosen = least_time_set(rank, memory_, kMaxSetsOfRange);
  std::int64_t parts = 0;
  range.seconds = 0;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    if (!chosen[i]) continue;
    parts += forward_[rank.items[i].layer.index()];
    range.seconds += model_.layers[rank.items[i].layer.index()].forward_s;
  }
  range.lower = range.upper = std::min(parts, range.upper);
}

}  // namespace dynmo::plan::internal
