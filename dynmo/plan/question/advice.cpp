// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/question/advice.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "dynmo/plan/balance.h"
#include "dynmo/plan/pack.h"

namespace dynmo::plan {
namespace {

// The most actions replayed for one answer, which take about a quarter of a second. It is also the
// limit of a single replay.
constexpr double kMaxActions = 1e6;
constexpr std::int64_t kMaxSlices = 64;
// A layer that takes this share of the busiest rank's time is what makes it the busiest.
constexpr double kNearlyAll = 0.9;

bool is_head(const std::string& layer) { return layer == "head" || layer.starts_with("head."); }

bool is_shorter(double step_s, double than_s) { return step_s < (1 - kAdviceMargin) * than_s; }

struct StepParts {
  double step_s = 0;
  double busy = 0;  // here and below shares of the ranks' time
  sim::BubbleSplit split = {};
  double bottleneck_s = 0;
};

class Adviser {
 public:
  explicit Adviser(const AdviceProblem& problem) : problem_(problem) {}

  [[nodiscard]] std::optional<Advice> all() const {
    if (actions_of(problem_.cluster.size()) > kMaxActions) return std::nullopt;
    std::vector<Evaluation> plans = problem_.plans;
    if (plans.empty()) {
      auto found = proposals(problem_.models, problem_.cluster, {});
      if (!found) return std::nullopt;
      plans = *std::move(found);
    }
    const StepParts parts = parts_of(plans);
    Advice advice{.all = {.ranks = problem_.cluster.size(), .step_s = parts.step_s},
                  .limit = {},
                  .share = 0,
                  .layer = {},
                  .remedy = {},
                  .best_s = parts.step_s,
                  .fewest = {}};
    find_limit(parts, advice);
    find_fewest(advice);
    if (!advice.remedy) advice.remedy = fewer_ranks(advice);
    return advice;
  }

 private:
  struct How {
    std::optional<int> ranks = {};          // of the cluster's; those that packing keeps
    std::optional<int> micro_batches = {};  // none: the problem's
    std::optional<schedule::ScheduleKind> schedule = {};
    ScheduleChoice schedules = ScheduleChoice::kAsGiven;
  };

  // Returns the approximate number of actions of a step on `ranks` ranks, in all models.
  [[nodiscard]] double actions_of(int ranks) const {
    constexpr double kOfEach = 6;  // F, B, and their messages
    return kOfEach * ranks * problem_.micro_batches * static_cast<double>(problem_.models.size());
  }

  // Replays of the optimal cuts, one for each model. nullopt: one of them does not fit.
  [[nodiscard]] std::optional<std::vector<Evaluation>> proposals(const ModelCosts& models,
                                                                 const cost::Cluster& cluster,
                                                                 const How& how) const {
    std::vector<Evaluation> found;
    for (std::size_t i = 0; i < models.size(); ++i) {
      if (i > 0 && models[i] == models[i - 1]) {  // costs that do not change
        found.push_back(found.back());
        continue;
      }
      BalanceProblem one{{models[i], cluster, how.micro_batches.value_or(problem_.micro_batches)},
                         how.schedule.value_or(problem_.schedule)};
      one.stages_per_rank = problem_.stages_per_rank;
      one.recompute = problem_.recompute;
      const auto kept = ranks_to_keep(cluster, how.ranks.value_or(cluster.size()));
      auto proposal = propose_on(kept, Balancer::kOptimal, one, {.schedules = how.schedules});
      if (!proposal) return std::nullopt;
      found.push_back(std::move(proposal->evaluation));
    }
    return found;
  }
  [[nodiscard]] std::optional<double> step_s(const ModelCosts& models, const cost::Cluster& cluster,
                                             const How& how) const {
    const auto found = proposals(models, cluster, how);
    if (!found) return std::nullopt;
    return parts_of(*found).step_s;
  }

  [[nodiscard]] static StepParts parts_of(const std::vector<Evaluation>& plans) {
    StepParts sum;
    for (const Evaluation& plan : plans) {
      const double step_s = plan.step_time_s;
      const sim::BubbleSplit& split = plan.result.bubble_split;
      sum.step_s += step_s;
      sum.busy += step_s * (1 - plan.result.bubble);
      sum.split.fill_drain += step_s * split.fill_drain;
      sum.split.imbalance += step_s * split.imbalance;
      sum.split.communication += step_s * split.communication;
      sum.split.straggler += step_s * split.straggler;
      sum.bottleneck_s += plan.bottleneck_s;
    }
    const double all_s = sum.step_s > 0 ? sum.step_s : 1;
    for (double* part : {&sum.busy, &sum.split.fill_drain, &sum.split.imbalance,
                         &sum.split.communication, &sum.split.straggler}) {
      *part /= all_s;
    }
    sum.step_s /= static_cast<double>(plans.size());
    sum.bottleneck_s /= static_cast<double>(plans.size());
    return sum;
  }

  void find_limit(const StepParts& parts, Advice& advice) const {
    const sim::BubbleSplit& split = parts.split;
    advice.share = std::max(
        {split.fill_drain, split.imbalance, split.communication, split.straggler, kAdviceMargin});
    advice.remedy = by_optimal_cut(parts.step_s);
    if (advice.remedy) {  // replays of all other changes have optimal cuts, too
      advice.limit = StepLimit::kBalancer;
    } else if (advice.share == split.imbalance) {
      find_uneven(parts, advice);
    } else if (advice.share == split.fill_drain) {
      advice.limit = StepLimit::kFill;
      advice.remedy = against_filling(parts.step_s);
    } else if (advice.share == split.communication) {
      advice.limit = StepLimit::kMessages;
      advice.remedy = by_change(StepLimit::kMessages, parts.step_s);
      if (!advice.remedy) advice.remedy = more_micro_batches(parts.step_s);
    } else if (advice.share == split.straggler) {
      advice.limit = StepLimit::kSlowRank;
      advice.remedy = by_change(StepLimit::kSlowRank, parts.step_s);
    } else {
      advice.limit = StepLimit::kWork;
      advice.share = parts.busy;
    }
  }

  // Finds why one rank has more work than the others: a heavy layer, the memory, or the cut between
  // whole layers.
  void find_uneven(const StepParts& parts, Advice& advice) const {
    const auto [layer, work_s] = heaviest();
    advice.layer = problem_.models.front().layers[layer].name;
    advice.remedy = head_in_slices(parts.step_s);
    const bool alone = work_s >= kNearlyAll * parts.bottleneck_s;
    if (advice.remedy || (alone && is_head(advice.layer))) {
      advice.limit = StepLimit::kHead;
      return;
    }
    advice.remedy = with_memory(parts.step_s);
    advice.limit = advice.remedy ? StepLimit::kMemory : alone ? StepLimit::kLayer : StepLimit::kCut;
    if (!alone) advice.layer.clear();
  }

  // Names the optimal cut if the plans are of another balancer and slower.
  [[nodiscard]] std::optional<Remedy> by_optimal_cut(double now_s) const {
    if (problem_.plans.empty()) return std::nullopt;
    const auto with_s = step_s(problem_.models, problem_.cluster, {});
    if (!with_s || !is_shorter(*with_s, now_s)) return std::nullopt;
    return Remedy{AdviceKey::kBalancer, std::string(name(Balancer::kOptimal)), *with_s};
  }

  // Returns the change that shortens the step most. Larger micro-batches are preferred to other
  // machines.
  [[nodiscard]] std::optional<Remedy> by_change(StepLimit limit, double now_s) const {
    std::optional<Remedy> best;
    if (!problem_.changes) return best;
    for (const AdviceChange& change : problem_.changes(limit)) {
      const auto with_s =
          step_s(change.models, change.cluster, {.micro_batches = change.micro_batches});
      if (!with_s || !is_shorter(*with_s, best ? best->step_s : now_s)) continue;
      best = Remedy{change.set.key, change.set.value, *with_s, change.with};
      if (change.set.key == AdviceKey::kMicroBatchSize) break;
    }
    return best;
  }

  // Names fewer ranks if the layers are too heavy to use all. The step takes no longer with fewer.
  [[nodiscard]] std::optional<Remedy> fewer_ranks(const Advice& advice) const {
    const bool coarse = advice.limit == StepLimit::kLayer || advice.limit == StepLimit::kCut ||
                        advice.limit == StepLimit::kHead || advice.limit == StepLimit::kSlowRank;
    if (!coarse || !advice.fewest || advice.fewest->ranks == advice.all.ranks) return std::nullopt;
    const std::vector<Rank> kept = ranks_to_keep(problem_.cluster, advice.fewest->ranks);
    const bool first = kept.back().value == advice.fewest->ranks - 1;
    if (!first || problem_.cluster.replicas > 1) return std::nullopt;
    return Remedy{AdviceKey::kRanks, std::to_string(advice.fewest->ranks), advice.fewest->step_s};
  }

  // Returns the layer with the most work in all models. The second value is its mean seconds a
  // micro-batch on the fastest rank.
  [[nodiscard]] std::pair<std::size_t, double> heaviest() const {
    std::vector<double> sums(problem_.models.front().layers.size(), 0.0);
    for (const cost::ModelCost& model : problem_.models) {
      const bool again = problem_.recompute == Recompute::kWhole;
      const std::vector<double> work = cost::layer_work_s(
          again ? recomputed(model, all_layers(model)) : model, problem_.micro_batches);
      for (std::size_t i = 0; i < std::min(sums.size(), work.size()); ++i) sums[i] += work[i];
    }
    const auto most = std::max_element(sums.begin(), sums.end());
    double speed = 0;
    for (const cost::ClusterRank& rank : problem_.cluster.ranks) {
      speed = std::max(speed, rank.speed);
    }
    return {static_cast<std::size_t>(most - sums.begin()),
            *most / speed / static_cast<double>(problem_.models.size())};
  }

  // Returns the fewest slices of the head with which the step is about as short as with any number.
  // Returns nullopt if slices do not shorten the step.
  [[nodiscard]] std::optional<Remedy> head_in_slices(double now_s) const {
    if (!problem_.sliced) return std::nullopt;
    std::vector<std::pair<std::int64_t, double>> tried;
    double best_s = std::numeric_limits<double>::infinity();
    for (std::int64_t slices = 2 * problem_.head_slices; slices <= kMaxSlices; slices *= 2) {
      const Expected<ModelCosts> models = problem_.sliced(slices);
      if (!models) break;
      const auto with_s = step_s(*models, problem_.cluster, {});
      if (!with_s) continue;
      tried.emplace_back(slices, *with_s);
      best_s = std::min(best_s, *with_s);
    }
    for (const auto& [slices, with_s] : tried) {
      if (with_s > (1 + kAdviceMargin) * best_s || !is_shorter(with_s, now_s)) continue;
      return Remedy{AdviceKey::kHeadSlices, std::to_string(slices), with_s};
    }
    return std::nullopt;
  }

  [[nodiscard]] std::optional<Remedy> with_memory(double now_s) const {
    cost::Cluster unlimited = problem_.cluster;
    for (cost::ClusterRank& rank : unlimited.ranks) rank.memory = cost::kUnlimitedMemory;
    if (unlimited == problem_.cluster) return std::nullopt;
    const auto found = proposals(problem_.models, unlimited, {});
    if (!found || !is_shorter(parts_of(*found).step_s, now_s)) return std::nullopt;
    Bytes needed;
    for (const Evaluation& plan : *found) {
      for (const sim::RankUsage& rank : plan.result.ranks) {
        needed = std::max(needed, rank.peak_memory);
      }
    }
    constexpr double kMiB = 1 << 20;
    const double offered = static_cast<double>(needed.value) / (1 - problem_.head_room);
    return Remedy{AdviceKey::kMemory, fmt::format("{:.0f}MiB", std::ceil(offered / kMiB)),
                  parts_of(*found).step_s};
  }

  [[nodiscard]] std::optional<Remedy> against_filling(double now_s) const {
    if (problem_.schedules == ScheduleChoice::kAsGiven) {
      BalanceProblem first{{problem_.models.front(), problem_.cluster, problem_.micro_batches},
                           problem_.schedule};
      first.stages_per_rank = problem_.stages_per_rank;
      first.recompute = problem_.recompute;
      const auto best = propose(Balancer::kOptimal, first, {.schedules = ScheduleChoice::kBest});
      if (best) {
        const schedule::ScheduleKind kind = best->plan.schedule;
        const auto with_s = step_s(problem_.models, problem_.cluster, {.schedule = kind});
        if (with_s && is_shorter(*with_s, now_s)) {
          return Remedy{AdviceKey::kSchedule, std::string(schedule::name(kind)), *with_s};
        }
      }
    }
    return more_micro_batches(now_s);
  }

  [[nodiscard]] std::optional<Remedy> more_micro_batches(double now_s) const {
    const int twice = 2 * problem_.micro_batches;
    const auto with_s = step_s(problem_.models, problem_.cluster, {.micro_batches = twice});
    if (!with_s || !is_shorter(*with_s / 2, now_s)) return std::nullopt;
    return Remedy{AdviceKey::kMicroBatches, std::to_string(twice), *with_s / 2};
  }

  // Returns the step on `ranks` ranks in perfect balance.
  [[nodiscard]] double least_s(int ranks) const {
    double speed = 0;
    for (const Rank rank : ranks_to_keep(problem_.cluster, ranks)) {
      speed += problem_.cluster.ranks[rank.index()].speed;
    }
    double work = 0;
    for (const cost::ModelCost& model : problem_.models) {
      const std::vector<double> layers = cost::layer_work_s(model, problem_.micro_batches);
      work += std::accumulate(layers.begin(), layers.end(), 0.0);
    }
    return problem_.micro_batches * work / static_cast<double>(problem_.models.size()) / speed;
  }

  void find_fewest(Advice& advice) const {
    const auto of = [&](int ranks) {
      return step_s(problem_.models, problem_.cluster, {.ranks = ranks});
    };
    std::vector<RankCount> tried = {advice.all};
    if (const auto optimal_s = of(advice.all.ranks); optimal_s && *optimal_s < advice.best_s) {
      tried.front().step_s = advice.best_s = *optimal_s;
    }
    double actions = 0;
    int ranks = advice.all.ranks - 1;
    for (; ranks >= 1 && least_s(ranks) <= (1 + kAdviceMargin) * advice.best_s; --ranks) {
      actions += actions_of(ranks);
      if (actions > kMaxActions) break;
      const auto with_s = of(ranks);
      if (!with_s) continue;
      tried.push_back({ranks, *with_s});
      advice.best_s = std::min(advice.best_s, *with_s);
    }
    const bool all_tried = actions <= kMaxActions;
    const double enough_s = (1 + kAdviceMargin) * advice.best_s;
    for (const RankCount& count : tried) {
      if (count.step_s <= enough_s) advice.fewest = count;
    }
    if (all_tried || advice.fewest->ranks > tried.back().ranks) return;
    // All counts that were tried are enough. With fewer ranks the step is assumed to be longer.
    int few = 1;
    while (few < advice.fewest->ranks) {
      const int middle = (few + advice.fewest->ranks) / 2;
      const auto with_s = of(middle);
      if (with_s && *with_s <= enough_s) {
        advice.fewest = RankCount{middle, *with_s};
      } else {
        few = middle + 1;
      }
    }
  }

  const AdviceProblem& problem_;
};

}  // namespace

std::string_view name(StepLimit limit) {
  switch (limit) {
    case StepLimit::kWork:
      return "work";
    case StepLimit::kHead:
      return "head";
    case StepLimit::kLayer:
      return "layer";
    case StepLimit::kCut:
      return "cut";
    case StepLimit::kBalancer:
      return "balancer";
    case StepLimit::kMemory:
      return "memory";
    case StepLimit::kFill:
      return "fill";
    case StepLimit::kMessages:
      return "messages";
    case StepLimit::kSlowRank:
      return "slow-rank";
  }
  return {};
}

std::optional<Advice> advise(const AdviceProblem& problem) { return Adviser(problem).all(); }

Expected<cost::ModelCost> with_head_slices(cost::ModelCost model, std::int64_t slices) {
  if (model.layers.empty() || model.layers.back().name != "head") {
    return make_error(ErrorCode::kBadInput, "the last layer is no whole head");
  }
  cost::LayerCost head = std::move(model.layers.back());
  model.layers.pop_back();
  const auto parts = static_cast<double>(slices);
  for (double* seconds :
       {&head.forward_s, &head.backward_input_s, &head.backward_weight_s, &head.update_s}) {
    *seconds /= parts;
  }
  for (Bytes* bytes : {&head.parameter_bytes, &head.gradient_bytes, &head.optimizer_bytes,
                       &head.copy_bytes, &head.activation_bytes}) {
    bytes->value /= slices;
  }
  if (!model.layers.empty()) head.boundary_bytes = model.layers.back().boundary_bytes;
  for (std::int64_t slice = 0; slice < slices; ++slice) {
    head.name = fmt::format("head.{} of {}", slice, slices);
    model.layers.push_back(head);
  }
  return model;
}

std::string_view name(AdviceKey key) {
  switch (key) {
    case AdviceKey::kHeadSlices:
      return "head_slices";
    case AdviceKey::kSchedule:
      return "schedule";
    case AdviceKey::kMicroBatches:
      return "micro_batches";
    case AdviceKey::kMemory:
      return "memory";
    case AdviceKey::kBalancer:
      return "balancer";
    case AdviceKey::kRanks:
      return "ranks";
    case AdviceKey::kMicroBatchSize:
      return "micro_batch_size";
    case AdviceKey::kInsideLatency:
      return "inside_latency";
    case AdviceKey::kInsideBandwidth:
      return "inside_bandwidth";
    case AdviceKey::kBetweenLatency:
      return "between_latency";
    case AdviceKey::kBetweenBandwidth:
      return "between_bandwidth";
    case AdviceKey::kNicBandwidth:
      return "nic_bandwidth";
    case AdviceKey::kSpeed:
      return "speed";
  }
  return {};
}

double tokens_an_hour(const RankCount& count, double tokens) {
  return 3600 * tokens / (count.step_s * count.ranks);
}

Json advice_json(const Advice& advice, double tokens) {
  const auto of = [&](const RankCount& count) {
    Json json = {{"ranks", count.ranks}, {"step_time_s", count.step_s}};
    if (tokens > 0) json["tokens_per_rank_hour"] = tokens_an_hour(count, tokens);
    return json;
  };
  Json json = {{"all", of(advice.all)}, {"best_step_time_s", advice.best_s}};
  if (advice.fewest) json["fewest"] = of(*advice.fewest);
  json["limit"] = name(advice.limit);
  json["share"] = advice.share;
  if (!advice.layer.empty()) json["layer"] = advice.layer;
  if (const auto& remedy = advice.remedy) {
    json["remedy"] = {
        {"key", name(remedy->key)}, {"value", remedy->value}, {"step_time_s", remedy->step_s}};
    if (remedy->with) {
      json["remedy"]["with"] = {{"key", name(remedy->with->key)}, {"value", remedy->with->value}};
    }
  }
  return json;
}

}  // namespace dynmo::plan
