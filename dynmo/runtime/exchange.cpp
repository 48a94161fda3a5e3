// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/exchange.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/transport/gather.h"

namespace dynmo::runtime {

namespace {

// A rank's own figures, the first of its numbers.
constexpr std::array kFigures = {&control::RankFigures::busy_s,
                                 &control::RankFigures::overhead_s,
                                 &control::RankFigures::plan_s,
                                 &control::RankFigures::migrate_s,
                                 &control::RankFigures::action_overhead_s,
                                 &control::RankFigures::actions,
                                 &control::RankFigures::message_s,
                                 &control::RankFigures::reduction_bytes_per_s};
constexpr std::array kRequests = {&RankStats::asks, &RankStats::refuses};
constexpr std::size_t kOwn = kFigures.size() + kRequests.size();

// One of the numbers that every layer has. They come before the numbers that only some layers have.
struct LayerNumber {
  double (*get)(const RankStats::Layer&);
  void (*set)(RankStats::Layer&, double);
};
constexpr std::array kLayerNumbers = {
    LayerNumber{[](const auto& l) { return l.sample.time.forward_s; },
                [](auto& l, double v) { l.sample.time.forward_s = v; }},
    LayerNumber{[](const auto& l) { return l.sample.time.input_gradient_s; },
                [](auto& l, double v) { l.sample.time.input_gradient_s = v; }},
    LayerNumber{[](const auto& l) { return l.sample.time.weight_gradient_s; },
                [](auto& l, double v) { l.sample.time.weight_gradient_s = v; }},
    LayerNumber{[](const auto& l) { return l.sample.update_s; },
                [](auto& l, double v) { l.sample.update_s = v; }},
    LayerNumber{[](const auto& l) { return l.squared_norm; },
                [](auto& l, double v) { l.squared_norm = v; }},
    LayerNumber{
        [](const auto& l) { return static_cast<double>(l.sample.stash_bytes.value); },
        [](auto& l, double v) { l.sample.stash_bytes = Bytes{static_cast<std::int64_t>(v)}; }}};

// Layers of models whose rows leave have these, too.
constexpr std::array kRowNumbers = {
    LayerNumber{[](const auto& l) { return l.rows; }, [](auto& l, double v) { l.rows = v; }},
    LayerNumber{[](const auto& l) { return static_cast<double>(l.sample.boundary_bytes.value); },
                [](auto& l, double v) { l.sample.boundary_bytes = Bytes{std::llround(v)}; }}};

std::vector<LayerNumber> layer_numbers(const model::Model& model) {
  std::vector<LayerNumber> numbers(kLayerNumbers.begin(), kLayerNumbers.end());
  if (model::drops_rows(model)) {
    numbers.insert(numbers.end(), kRowNumbers.begin(), kRowNumbers.end());
  }
  return numbers;
}

// Counts of a layer's numbers beyond layer_numbers(), by kind.
struct LayerSizes {
  std::size_t figures = 0;
  std::size_t losses = 0;
};

using Layers = std::map<LayerId, RankStats::Layer>;

// A rank's numbers in the order in which they are sent: its own, then those of its layers by id.
// All ranks send equally many, so those with fewer layers end with zeros.
class Layout {
 public:
  Layout(const plan::Plan& plan, const model::Model& model, int micro_batches)
      : layer_numbers_(layer_numbers(model)) {
    for (std::size_t i = 0; i < model.size(); ++i) {
      const LayerSizes sizes{
          .figures = model[i]->figures().size(),
          .losses = model[i]->needs().loss ? static_cast<std::size_t>(micro_batches) : 0};
      const LayerId id(static_cast<std::int32_t>(i));
      auto& rank = ranks_[plan.owner(id)];
      rank.layers[id] = sizes;
      rank.numbers += layer_numbers_.size() + sizes.figures + sizes.losses;
      numbers_ = std::max(numbers_, kOwn + rank.numbers);
    }
  }

  [[nodiscard]] std::vector<double> pack(Rank rank, const RankStats& own) const {
    std::vector<double> numbers;
    for (const auto field : kFigures) numbers.push_back(own.figures.*field);
    for (const auto field : kRequests) numbers.push_back(own.*field);
    const auto found = ranks_.find(rank);
    if (found != ranks_.end()) {
      for (const auto& [id, sizes] : found->second.layers) {
        const auto layer = own.layers.find(id);
        append(numbers, sizes, layer == own.layers.end() ? RankStats::Layer{} : layer->second);
      }
    }
    numbers.resize(numbers_, 0.0);
    return numbers;
  }

  [[nodiscard]] RankStats unpack(Rank rank, const std::vector<double>& numbers) const {
    RankStats own;
    const double* next = numbers.data();
    for (const auto field : kFigures) own.figures.*field = *next++;
    for (const auto field : kRequests) own.*field = *next++;
    const auto found = ranks_.find(rank);
    if (found == ranks_.end()) return own;
    for (const auto& [id, sizes] : found->second.layers) {
      RankStats::Layer& layer = own.layers[id];
      for (const LayerNumber& number : layer_numbers_) number.set(layer, *next++);
      layer.figures.assign(next, next + sizes.figures);
      next += sizes.figures;
      layer.losses.assign(next, next + sizes.losses);
      next += sizes.losses;
    }
    return own;
  }

 private:
  struct OfRank {
    std::map<LayerId, LayerSizes> layers;
    std::size_t numbers = 0;
  };

  void append(std::vector<double>& numbers, const LayerSizes& sizes,
              const RankStats::Layer& layer) const {
    for (const LayerNumber& number : layer_numbers_) numbers.push_back(number.get(layer));
    append(numbers, layer.figures, sizes.figures);
    append(numbers, layer.losses, sizes.losses);
  }
  static void append(std::vector<double>& numbers, const std::vector<double>& some,
                     std::size_t room) {
    DYNMO_CHECK(some.size() <= room, "at most {} numbers, got {}", room, some.size());
    numbers.insert(numbers.end(), some.begin(), some.end());
    numbers.resize(numbers.size() + room - some.size(), 0.0);
  }

  std::vector<LayerNumber> layer_numbers_;
  std::map<Rank, OfRank> ranks_;
  std::size_t numbers_ = kOwn;
};

void add(std::vector<double>& sums, const std::vector<double>& more) {
  sums.resize(std::max(sums.size(), more.size()), 0.0);
  for (std::size_t k = 0; k < more.size(); ++k) sums[k] += more[k];
}

// Adds a layer, as its owner in every replica sent it. Times are means over the replicas. The
// gradients are equal in all.
void add_layer(Exchange& whole, const std::vector<const RankStats::Layer*>& replicas,
               const std::vector<LayerNumber>& numbers) {
  RankStats::Layer mean;
  for (const LayerNumber& number : numbers) {
    double sum = 0;
    for (const RankStats::Layer* layer : replicas) sum += number.get(*layer);
    number.set(mean, sum / static_cast<double>(replicas.size()));
  }
  whole.layers.push_back(mean.sample);
  if (numbers.size() > kLayerNumbers.size()) whole.rows.push_back(mean.rows);
  whole.squared_norms.push_back(replicas.front()->squared_norm);
  auto& figures = whole.figures.emplace_back();
  for (const RankStats::Layer* layer : replicas) add(figures, layer->figures);
}

}  // namespace

Expected<Exchange> exchange(const transport::Grid& grid, transport::Tag tag, const plan::Plan& plan,
                            const model::Model& model, int micro_batches, const RankStats& own) {
  const Layout layout(plan, model, micro_batches);
  const std::vector<double> mine = layout.pack(grid.position(), own);
  DYNMO_ASSIGN(const auto all, transport::gather_numbers(grid.world(), tag, mine));
  std::vector<RankStats> ranks(all.size());
  const int positions = grid.positions();
  for (int replica = 0; replica < grid.replicas(); ++replica) {
    for (int position = 0; position < positions; ++position) {
      const std::size_t place = grid.world_rank({replica, Rank(position)}).index();
      ranks[place] = layout.unpack(Rank(position), all[place]);
    }
  }
  Exchange whole;
  const std::vector<LayerNumber> numbers = layer_numbers(model);
  const auto per_replica = static_cast<std::size_t>(micro_batches);
  whole.losses.resize(static_cast<std::size_t>(grid.replicas()) * per_replica, 0.0);
  for (std::size_t i = 0; i < model.size(); ++i) {
    const LayerId id(static_cast<std::int32_t>(i));
    std::vector<const RankStats::Layer*> replicas;
    for (int replica = 0; replica < grid.replicas(); ++replica) {
      const RankStats& owner = ranks[grid.world_rank({replica, plan.owner(id)}).index()];
      replicas.push_back(&owner.layers.at(id));
      const auto& losses = replicas.back()->losses;
      for (std::size_t m = 0; m < losses.size(); ++m) {
        whole.losses[static_cast<std::size_t>(replica) * per_replica + m] += losses[m];
      }
    }
    add_layer(whole, replicas, numbers);
  }
  std::vector<control::RankFigures> figures;
  for (const RankStats& theirs : ranks) {
    whole.busy_s.push_back(theirs.figures.busy_s);
    figures.push_back(theirs.figures);
    whole.asked = whole.asked || theirs.asks != 0;
    if (whole.refused == 0) whole.refused = std::llround(theirs.refuses);
  }
  whole.stats = control::step_stats(figures);
  return whole;
}

}  // namespace dynmo::runtime
