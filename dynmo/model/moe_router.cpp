// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/moe_router.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "dynmo/core/check.h"
#include "dynmo/kernels/host_memory.h"
#include "dynmo/kernels/select_top.h"
#include "dynmo/model/moe_router_impl.h"

namespace dynmo::model {
namespace {

using Numbers = std::vector<double>;
using Index = std::int64_t;

std::size_t at_index(Index i) { return static_cast<std::size_t>(i); }

Numbers numbers_of(const at::Tensor& x) {
  const at::Tensor wide = x.to(at::kDouble).contiguous();
  return {kernels::host_data<const double>(wide),
          kernels::host_data<const double>(wide) + wide.numel()};
}

template <typename T>
at::Tensor tensor_from(const std::vector<T>& values, at::IntArrayRef shape, at::ScalarType type) {
  constexpr auto kOwn = c10::CppTypeToScalarType<T>::value;
  at::Tensor tensor = at::empty(shape, kOwn);
  std::copy(values.begin(), values.end(), kernels::host_data<T>(tensor));
  return tensor.to(type);
}

// Computes p of each row, and the log-sum-exp of z.
void softmax(const Numbers& z, Index experts, Numbers& p, Numbers& log_sums) {
  p.resize(z.size());
  log_sums.resize(z.size() / at_index(experts));
  for (std::size_t n = 0; n < log_sums.size(); ++n) {
    const double* from = z.data() + n * at_index(experts);
    double* to = p.data() + n * at_index(experts);
    const double highest = *std::max_element(from, from + experts);
    double sum = 0;
    for (Index e = 0; e < experts; ++e) sum += to[e] = std::exp(from[e] - highest);
    for (Index e = 0; e < experts; ++e) to[e] /= sum;
    log_sums[n] = highest + std::log(sum);
  }
}

// Returns the `top_k` highest columns of every row, highest first.
std::vector<std::int32_t> highest_of_rows(const Numbers& scores, Index experts, Index top_k) {
  std::vector<std::int32_t> chosen;
  std::vector<Index> order(at_index(experts));
  for (std::size_t first = 0; first < scores.size(); first += at_index(experts)) {
    std::iota(order.begin(), order.end(), Index{0});
    const auto row = std::span(scores).subspan(first, at_index(experts));
    std::partial_sort(order.begin(), order.begin() + top_k, order.end(),
                      kernels::HigherFirst<double>{row});
    for (Index k = 0; k < top_k; ++k) {
      chosen.push_back(static_cast<std::int32_t>(order[at_index(k)]));
    }
  }
  return chosen;
}

// Chooses the experts of each token.
std::vector<std::int32_t> experts_of_tokens(const RouterOptions& o, const Numbers& z,
                                            const Numbers& p, const at::Tensor& bias_E, Pass pass) {
  if (o.router == MoeRouter::kBias) {
    DYNMO_CHECK(bias_E.defined() && bias_E.numel() == o.experts, "a bias of {} experts", o.experts);
    const Numbers bias = numbers_of(bias_E);
    Numbers sums = p;
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += bias[i % bias.size()];
    return highest_of_rows(sums, o.experts, o.top_k);
  }
  if (o.router == MoeRouter::kSinkhorn && pass == Pass::kTraining) {
    return highest_of_rows(sinkhorn(z, o.experts), o.experts, o.top_k);
  }
  if (o.router == MoeRouter::kBalanced && pass == Pass::kTraining) {
    return kernels::balanced_assignment(z, o.experts, o.top_k);
  }
  return highest_of_rows(z, o.experts, o.top_k);
}

// A slot of a token, for lists by expert.
struct Entry {
  Index token;
  Index slot;
};
using ByExpert = std::vector<std::vector<Entry>>;

// Sorts the slots by expert (a counting sort). Within an expert, tokens ascend.
ByExpert by_expert(const std::vector<std::int32_t>& experts_NK, Index experts, Index slots) {
  ByExpert all(at_index(experts));
  for (std::size_t i = 0; i < experts_NK.size(); ++i) {
    all[at_index(experts_NK[i])].push_back(
        {.token = static_cast<Index>(i) / slots, .slot = static_cast<Index>(i) % slots});
  }
  return all;
}

void keep_first(std::vector<Entry>& entries, Index capacity, MoeDrop drop, const Numbers& gates_NK,
                Index slots) {
  if (std::ssize(entries) <= capacity) return;
  if (drop == MoeDrop::kProbability) {
    Numbers gates;  // by entry, and so by token
    for (const Entry& entry : entries) {
      gates.push_back(gates_NK[at_index(entry.token * slots + entry.slot)]);
    }
    std::size_t kept = 0;
    for (const Index entry : kernels::select_top(gates, capacity))
      entries[kept++] = entries[at_index(entry)];
  }
  entries.resize(at_index(capacity));
}

// Chooses the tokens of each expert. Slot e of a token is for expert e.
ByExpert tokens_of_experts(const Numbers& p, Index experts, Index capacity) {
  const Index tokens = std::ssize(p) / experts;
  const Index taken = std::min(capacity, tokens);
  ByExpert all(at_index(experts));
  if (tokens == 0) return all;
  Numbers column(at_index(tokens));
  for (Index e = 0; e < experts; ++e) {
    for (Index n = 0; n < tokens; ++n) column[at_index(n)] = p[at_index(n * experts + e)];
    for (const Index token : kernels::select_top(column, taken)) {
      all[at_index(e)].push_back({.token = token, .slot = e});
    }
  }
  return all;
}

// Computes gates from the chosen z, not from the chosen p, which may all be 0.
Numbers gates_of(const Numbers& z, const Numbers& p, const std::vector<std::int32_t>& experts_NK,
                 Index experts, Index slots) {
  Numbers gates(experts_NK.size());
  for (std::size_t first = 0; first < gates.size(); first += at_index(slots)) {
    const std::size_t row = first / at_index(slots) * at_index(experts);
    if (slots == 1) {
      gates[first] = p[row + at_index(experts_NK[first])];
      continue;
    }
    double highest = -std::numeric_limits<double>::infinity();
    for (std::size_t i = first; i < first + at_index(slots); ++i) {
      highest = std::max(highest, z[row + at_index(experts_NK[i])]);
    }
    double sum = 0;
    for (std::size_t i = first; i < first + at_index(slots); ++i) {
      sum += gates[i] = std::exp(z[row + at_index(experts_NK[i])] - highest);
    }
    for (std::size_t i = first; i < first + at_index(slots); ++i) gates[i] /= sum;
  }
  return gates;
}

double aux_loss_of(const RouterOptions& o, const Routing& routing, const Numbers& p) {
  const auto tokens = static_cast<double>(std::ssize(p) / o.experts);
  const double all = tokens * static_cast<double>(o.top_k);
  double sum = 0;
  for (Index e = 0; e < o.experts; ++e) {
    double mean = 0;
    for (std::size_t i = at_index(e); i < p.size(); i += at_index(o.experts)) mean += p[i];
    sum += static_cast<double>(routing.assigned[at_index(e)]) / all * mean / tokens;
  }
  return o.aux_loss * static_cast<double>(o.experts) * sum;
}

// The choice of tokens or experts, before drops.
struct Choice {
  Index slots = 0;
  std::vector<std::int32_t> experts_NK;
  Numbers gates_NK;
  ByExpert entries;
};

Choice choose(const RouterOptions& o, const Numbers& z, const Numbers& p, const at::Tensor& bias_E,
              Pass pass) {
  const Index tokens = std::ssize(p) / o.experts;
  Choice choice;
  if (o.router == MoeRouter::kExpertChoice) {
    choice.slots = o.experts;
    for (Index i = 0; i < tokens * o.experts; ++i) {
      choice.experts_NK.push_back(static_cast<std::int32_t>(i % o.experts));
    }
    choice.gates_NK = p;
    choice.entries = tokens_of_experts(p, o.experts, capacity_of(o, tokens));
    return choice;
  }
  choice.slots = o.top_k;
  choice.experts_NK = experts_of_tokens(o, z, p, bias_E, pass);
  choice.gates_NK = gates_of(z, p, choice.experts_NK, o.experts, o.top_k);
  choice.entries = by_expert(choice.experts_NK, o.experts, o.top_k);
  return choice;
}

// Sets the places, tokens and offsets of the kept slots, by expert.
void put_places(const Choice& choice, Index tokens, Routing& routing) {
  std::vector<std::int32_t> places(choice.experts_NK.size(), -1);
  std::vector<std::int32_t> sources;
  routing.offsets.push_back(0);
  for (const auto& entries : choice.entries) {
    for (const Entry& entry : entries) {
      places[at_index(entry.token * choice.slots + entry.slot)] =
          static_cast<std::int32_t>(sources.size());
      sources.push_back(static_cast<std::int32_t>(entry.token));
    }
    routing.offsets.push_back(std::ssize(sources));
  }
  routing.places_NK = tensor_from(places, {tokens, choice.slots}, at::kInt);
  routing.tokens_A = tensor_from(sources, {std::ssize(sources)}, at::kInt);
}

void add_losses(const RouterOptions& o, const Numbers& p, const Numbers& log_sums,
                Routing& routing) {
  for (const double share : p) routing.entropy -= share > 0 ? share * std::log(share) : 0;
  if (log_sums.empty()) return;
  if (has_aux_loss(o)) routing.aux_loss = aux_loss_of(o, routing, p);
  const double squares =
      std::inner_product(log_sums.begin(), log_sums.end(), log_sums.begin(), 0.0);
  routing.z_loss = o.z_loss * squares / static_cast<double>(log_sums.size());
}

// Returns the auxiliary loss's gradient of p, which is the same for all tokens.
Numbers aux_gradient(const RouterOptions& o, const Routing& routing, double tokens,
                     double loss_weight) {
  Numbers gradient(at_index(o.experts));
  if (!has_aux_loss(o)) return gradient;
  const double factor = loss_weight * o.aux_loss * static_cast<double>(o.experts) /
                        (tokens * tokens * static_cast<double>(o.top_k));
  for (std::size_t e = 0; e < gradient.size(); ++e) {
    gradient[e] = factor * static_cast<double>(routing.assigned[e]);
  }
  return gradient;
}

}  // namespace

Index capacity_of(const RouterOptions& o, Index tokens) {
  const double factor =
      o.router == MoeRouter::kExpertChoice && o.capacity_factor == 0 ? 1 : o.capacity_factor;
  const double share =
      std::ceil(factor * static_cast<double>(tokens * o.top_k) / static_cast<double>(o.experts));
  return std::clamp(static_cast<Index>(std::min(share, 1e15)), Index{1},
                    std::max(tokens, Index{1}));
}

std::int64_t Routing::dropped() const {
  return std::accumulate(assigned.begin(), assigned.end(), Index{0}) - offsets.back();
}

std::vector<double> sinkhorn(std::span<const double> scores, std::int64_t experts) {
  Numbers pi(scores.size());
  const std::size_t rows = scores.size() / at_index(experts);
  for (std::size_t n = 0; n < rows; ++n) {
    const auto row = scores.subspan(n * at_index(experts), at_index(experts));
    const double highest = *std::max_element(row.begin(), row.end());
    for (std::size_t e = 0; e < row.size(); ++e) {
      // (Held above 0, so that no column is empty.)
      pi[n * row.size() + e] = std::exp(std::max(row[e] - highest, -500.0));
    }
  }
  for (int round = 0; round < kSinkhornRounds; ++round) {
    Numbers columns(at_index(experts));
    for (std::size_t n = 0; n < rows; ++n) {
      double* row = pi.data() + n * at_index(experts);
      const double sum = std::accumulate(row, row + experts, 0.0) * static_cast<double>(rows);
      for (std::size_t e = 0; e < columns.size(); ++e) columns[e] += row[e] /= sum;
    }
    for (std::size_t i = 0; i < pi.size(); ++i) {
      pi[i] /= columns[i % columns.size()] * static_cast<double>(experts);
    }
  }
  return pi;
}

Routing route(const RouterOptions& o, const at::Tensor& scores_NE, const at::Tensor& bias_E,
              Pass pass) {
  const Index tokens = scores_NE.size(0);
  DYNMO_CHECK(scores_NE.size(1) == o.experts && o.top_k >= 1 && o.top_k <= o.experts,
              "scores of {} experts, {} a token, got {}", o.experts, o.top_k, scores_NE.size(1));
  if (!scores_NE.is_cpu()) return route_on_device(o, scores_NE, bias_E, pass);
  const Numbers z = numbers_of(scores_NE);
  Numbers p;
  Numbers log_sums;
  softmax(z, o.experts, p, log_sums);
  Choice choice = choose(o, z, p, bias_E, pass);

  Routing routing;
  for (auto& entries : choice.entries) {
    routing.assigned.push_back(std::ssize(entries));
    if (drops(o, pass)) {
      keep_first(entries, capacity_of(o, tokens), o.drop, choice.gates_NK, choice.slots);
    }
  }
  const at::ScalarType type = scores_NE.scalar_type();
  routing.probabilities_NE = tensor_from(p, {tokens, o.experts}, type);
  routing.log_sum_exp_N = tensor_from(log_sums, {tokens}, type);
  routing.experts_NK = tensor_from(choice.experts_NK, {tokens, choice.slots}, at::kInt);
  routing.gates_NK = tensor_from(choice.gates_NK, {tokens, choice.slots}, type);
  put_places(choice, tokens, routing);
  add_losses(o, p, log_sums, routing);
  return routing;
}

at::Tensor routing_gradient(const RouterOptions& o, const Routing& routing,
                            const at::Tensor& gates_gradient_NK, double loss_weight) {
  if (!gates_gradient_NK.is_cpu()) {
    return routing_gradient_on_device(o, routing, gates_gradient_NK, loss_weight);
  }
  const Numbers p = numbers_of(routing.probabilities_NE);
  const Numbers log_sums = numbers_of(routing.log_sum_exp_N);
  const Numbers gates = numbers_of(routing.gates_NK);
  const Numbers slopes = numbers_of(gates_gradient_NK);
  const at::Tensor experts = routing.experts_NK.contiguous();
  const auto* expert = kernels::host_data<const std::int32_t>(experts);
  const Index slots = experts.size(1);
  const auto tokens = static_cast<double>(log_sums.size());
  const Numbers aux = aux_gradient(o, routing, tokens, loss_weight);
  Numbers gradient(p.size());
  Numbers of_p(aux.size());
  for (std::size_t n = 0; n < log_sums.size(); ++n) {
    const std::size_t first = n * at_index(slots);
    double* to = gradient.data() + n * aux.size();
    const double* row = p.data() + n * aux.size();
    of_p = aux;
    if (shares(o)) {
      // Gates are the softmax of the chosen z.
      double mean = 0;
      for (std::size_t i = first; i < first + at_index(slots); ++i) mean += gates[i] * slopes[i];
      for (std::size_t i = first; i < first + at_index(slots); ++i) {
        to[expert[i]] += gates[i] * (slopes[i] - mean);
      }
    } else {
      for (std::size_t i = first; i < first + at_index(slots); ++i) {
        of_p[at_index(expert[i])] += slopes[i];
      }
    }
    double mean = 0;
    for (std::size_t e = 0; e < of_p.size(); ++e) mean += row[e] * of_p[e];
    const double z = 2 * loss_weight * o.z_loss * log_sums[n] / tokens;
    for (std::size_t e = 0; e < of_p.size(); ++e) to[e] += row[e] * (of_p[e] - mean + z);
  }
  return tensor_from(gradient, routing.probabilities_NE.sizes(),
                     routing.probabilities_NE.scalar_type());
}

std::vector<std::string> moe_figures(std::int64_t experts) {
  std::vector<std::string> names = {"micro_batches", "tokens",   "dropped",
                                    "entropy",       "aux_loss", "z_loss"};
  for (Index e = 0; e < experts; ++e) names.push_back(fmt::format("expert.{}", e));
  return names;
}

std::vector<double> moe_figures_of(const Routing& routing) {
  const Index tokens = routing.log_sum_exp_N.size(0);
  std::vector<double> figures = {tokens > 0 ? 1.0 : 0.0, static_cast<double>(tokens)};
  if (routing.later_figures.defined()) return figures;
  figures.insert(figures.end(), {static_cast<double>(routing.dropped()), routing.entropy,
                                 routing.aux_loss, routing.z_loss});
  for (const Index count : routing.assigned) figures.push_back(static_cast<double>(count));
  return figures;
}

}  // namespace dynmo::model
