// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/early_exit/training/learning_slice_impl.h"
#include "dynmo/kernels/host_memory.h"
#include "dynmo/model/hand_written.h"

namespace dynmo::dynamism {
namespace {

using at::Tensor;
using model::SavedSlice;
using model::SliceNumbers;
using Shape = std::vector<std::int64_t>;

constexpr std::int64_t kNumbers = 6;  // of a token, in addition to the two vectors

template <typename Element>
void add_best(const SavedSlice& slice, ExitNumbers& numbers) {
  const Tensor& scores_NV = slice.scores();
  const std::int64_t width = scores_NV.size(1);
  const auto* row = kernels::host_data<const Element>(scores_NV);
  const auto* column = kernels::host_data<const std::int64_t>(slice.column());
  const auto* here = kernels::host_data<const bool>(slice.here());
  auto* best = kernels::host_data<Element>(numbers.best_N);
  auto* second = kernels::host_data<Element>(numbers.second_N);
  auto* right = kernels::host_data<Element>(numbers.right_N);
  for (std::int64_t n = 0; n < scores_NV.size(0); ++n, row += width) {
    std::int64_t own = -1;  // column of the best, if it is in this slice
    for (std::int64_t v = 0; v < width; ++v) {
      if (row[v] > best[n]) {
        second[n] = best[n];
        best[n] = row[v];
        own = v;
      } else {
        second[n] = std::max(second[n], row[v]);
      }
    }
    if (own >= 0) right[n] = here[n] && own == column[n] ? 1 : 0;
  }
}

SliceNumbers numbers_of(const SliceNumbers& all, const Tensor& rows) {
  return {.n_ND = some_of(all.n_ND, rows),
          .log_sum_N = some_of(all.log_sum_N, rows),
          .target_N = some_of(all.target_N, rows)};
}

// Reverses some_of(): returns `count` rows, those of `some` at `rows` and zeros elsewhere.
Tensor all_of(const Tensor& some, const Tensor& rows, std::int64_t count) {
  if (!some.defined() || !rows.defined()) return some;
  Shape shape = some.sizes().vec();
  shape[0] = count;
  return at::zeros(shape, some.options()).index_copy_(0, rows, some);
}

SliceNumbers all_of(const SliceNumbers& some, const Tensor& rows, std::int64_t count) {
  return {.n_ND = all_of(some.n_ND, rows, count),
          .log_sum_N = all_of(some.log_sum_N, rows, count),
          .target_N = all_of(some.target_N, rows, count)};
}

}  // namespace

std::int64_t width_of(std::int64_t hidden) { return 2 * hidden + kNumbers; }

Tensor pack(const ExitNumbers& numbers, Shape tokens, at::ScalarType compute_type) {
  const Tensor& y_ND = numbers.y_ND;
  const std::int64_t D = y_ND.size(1);
  Tensor packed = at::zeros({y_ND.size(0), width_of(D)},
                            y_ND.options().dtype(kernels::accumulation_type(y_ND.scalar_type())));
  packed.narrow(1, 0, D).copy_(y_ND);
  if (numbers.slice.n_ND.defined()) packed.narrow(1, D, D).copy_(numbers.slice.n_ND);
  std::int64_t column = 2 * D;
  for (const Tensor* each_N : {&numbers.slice.log_sum_N, &numbers.slice.target_N, &numbers.best_N,
                               &numbers.second_N, &numbers.right_N, &numbers.similarity_N}) {
    if (each_N->defined()) packed.select(1, column).copy_(*each_N);
    ++column;
  }
  if (compute_type == at::kBFloat16) packed = packed.view(at::kBFloat16);
  tokens.push_back(packed.size(1));
  return packed.view(tokens);
}

ExitNumbers unpack(const Tensor& packed, std::int64_t hidden) {
  Tensor all = model::rows(packed);
  if (all.scalar_type() == at::kBFloat16) all = all.view(at::kFloat);
  DYNMO_CHECK(all.size(1) == width_of(hidden), "{} numbers a token, got {}", width_of(hidden),
              all.size(1));
  const auto column = [&](std::int64_t i) { return all.select(1, 2 * hidden + i); };
  return {.y_ND = all.narrow(1, 0, hidden),
          .slice = {.n_ND = all.narrow(1, hidden, hidden),
                    .log_sum_N = column(0),
                    .target_N = column(1)},
          .best_N = column(2),
          .second_N = column(3),
          .right_N = column(4),
          .similarity_N = column(5)};
}

Tensor some_of(const Tensor& all, const Tensor& rows) {
  return all.defined() && rows.defined() ? all.index_select(0, rows) : all;
}

void LearningSlice::score(const model::Parameter& matrix, cost::HeadRows rows, const Tensor& n_ND,
                          const Tensor& targets_N, ExitNumbers& numbers) {
  DYNMO_CHECK(targets_N.defined(), "targets: a head that makes a text is whole");
  slice.score(matrix, rows, n_ND, some_of(targets_N, scored));
  const Tensor& scores_NV = slice.scores();
  const auto number = [&](const Tensor& before_N, double initial) {
    return before_N.defined() ? some_of(before_N, scored).contiguous().clone()
                              : at::full({scores_NV.size(0)}, initial, scores_NV.options());
  };
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  ExitNumbers own{.best_N = number(numbers.best_N, kNone),
                  .second_N = number(numbers.second_N, kNone),
                  .right_N = number(numbers.right_N, 0)};
  if (scores_NV.scalar_type() == at::kDouble) {
    add_best<double>(slice, own);
  } else {
    add_best<float>(slice, own);
  }
  const std::int64_t N = numbers.y_ND.size(0);
  numbers.best_N = all_of(own.best_N, scored, N);
  numbers.second_N = all_of(own.second_N, scored, N);
  numbers.right_N = all_of(own.right_N, scored, N);
  const Tensor whole_ND = numbers.slice.n_ND;
  const SliceNumbers before{.n_ND = {},
                            .log_sum_N = some_of(numbers.slice.log_sum_N, scored),
                            .target_N = some_of(numbers.slice.target_N, scored)};
  numbers.slice = all_of(slice.pass_on(before), scored, N);
  numbers.slice.n_ND = whole_ND.defined() ? whole_ND : all_of(n_ND, scored, N);
}

SliceNumbers LearningSlice::gradient(const model::Parameter& matrix, const SliceNumbers& after) {
  SliceNumbers own = numbers_of(after, scored);
  const std::int64_t count = own.target_N.numel();
  const Tensor with_gradient = own.target_N.nonzero().squeeze(1);
  if (with_gradient.numel() < count) {
    learn = with_gradient;
    slice.keep(learn);
    own = numbers_of(own, learn);
  }
  return all_of(all_of(slice.gradient(matrix, own), learn, count), scored, after.target_N.numel());
}

void LearningSlice::add_weight_gradient(model::Parameter& matrix, const Tensor& n_ND) const {
  slice.add_weight_gradient(matrix, some_of(n_ND, learn));
}

}  // namespace dynmo::dynamism
