// SPDX-License-Identifier: Apache-2.0
// The router by libtorch's operations. The host reads nothing from the device: shapes follow from
// the largest number of rows that experts may have, and figures are read later.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/kernels/generic.h"
#include "dynmo/kernels/host_memory.h"
#include "dynmo/kernels/select_top.h"
#include "dynmo/model/moe_router_impl.h"

namespace dynmo::model {
namespace {

using at::Tensor;

// Returns the indices that sort x in ascending order. Here and below, the lower index of equal
// values comes first.
Tensor ascending(const Tensor& x, std::int64_t dimension) {
  return std::get<1>(at::sort(x, /*stable=*/true, dimension, /*descending=*/false));
}
Tensor highest_first(const Tensor& scores_NE, std::int64_t top_k) {
  // Ascending, so that NaN comes last.
  const Tensor keys_NE = scores_NE.neg().masked_fill_(scores_NE.isnan(), at::Scalar(NAN));
  return ascending(keys_NE, 1).narrow(1, 0, top_k);
}

Tensor sinkhorn_of(const Tensor& z_NE) {
  const auto rows = static_cast<double>(z_NE.size(0));
  const auto experts = static_cast<double>(z_NE.size(1));
  // (Held above 0, so that no column is empty.)
  Tensor pi_NE = (z_NE - z_NE.amax(1, /*keepdim=*/true)).clamp_min_(-500.0).exp_();
  for (int round = 0; round < kSinkhornRounds; ++round) {
    pi_NE.div_(pi_NE.sum(1, /*keepdim=*/true).mul_(rows));
    pi_NE.div_(pi_NE.sum(0, /*keepdim=*/true).mul_(experts));
  }
  return pi_NE;
}

// Returns balanced_assignment() of the scores, computed on the host.
Tensor balanced_on_host(const RouterOptions& o, const Tensor& z_NE) {
  const Tensor host_NE = z_NE.to(at::kCPU).contiguous();
  const auto* z = kernels::host_data<const double>(host_NE);
  const std::vector<std::int32_t> chosen = kernels::balanced_assignment(
      {z, static_cast<std::size_t>(host_NE.numel())}, o.experts, o.top_k);
  const Tensor sent_NK =
      at::empty({z_NE.size(0), o.top_k}, at::dtype(at::kLong).pinned_memory(true));
  std::ranges::copy(chosen, kernels::host_data<std::int64_t>(sent_NK));
  return sent_NK.to(z_NE.device(), /*non_blocking=*/true);
}

Tensor experts_by_scores(const RouterOptions& o, const Tensor& z_NE, const Tensor& p_NE,
                         const Tensor& bias_E, Pass pass) {
  if (o.router == MoeRouter::kBias) {
    DYNMO_CHECK(bias_E.defined() && bias_E.numel() == o.experts, "a bias of {} experts", o.experts);
    return highest_first(p_NE + bias_E.to(at::kDouble), o.top_k);
  }
  const bool training = pass == Pass::kTraining;
  if (o.router == MoeRouter::kSinkhorn && training) {
    return highest_first(sinkhorn_of(z_NE), o.top_k);
  }
  if (o.router == MoeRouter::kBalanced && training) return balanced_on_host(o, z_NE);
  return highest_first(z_NE, o.top_k);
}

// The slots n K + k of token n and choice k, sorted by expert, then token. Dropped slots come last.
struct SortedSlots {
  Tensor order_J;
  Tensor starts;          // first slot of each expert, E + 1; the last is the number of kept ones
  Tensor assigned;        // E + 1 offsets before drops
  std::int64_t most = 0;  // upper limit of the kept ones
};

SortedSlots sorted_by_expert(const RouterOptions& o, const Tensor& experts_NK,
                             const Tensor& gates_NK, Pass pass) {
  const Tensor expert_J = experts_NK.flatten();
  const Tensor bounds = at::arange(o.experts + 1, expert_J.options());
  Tensor order_J = ascending(expert_J, 0);
  Tensor sorted_J = expert_J.index_select(0, order_J);
  const Tensor assigned = at::searchsorted(sorted_J, bounds);
  if (!drops(o, pass)) {
    return {.order_J = order_J, .starts = assigned, .assigned = assigned, .most = expert_J.numel()};
  }

  if (o.drop == MoeDrop::kProbability) {
    const Tensor by_gate_J =
        highest_first(gates_NK.flatten().unsqueeze(0), expert_J.numel()).squeeze(0);
    order_J = by_gate_J.index_select(0, ascending(expert_J.index_select(0, by_gate_J), 0));
  }
  const Tensor rank_J =
      at::arange(expert_J.numel(), expert_J.options()).sub_(assigned.index_select(0, sorted_J));
  const std::int64_t capacity = capacity_of(o, experts_NK.size(0));
  const Tensor kept_J = at::empty_like(expert_J).index_copy_(
      0, order_J, sorted_J.masked_fill(rank_J.ge(capacity), o.experts));
  order_J = ascending(kept_J, 0);
  sorted_J = kept_J.index_select(0, order_J);
  return {.order_J = order_J,
          .starts = at::searchsorted(sorted_J, bounds),
          .assigned = assigned,
          .most = std::min(expert_J.numel(), o.experts * capacity)};
}

// Sets the places, entries, tokens and starts of the kept slots.
void set_places(const SortedSlots& rows, std::int64_t slots, Routing& routing) {
  const Tensor sorted_J = at::arange(rows.order_J.numel(), rows.order_J.options());
  Tensor place_J =
      at::empty_like(rows.order_J)
          .index_copy_(0, rows.order_J,
                       sorted_J.masked_fill(sorted_J.ge(rows.starts.select(0, -1)), -1));
  routing.places_NK = place_J.view({-1, slots});
  routing.entries_A = rows.order_J.narrow(0, 0, rows.most);
  routing.tokens_A = routing.entries_A.div(slots, "floor");
  routing.starts = rows.starts;
}

// Returns three sums over the tokens: entropy, auxiliary loss and z loss. `assigned_E` is fp64.
Tensor sums_of(const RouterOptions& o, const Tensor& p_NE, const Tensor& log_sums_N,
               const Tensor& assigned_E) {
  const auto tokens = static_cast<double>(p_NE.size(0));
  const Tensor entropy = at::xlogy(p_NE, p_NE).sum().neg_();
  Tensor aux = at::zeros({}, p_NE.options());
  if (has_aux_loss(o)) {
    aux = assigned_E.mul(p_NE.sum(0))
              .sum()
              .mul_(o.aux_loss * static_cast<double>(o.experts) /
                    (tokens * tokens * static_cast<double>(o.top_k)));
  }
  return at::stack({entropy, aux, log_sums_N.square().sum().mul_(o.z_loss / tokens)});
}

// Returns the routing of no tokens.
Routing nothing(const RouterOptions& o, const Tensor& scores_NE) {
  const std::int64_t slots = o.router == MoeRouter::kExpertChoice ? o.experts : o.top_k;
  const auto whole = scores_NE.options().dtype(at::kLong);
  return {
      .probabilities_NE = at::empty_like(scores_NE),
      .log_sum_exp_N = at::empty({0}, scores_NE.options()),
      .experts_NK = at::empty({0, slots}, whole),
      .gates_NK = at::empty({0, slots}, scores_NE.options()),
      .places_NK = at::empty({0, slots}, whole),
      .tokens_A = at::empty({0}, whole),
      .entries_A = at::empty({0}, whole),
      .starts = at::zeros({o.experts + 1}, whole),
      .assigned_E = at::zeros({o.experts}, whole.dtype(at::kDouble)),
      .later_figures = at::zeros({kMoeCounts - kMoeDropped + o.experts}, whole.dtype(at::kDouble))};
}

}  // namespace

Routing route_on_device(const RouterOptions& o, const Tensor& scores_NE, const Tensor& bias_E,
                        Pass pass) {
  const std::int64_t tokens = scores_NE.size(0);
  if (tokens == 0) return nothing(o, scores_NE);
  const at::ScalarType type = scores_NE.scalar_type();
  const Tensor z_NE = scores_NE.to(at::kDouble);
  const Tensor p_NE = at::softmax(z_NE, 1);
  const Tensor log_sums_N = at::logsumexp(z_NE, 1);
  Routing routing;
  routing.probabilities_NE = p_NE.to(type);
  routing.log_sum_exp_N = log_sums_N.to(type);
  SortedSlots rows;
  if (o.router == MoeRouter::kExpertChoice) {
    const std::int64_t taken = std::min(capacity_of(o, tokens), tokens);
    const auto whole = p_NE.options().dtype(at::kLong);
    routing.experts_NK = at::arange(o.experts, whole).expand({tokens, o.experts});
    routing.gates_NK = routing.probabilities_NE;
    const Tensor chosen_EC = kernels::generic::select_top(p_NE.t(), taken);
    const Tensor entries_A =
        chosen_EC.mul(o.experts).add_(at::arange(o.experts, whole).unsqueeze(1)).flatten();
    rows.starts = at::arange(o.experts + 1, whole).mul_(taken);
    rows.assigned = rows.starts;
    rows.most = taken * o.experts;
    // Entries that are not chosen come last.
    const Tensor unchosen_J = at::ones({tokens * o.experts}, whole);
    unchosen_J.index_fill_(0, entries_A, 0);
    rows.order_J = at::cat({entries_A, ascending(unchosen_J, 0).slice(0, rows.most)});
  } else {
    routing.experts_NK = experts_by_scores(o, z_NE, p_NE, bias_E, pass);
    const Tensor gates_NK = o.top_k == 1 ? p_NE.gather(1, routing.experts_NK)
                                         : at::softmax(z_NE.gather(1, routing.experts_NK), 1);
    routing.gates_NK = gates_NK.to(type);
    rows = sorted_by_expert(o, routing.experts_NK, gates_NK, pass);
  }
  routing.assigned_E = rows.assigned.diff().to(at::kDouble);
  const Tensor dropped_1 =
      rows.assigned.narrow(0, o.experts, 1).sub(rows.starts.narrow(0, o.experts, 1));
  routing.later_figures =
      at::cat({dropped_1.to(at::kDouble), sums_of(o, p_NE, log_sums_N, routing.assigned_E),
               routing.assigned_E});
  set_places(rows, routing.experts_NK.size(1), routing);
  return routing;
}

Tensor routing_gradient_on_device(const RouterOptions& o, const Routing& routing,
                                  const Tensor& gates_gradient_NK, double loss_weight) {
  const Tensor p_NE = routing.probabilities_NE.to(at::kDouble);
  const Tensor slopes_NK = gates_gradient_NK.to(at::kDouble);
  const auto tokens = static_cast<double>(p_NE.size(0));
  Tensor of_p_NE = at::zeros_like(p_NE);
  if (has_aux_loss(o) && tokens > 0) {
    of_p_NE.add_(routing.assigned_E, loss_weight * o.aux_loss * static_cast<double>(o.experts) /
                                         (tokens * tokens * static_cast<double>(o.top_k)));
  }
  Tensor gradient_NE = at::zeros_like(p_NE);
  if (shares(o)) {
    // Gates are the softmax of the chosen z. A token's experts differ, so each place is set once.
    const Tensor gates_NK = routing.gates_NK.to(at::kDouble);
    const Tensor mean_N1 = gates_NK.mul(slopes_NK).sum(1, /*keepdim=*/true);
    gradient_NE.scatter_(1, routing.experts_NK, gates_NK.mul(slopes_NK - mean_N1));
  } else {
    of_p_NE.add_(at::zeros_like(p_NE).scatter_(1, routing.experts_NK, slopes_NK));
  }
  const Tensor mean_N1 = p_NE.mul(of_p_NE).sum(1, /*keepdim=*/true);
  Tensor slope_NE = of_p_NE.sub_(mean_N1);
  if (tokens > 0) {
    slope_NE.add_(routing.log_sum_exp_N.to(at::kDouble).unsqueeze(1),
                  2 * loss_weight * o.z_loss / tokens);
  }
  return gradient_NE.addcmul_(p_NE, slope_NE).to(routing.probabilities_NE.scalar_type());
}

}  // namespace dynmo::model
