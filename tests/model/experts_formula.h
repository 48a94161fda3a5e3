// SPDX-License-Identifier: Apache-2.0
#pragma once

// A layer of experts as its formula says, token by token, for gradients by autograd.

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "dynmo/kernels/select_top.h"
#include "dynmo/model/moe.h"
#include "tests/model/helpers.h"

namespace dynmo::model::testing {

// Which experts each token chooses, and which of those keep it, by sorting everything.
struct Chosen {
  std::vector<std::vector<int>> experts;
  std::vector<std::set<int>> kept;
};

inline std::vector<int> by_score(const at::Tensor& scores) {
  std::vector<int> order(static_cast<std::size_t>(scores.numel()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return scores[a].item<double>() > scores[b].item<double>();
  });
  return order;
}

inline Chosen experts_chosen(const RouterOptions& o, const at::Tensor& z, const at::Tensor& bias) {
  const auto tokens = static_cast<int>(z.size(0));
  const auto experts = static_cast<int>(z.size(1));
  const at::Tensor p = z.softmax(1);
  Chosen chosen{.experts = std::vector<std::vector<int>>(static_cast<std::size_t>(tokens)),
                .kept = std::vector<std::set<int>>(static_cast<std::size_t>(tokens))};
  const double even = static_cast<double>(tokens * o.top_k) / experts;
  if (o.router == MoeRouter::kExpertChoice) {
    const double factor = o.capacity_factor > 0 ? o.capacity_factor : 1;
    const int capacity = std::min(tokens, static_cast<int>(std::ceil(factor * even)));
    for (int e = 0; e < experts; ++e) {
      const std::vector<int> order = by_score(p.select(1, e));
      for (int i = 0; i < capacity; ++i) {
        const auto n = static_cast<std::size_t>(order[static_cast<std::size_t>(i)]);
        chosen.experts[n].push_back(e);
        chosen.kept[n].insert(e);
      }
    }
    return chosen;
  }
  const at::Tensor scores = z.contiguous();
  const std::span<const double> numbers(scores.const_data_ptr<double>(),
                                        static_cast<std::size_t>(scores.numel()));
  const std::vector<double> pi = sinkhorn(numbers, experts);
  const std::vector<std::int32_t> balanced =
      kernels::balanced_assignment(numbers, experts, o.top_k);
  for (int n = 0; n < tokens; ++n) {
    auto& own = chosen.experts[static_cast<std::size_t>(n)];
    if (o.router == MoeRouter::kBalanced) {
      own.assign(balanced.begin() + n * o.top_k, balanced.begin() + (n + 1) * o.top_k);
      continue;
    }
    at::Tensor row = z[n];
    if (o.router == MoeRouter::kBias) row = p[n] + bias;
    if (o.router == MoeRouter::kSinkhorn) {
      row = at::from_blob(const_cast<double*>(pi.data()) + n * experts, {experts}, at::kDouble);
    }
    own = by_score(row);
    own.resize(static_cast<std::size_t>(o.top_k));
  }
  for (int e = 0; e < experts; ++e) {
    std::vector<std::pair<double, int>> order;
    for (int n = 0; n < tokens; ++n) {
      const auto& own = chosen.experts[static_cast<std::size_t>(n)];
      if (std::ranges::count(own, e) == 0) continue;
      double sum = 0;
      for (const int other : own) sum += p[n][other].item<double>();
      const double gate = p[n][e].item<double>() / (o.top_k > 1 ? sum : 1);
      order.emplace_back(o.drop == MoeDrop::kPosition ? n : -gate, n);
    }
    std::ranges::sort(order);
    const auto capacity = static_cast<std::size_t>(std::ceil(o.capacity_factor * even));
    if (o.capacity_factor > 0 && order.size() > capacity) order.resize(capacity);
    for (const auto& [unused, n] : order) chosen.kept[static_cast<std::size_t>(n)].insert(e);
  }
  return chosen;
}

struct ExpertsFormula {
  at::Tensor output;  // of the layer
  at::Tensor losses;  // of its router: they act in the gradients alone
};

// `w`: the layer's parameters; x: rows that are there, at least one.
inline ExpertsFormula experts_formula(const RouterOptions& o, const std::vector<at::Tensor>& w,
                                      const at::Tensor& x, const at::Tensor& bias, double epsilon) {
  const at::Tensor rows = x.reshape({-1, x.size(-1)});
  const at::Tensor n = plain_norm(rows, w[0], epsilon);
  const at::Tensor z = n.matmul(w[1].t());
  const at::Tensor p = z.softmax(1);
  const Chosen chosen = experts_chosen(o, z.detach(), bias);
  const std::int64_t tokens = rows.size(0);
  std::vector<at::Tensor> made;
  std::vector<double> counts(static_cast<std::size_t>(o.experts));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto& own = chosen.experts[static_cast<std::size_t>(t)];
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (const int e : own) {
      sum = sum + p[t][e];
      ++counts[static_cast<std::size_t>(e)];
    }
    at::Tensor y = rows[t];
    for (const int e : own) {
      if (!chosen.kept[static_cast<std::size_t>(t)].contains(e)) continue;
      const bool shared = o.router != MoeRouter::kExpertChoice && o.top_k > 1;
      const auto first = static_cast<std::size_t>(2 + 3 * e);
      const at::Tensor gate = n[t].matmul(w[first].t());
      const at::Tensor inner = gate * gate.sigmoid() * n[t].matmul(w[first + 1].t());
      y = y + (shared ? p[t][e] / sum : p[t][e]) * inner.matmul(w[first + 2].t());
    }
    made.push_back(y);
  }
  at::Tensor aux = at::zeros({}, at::kDouble);
  for (std::int64_t e = 0; e < o.experts; ++e) {
    aux = aux + counts[static_cast<std::size_t>(e)] / static_cast<double>(tokens * o.top_k) *
                    p.select(1, e).mean();
  }
  const at::Tensor losses =
      o.aux_loss * static_cast<double>(o.experts) * aux + o.z_loss * z.logsumexp(1).square().mean();
  return {.output = at::stack(made).view(x.sizes()), .losses = losses};
}

}  // namespace dynmo::model::testing
