// SPDX-License-Identifier: Apache-2.0
#pragma once

// The part of one slice of an exit's head, and the numbers that pass between two slices.

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "dynmo/cost/decoder_shape.h"
#include "dynmo/model/head_slice.h"

namespace dynmo::dynamism {

// Numbers of a token, or their gradients, in the type of sums. The last four have no gradients.
// Undefined means zeros.
struct ExitNumbers {
  at::Tensor y_ND = {};            // output of the half block
  model::SliceNumbers slice = {};  // normed values, log-sum-exp, score of the target
  at::Tensor best_N = {};          // score
  at::Tensor second_N = {};
  at::Tensor right_N = {};  // 1: the best is the target's
  at::Tensor similarity_N = {};
};

// Returns the number of fp32 numbers of a token in the result of pack().
[[nodiscard]] std::int64_t width_of(std::int64_t hidden);
// Packs and unpacks the numbers like model::pack and model::unpack. Each is an fp32 number, which
// is two elements in a bf16 run.
[[nodiscard]] at::Tensor pack(const ExitNumbers& numbers, std::vector<std::int64_t> tokens,
                              at::ScalarType compute_type);
[[nodiscard]] ExitNumbers unpack(const at::Tensor& packed, std::int64_t hidden);

// Returns some rows of `all`, or all of them if `rows` is undefined.
[[nodiscard]] at::Tensor some_of(const at::Tensor& all, const at::Tensor& rows);

// Values that a slice of the head saves for its backward. `scored` are the rows whose scores it
// computes. In the rows `learn` the target's score has a gradient.
struct LearningSlice {
  model::SavedSlice slice;
  at::Tensor scored;  // undefined: all
  at::Tensor learn;   // among the scored rows; undefined: all

  [[nodiscard]] bool scores_some() const { return !scored.defined() || scored.numel() > 0; }

  // Adds the scores of the slice to the received numbers. `n_ND` has the scored rows.
  void score(const model::Parameter& matrix, cost::HeadRows rows, const at::Tensor& n_ND,
             const at::Tensor& targets_N, ExitNumbers& numbers);
  [[nodiscard]] model::SliceNumbers gradient(const model::Parameter& matrix,
                                             const model::SliceNumbers& after);
  void add_weight_gradient(model::Parameter& matrix, const at::Tensor& n_ND) const;
};

}  // namespace dynmo::dynamism
