// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/balance.h"

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/nearest.h"
#include "dynmo/cost/blocks.h"
#include "dynmo/plan/balance_impl.h"
#include "dynmo/plan/diffusion.h"
#include "dynmo/plan/v_pair_impl.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/generate.h"

namespace dynmo::plan {
namespace {

using internal::Chain;
using schedule::ScheduleKind;
using schedule::StageLayout;

constexpr std::array kBalancers = {Balancer::kUniform,
                                   Balancer::kBlocks,
                                   Balancer::kParameters,
                                   Balancer::kTime,
                                   Balancer::kDiffusionParameters,
                                   Balancer::kDiffusionTime,
                                   Balancer::kOptimal,
                                   Balancer::kVPair,
                                   Balancer::kSearch};

constexpr std::int64_t kMaxPairBytes = std::int64_t{1} << 31;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

Expected<std::vector<int>> cut_between_blocks(const cost::ModelCost& model, int stages) {
  std::vector<int> layers;  // of each block
  std::string_view last;
  int before = 0;
  for (const cost::LayerCost& layer : model.layers) {
    const std::string_view block = cost::module_of(layer.name);
    if (cost::is_block(block) && block != last) {
      layers.push_back(std::exchange(before, 0));
      last = block;
    }
    ++(layers.empty() ? before : layers.back());
  }
  if (std::ssize(layers) < stages) {
    return make_error(ErrorCode::kBadInput,
                      "{} blocks for {} stages, wanted at least one a stage: use fewer ranks, or "
                      "the uniform balancer where no layer is named blocks.N",
                      layers.size(), stages);
  }
  std::vector<int> counts;
  auto next = layers.begin();
  for (const int blocks : internal::uniform_counts(static_cast<int>(layers.size()), stages)) {
    counts.push_back(std::accumulate(next, next + blocks, 0));
    next += blocks;
  }
  return counts;
}

// Returns a chain in which all ranks are alike and nothing needs memory.
Chain blind_chain(std::span<const double> weights, int stages) {
  Chain chain;
  chain.work = internal::quantized_prefix_sums(weights);
  chain.state.assign(chain.work.size(), 0);
  chain.activation.assign(chain.work.size(), 0);
  chain.ranks.resize(at(stages));
  for (internal::ChainRank& rank : chain.ranks) rank = {};
  return chain;
}

std::vector<int> blind_cut(std::span<const double> weights, int stages) {
  auto counts = internal::best_cut(blind_chain(weights, stages));
  DYNMO_CHECK(counts.has_value(), "a cut where memory does not count");
  return *std::move(counts);
}

std::string_view though(const Chain& chain) {
  return chain.recompute.empty() && chain.kept.empty() ? "" : " with every layer recomputed";
}

Error infeasible(const Chain& chain, const std::vector<Rank>& placement) {
  const internal::MemoryAdvice advice = internal::advise(chain);
  if (advice.rank < 0) {
    return make_error(ErrorCode::kInfeasible,
                      "no cut of {} layers over {} ranks fits their memory{}: {} bytes ({}) more "
                      "on every rank would do, or more ranks",
                      chain.layers(), chain.size(), though(chain), advice.bytes,
                      format_bytes(Bytes{advice.bytes}));
  }
  const std::int64_t has = chain.ranks[at(advice.rank)].memory_bytes;
  return make_error(ErrorCode::kInfeasible,
                    "no cut of {} layers over {} ranks fits their memory{}: rank {} has {} bytes "
                    "({}), {} bytes ({}) there would do, or more ranks",
                    chain.layers(), chain.size(), though(chain), placement[at(advice.rank)], has,
                    format_bytes(Bytes{has}), advice.bytes, format_bytes(Bytes{advice.bytes}));
}

// Returns whether the stages of each rank together fit its memory.
bool ranks_fit(const Chain& chain, const std::vector<int>& counts,
               const std::vector<Rank>& placement, const cost::Cluster& cluster) {
  std::vector<std::int64_t> bytes(cluster.ranks.size(), 0);
  int first = 0;
  for (std::size_t s = 0; s < counts.size(); ++s) {
    bytes[placement[s].index()] += chain.need(static_cast<int>(s), first, first + counts[s]);
    first += counts[s];
  }
  for (std::size_t r = 0; r < bytes.size(); ++r) {
    if (bytes[r] > cluster.ranks[r].memory.value) return false;
  }
  return true;
}

// Returns, by stage, the points at which its memory may be largest. All stages count as trained.
Expected<std::vector<std::vector<internal::Point>>> stage_points(const BalanceProblem& problem,
                                                                 const std::vector<Rank>& placement,
                                                                 const std::vector<int>& stashes) {
  std::vector<std::vector<internal::Point>> points;
  if (problem.schedule != ScheduleKind::kZbH1 && placement.size() == problem.cluster.ranks.size()) {
    // Gradients are fused, so a stage's memory is largest at its first backward.
    for (const int held : stashes)
      points.push_back({{.held = {held}, .restored = {0}, .backward = 0}});
    return points;
  }
  schedule::PipelineShape shape{
      .ranks = problem.cluster.size(), .micro_batches = problem.micro_batches, .stages = {}};
  for (const Rank rank : placement) shape.stages.push_back({.rank = rank, .frozen = false});
  DYNMO_ASSIGN(const auto made, schedule::make_schedule(problem.schedule, shape));
  const std::vector<int> local(placement.size(), 0);
  std::vector<bool> others(placement.size(), true);
  for (std::size_t s = 0; s < placement.size(); ++s) {
    others[s] = false;
    points.push_back(internal::points_of(made.ranks[placement[s].index()], local, others, 1));
    others[s] = true;
  }
  return points;
}

// Lets each rank of the chain recompute layers within its memory.
Expected<void> add_recomputation(Chain& chain, const BalanceProblem& problem,
                                 const std::vector<Rank>& placement,
                                 const std::vector<int>& stashes) {
  DYNMO_ASSIGN(auto points, stage_points(problem, placement, stashes));
  std::vector<double> seconds;
  for (const cost::LayerCost& layer : problem.model.layers) seconds.push_back(layer.forward_s);
  const auto parts =
      internal::in_parts_of(cost::layer_work_s(problem.model, problem.micro_batches), seconds);
  for (std::size_t s = 0; s < placement.size(); ++s) {
    chain.recompute.push_back(std::make_shared<internal::RangeRecompute>(
        problem.recompute, problem.model, parts, std::move(points[s]),
        chain.ranks[s].memory_bytes));
  }
  chain.added_parts = std::accumulate(parts.begin(), parts.end(), std::int64_t{0});
  return {};
}

Expected<std::vector<int>> optimal_cut(const BalanceProblem& problem,
                                       const std::vector<Rank>& placement) {
  DYNMO_ASSIGN(const auto stashes, in_flight(problem.schedule, placement, problem.cluster.size(),
                                             problem.micro_batches));
  Chain chain = internal::chain_of(problem, placement, stashes);
  const std::int64_t share = chain.size() / problem.cluster.size();
  const bool recomputes = problem.recompute != Recompute::kNone;
  const auto take_share = [&] {
    for (internal::ChainRank& rank : chain.ranks) rank.memory_bytes /= share;
  };
  if (recomputes) {
    take_share();
    DYNMO_TRY(add_recomputation(chain, problem, placement, stashes));
  }
  auto counts = internal::best_cut(chain);
  if (!counts && share == 1) return infeasible(chain, placement);
  if (counts && (recomputes || ranks_fit(chain, *counts, placement, problem.cluster))) {
    return *std::move(counts);
  }
  if (!recomputes) {
    take_share();
    counts = internal::best_cut(chain);
    if (counts) return *std::move(counts);
  }
  return make_error(ErrorCode::kInfeasible,
                    "no cut of {} layers into {} stages with a {}th of its rank's memory each was "
                    "found: give the ranks more memory, use more of them, or the search balancer",
                    chain.layers(), chain.size(), share);
}

Error infeasible_pairs(const Chain& chain) {
  const auto roomier = [&](internal::Wide more) {
    Chain roomy = chain;
    for (internal::ChainRank& rank : roomy.ranks) {
      const auto room = std::numeric_limits<std::int64_t>::max() - rank.memory_bytes;
      rank.memory_bytes += std::min(room, static_cast<std::int64_t>(more));
    }
    return internal::v_pair_fits(roomy);
  };
  const auto whole = static_cast<internal::Wide>(chain.need(0, 0, chain.layers()));
  const auto extra = static_cast<std::int64_t>(internal::smallest(0, whole, roomier));
  return make_error(
      ErrorCode::kInfeasible,
      "no V cut of {} layers over {} ranks fits their memory{}: {} bytes ({}) more on "
      "every rank would do, or more ranks",
      chain.layers(), chain.size(), though(chain), extra, format_bytes(Bytes{extra}));
}

// Lets stashes shrink to the inputs of their layers, if that saves bytes. Every saved byte has the
// same price: the time to recompute all such layers, divided by all saved bytes.
void add_divisible_recomputation(Chain& chain, const BalanceProblem& problem) {
  std::vector<double> seconds;
  chain.kept = {0};
  const int frozen = problem.model.frozen_layers();
  for (int i = 0; i < problem.model.size(); ++i) {
    const cost::LayerCost& layer = problem.model.layers[at(i)];
    const std::int64_t input = internal::input_bytes(problem.model, at(i)).value;
    const bool saves = i >= frozen && layer.activation_bytes.value > input;
    seconds.push_back(saves ? layer.forward_s : 0);
    const std::int64_t bytes = i < frozen ? 0 : layer.activation_bytes.value;
    chain.kept.push_back(chain.kept.back() + (saves ? input : bytes));
  }
  const auto parts =
      internal::in_parts_of(cost::layer_work_s(problem.model, problem.micro_batches), seconds);
  chain.added_parts = std::accumulate(parts.begin(), parts.end(), std::int64_t{0});
}

Expected<std::vector<int>> v_pair_cut(const BalanceProblem& problem) {
  const int ranks = problem.cluster.size();
  const std::int64_t bytes = internal::v_pair_bytes(problem.model.size(), ranks);
  if (bytes > kMaxPairBytes) {
    return make_error(ErrorCode::kBadInput,
                      "v-pair over {} layers and {} ranks would take {}, wanted at most {}: use "
                      "the optimal balancer",
                      problem.model.size(), ranks, format_bytes(Bytes{bytes}),
                      format_bytes(Bytes{kMaxPairBytes}));
  }
  const std::vector<Rank> order = schedule::loop_placement(ranks, 1);
  const std::vector<int> stashes(order.size(), std::min(problem.micro_batches, ranks));
  Chain chain = internal::chain_of(problem, order, stashes);
  if (problem.recompute != Recompute::kNone) add_divisible_recomputation(chain, problem);
  auto counts = internal::best_v_pair(chain);
  if (!counts) return infeasible_pairs(chain);
  return *std::move(counts);
}

// Counts the stashes of each stage in the order itself, because a closed form has many cases.
Expected<std::vector<int>> interleaved_in_flight(const std::vector<Rank>& placement, int ranks,
                                                 int micro_batches) {
  schedule::PipelineShape shape{.ranks = ranks, .micro_batches = micro_batches, .stages = {}};
  for (const Rank rank : placement) shape.stages.push_back({.rank = rank, .frozen = false});
  DYNMO_ASSIGN(const auto made, schedule::make_schedule(ScheduleKind::kInterleaved, shape));
  return schedule::in_flight(made);
}

}  // namespace

namespace internal {

Expected<void> validate(Balancer balancer, const BalanceProblem& problem) {
  DYNMO_TRY(cost::validate(problem.model, problem.micro_batches));
  DYNMO_TRY(cost::validate(problem.cluster));
  if (problem.stages_per_rank < 1 || problem.stages_per_rank > 1024) {
    return make_error(ErrorCode::kBadInput, "{} stages a rank, wanted 1 to 1024",
                      problem.stages_per_rank);
  }
  const int ranks = problem.cluster.size();
  if (ranks > problem.model.size()) {
    return make_error(ErrorCode::kBadInput,
                      "{} ranks for {} layers, wanted at most one rank a layer: use fewer ranks",
                      ranks, problem.model.size());
  }
  if (balancer == Balancer::kVPair && !takes_v(problem.schedule)) {
    return make_error(ErrorCode::kBadInput,
                      "v-pair levels the two stages that each rank holds in V placement, {} has no "
                      "such: use schedule zb-v, or another balancer",
                      schedule::name(problem.schedule));
  }
  const std::size_t stages = placement(balancer, problem).size();
  if (stages > problem.model.layers.size()) {
    return make_error(ErrorCode::kBadInput,
                      "{} ranks with {} stages each for {} layers, wanted at most one stage a "
                      "layer: use fewer ranks or a schedule with fewer stages",
                      ranks, stages / problem.cluster.ranks.size(), problem.model.size());
  }
  return {};
}

std::vector<int> uniform_counts(int layers, int stages) {
  std::vector<int> counts(at(stages), layers / stages);
  for (int i = 0; i < layers % stages; ++i) ++counts[at(i)];
  return counts;
}

std::vector<double> parameter_weights(const cost::ModelCost& model) {
  std::vector<double> weights;
  for (const cost::LayerCost& layer : model.layers) {
    weights.push_back(static_cast<double>(layer.parameter_bytes.value));
  }
  return weights;
}

Chain chain_of(const BalanceProblem& problem, const std::vector<Rank>& placement,
               const std::vector<int>& in_flight) {
  Chain chain = blind_chain(cost::layer_work_s(problem.model, problem.micro_batches),
                            static_cast<int>(placement.size()));
  const auto frozen = at(problem.model.frozen_layers());
  for (std::size_t i = 0; i < problem.model.layers.size(); ++i) {
    const cost::LayerCost& layer = problem.model.layers[i];
    chain.state[i + 1] = chain.state[i] + cost::state_bytes(layer).value;
    chain.activation[i + 1] = chain.activation[i] + (i < frozen ? 0 : layer.activation_bytes.value);
  }
  std::vector<double> speeds;
  for (std::size_t s = 0; s < placement.size(); ++s) {
    const cost::ClusterRank& rank = problem.cluster.ranks[placement[s].index()];
    speeds.push_back(rank.speed);
    chain.ranks[s].memory_bytes = rank.memory.value;
    chain.ranks[s].in_flight = in_flight[s];
  }
  set_speeds(chain, speeds);
  return chain;
}

Expected<Chain> chain_of_ranks(const BalanceProblem& problem) {
  const std::vector<Rank> ranks = placement(Balancer::kOptimal, problem);
  DYNMO_ASSIGN(const auto stashes,
               in_flight(problem.schedule, ranks, problem.cluster.size(), problem.micro_batches));
  Chain chain = chain_of(problem, ranks, stashes);
  if (problem.recompute != Recompute::kNone) {
    DYNMO_TRY(add_recomputation(chain, problem, ranks, stashes));
  }
  return chain;
}

}  // namespace internal

std::span<const Balancer> balancers() { return kBalancers; }

std::string_view name(Balancer balancer) {
  switch (balancer) {
    case Balancer::kUniform:
      return "uniform";
    case Balancer::kBlocks:
      return "blocks";
    case Balancer::kParameters:
      return "parameters";
    case Balancer::kTime:
      return "time";
    case Balancer::kDiffusionParameters:
      return "diffusion-parameters";
    case Balancer::kDiffusionTime:
      return "diffusion-time";
    case Balancer::kOptimal:
      return "optimal";
    case Balancer::kVPair:
      return "v-pair";
    case Balancer::kSearch:
      return "search";
  }
  DYNMO_CHECK(false, "a balancer, got {}", static_cast<int>(balancer));
}

Expected<Balancer> parse_balancer(std::string_view text) {
  std::vector<std::string> known;
  for (const Balancer balancer : kBalancers) {
    if (name(balancer) == text) return balancer;
    known.emplace_back(name(balancer));
  }
  return make_error(ErrorCode::kBadInput, "balancer '{}' is not known{}", text,
                    suggestion(text, known));
}

bool takes_v(ScheduleKind kind) {
  const StageLayout layout = schedule::traits(kind).layout;
  return layout == StageLayout::kV || layout == StageLayout::kAny;
}

std::vector<Rank> placement(Balancer balancer, const BalanceProblem& problem) {
  const int ranks = problem.cluster.size();
  const StageLayout layout = schedule::traits(problem.schedule).layout;
  if (balancer == Balancer::kVPair || layout == StageLayout::kV) {
    return schedule::wave_placement(ranks, 2);
  }
  return schedule::loop_placement(ranks,
                                  layout == StageLayout::kLoop ? problem.stages_per_rank : 1);
}

Expected<std::vector<int>> in_flight(ScheduleKind schedule, const std::vector<Rank>& placement,
                                     int ranks, int micro_batches) {
  if (schedule == ScheduleKind::kInterleaved && placement.size() > at(ranks)) {
    return interleaved_in_flight(placement, ranks, micro_batches);
  }
  const int stages = static_cast<int>(placement.size());
  std::vector<int> stashes(placement.size(), micro_batches);
  if (schedule == ScheduleKind::kGpipe) return stashes;
  const bool zero_bubble = schedule == ScheduleKind::kZbH1 || schedule == ScheduleKind::kZbV;
  for (int s = 0; s < stages; ++s) {
    stashes[at(s)] = std::min(micro_batches, zero_bubble ? ranks : stages - s);
  }
  return stashes;
}

Expected<std::vector<int>> balance(Balancer balancer, const BalanceProblem& problem) {
  DYNMO_TRY(internal::validate(balancer, problem));
  const std::vector<Rank> ranks = placement(balancer, problem);
  const int stages = static_cast<int>(ranks.size());
  switch (balancer) {
    case Balancer::kUniform:
      return internal::uniform_counts(problem.model.size(), stages);
    case Balancer::kBlocks:
      return cut_between_blocks(problem.model, stages);
    case Balancer::kParameters:
      return blind_cut(internal::parameter_weights(problem.model), stages);
    case Balancer::kTime:
      return blind_cut(cost::layer_work_s(problem.model, problem.micro_batches), stages);
    case Balancer::kDiffusionParameters:
    case Balancer::kDiffusionTime: {
      DYNMO_ASSIGN(Diffusion diffusion, diffuse(balancer, problem));
      return std::move(diffusion.counts);
    }
    case Balancer::kOptimal:
      return optimal_cut(problem, ranks);
    case Balancer::kVPair:
      return v_pair_cut(problem);
    case Balancer::kSearch:
      return make_error(ErrorCode::kBadInput,
                        "search decides more than a cut: ask plan::propose for its plan");
  }
  DYNMO_CHECK(false, "a balancer, got {}", static_cast<int>(balancer));
}

}  // namespace dynmo::plan
