// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/balance.h"

#include <array>
#include <numeric>
#include <string>

#include "dynmo/core/check.h"
#include "dynmo/core/nearest.h"
#include "dynmo/plan/chain_impl.h"

namespace dynmo::plan {
namespace {

constexpr std::array<Balancer, 4> kBalancers = {Balancer::kUniform, Balancer::kParameters,
                                                Balancer::kTime, Balancer::kOptimal};

std::vector<int> uniform_counts(int layers, int ranks) {
  std::vector<int> counts(static_cast<std::size_t>(ranks), layers / ranks);
  for (int i = 0; i < layers % ranks; ++i) ++counts[static_cast<std::size_t>(i)];
  return counts;
}

// A chain blind to memory and speed.
internal::Chain blind_chain(std::span<const double> weights, int ranks) {
  internal::Chain chain;
  chain.work = internal::quantized_prefix_sums(weights);
  chain.state.assign(chain.work.size(), 0);
  chain.activation.assign(chain.work.size(), 0);
  chain.ranks.resize(static_cast<std::size_t>(ranks));
  return chain;
}

internal::Chain chain_of(const BalanceProblem& problem) {
  const int ranks = problem.cluster.size();
  internal::Chain chain =
      blind_chain(cost::layer_work_s(problem.model, problem.micro_batches), ranks);
  const auto frozen = static_cast<std::size_t>(problem.model.frozen_layers());
  for (std::size_t i = 0; i < problem.model.layers.size(); ++i) {
    const cost::LayerCost& layer = problem.model.layers[i];
    chain.state[i + 1] = chain.state[i] + cost::state_bytes(layer).value;
    chain.activation[i + 1] = chain.activation[i] + (i < frozen ? 0 : layer.activation_bytes.value);
  }
  std::vector<double> speeds;
  for (int s = 0; s < ranks; ++s) {
    const cost::ClusterRank& rank = problem.cluster.ranks[static_cast<std::size_t>(s)];
    speeds.push_back(rank.speed);
    chain.ranks[static_cast<std::size_t>(s)].memory_bytes = rank.memory.value;
    chain.ranks[static_cast<std::size_t>(s)].in_flight =
        in_flight(problem.schedule, s, ranks, problem.micro_batches);
  }
  internal::set_speeds(chain, speeds);
  return chain;
}

Error infeasible(const internal::Chain& chain) {
  const internal::MemoryAdvice advice = internal::advise(chain);
  if (advice.rank < 0) {
    return make_error(ErrorCode::kInfeasible,
                      "no cut of {} layers over {} ranks fits their memory: {} bytes ({}) more on "
                      "every rank would do, or more ranks",
                      chain.layers(), chain.size(), advice.bytes,
                      format_bytes(Bytes{advice.bytes}));
  }
  const std::int64_t has = chain.ranks[static_cast<std::size_t>(advice.rank)].memory_bytes;
  return make_error(ErrorCode::kInfeasible,
                    "no cut of {} layers over {} ranks fits their memory: rank {} has {} bytes "
                    "({}), {} bytes ({}) there would do, or more ranks",
                    chain.layers(), chain.size(), advice.rank, has, format_bytes(Bytes{has}),
                    advice.bytes, format_bytes(Bytes{advice.bytes}));
}

Expected<void> validate(const BalanceProblem& problem) {
  DYNMO_TRY(cost::validate(problem.model, problem.micro_batches));
  DYNMO_TRY(cost::validate(problem.cluster));
  if (problem.cluster.size() > problem.model.size()) {
    return make_error(ErrorCode::kBadInput,
                      "{} ranks for {} layers, wanted at most one rank a layer: use fewer ranks",
                      problem.cluster.size(), problem.model.size());
  }
  return {};
}

}  // namespace

std::string_view name(Balancer balancer) {
  switch (balancer) {
    case Balancer::kUniform:
      return "uniform";
    case Balancer::kParameters:
      return "parameters";
    case Balancer::kTime:
      return "time";
    case Balancer::kOptimal:
      return "optimal";
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

int in_flight(schedule::ScheduleKind schedule, int stage, int stages, int micro_batches) {
  DYNMO_CHECK(stage >= 0 && stage < stages, "a stage below {}, got {}", stages, stage);
  switch (schedule) {
    case schedule::ScheduleKind::kGpipe:
      return micro_batches;
    case schedule::ScheduleKind::k1F1B:
    case schedule::ScheduleKind::kInterleaved:
    case schedule::ScheduleKind::kAdaptive:
      return std::min(micro_batches, stages - stage);
    case schedule::ScheduleKind::kZbH1:
    case schedule::ScheduleKind::kZbV:
      return std::min(micro_batches, stages);
  }
  DYNMO_CHECK(false, "a schedule kind, got {}", static_cast<int>(schedule));
}

Expected<std::vector<int>> balance(Balancer balancer, const BalanceProblem& problem) {
  DYNMO_TRY(validate(problem));
  const int ranks = problem.cluster.size();
  if (balancer == Balancer::kUniform) return uniform_counts(problem.model.size(), ranks);
  if (balancer == Balancer::kOptimal) {
    const internal::Chain chain = chain_of(problem);
    auto counts = internal::best_cut(chain);
    if (!counts) return infeasible(chain);
    return *std::move(counts);
  }
  std::vector<double> weights;
  if (balancer == Balancer::kTime) {
    weights = cost::layer_work_s(problem.model, problem.micro_batches);
  } else {
    for (const cost::LayerCost& layer : problem.model.layers) {
      weights.push_back(static_cast<double>(layer.parameter_bytes.value));
    }
  }
  auto counts = internal::best_cut(blind_chain(weights, ranks));
  DYNMO_CHECK(counts.has_value(), "a cut where memory does not count");
  return *std::move(counts);
}

}  // namespace dynmo::plan
