// SPDX-License-Identifier: Apache-2.0
#pragma once

// Generates text with a trained model: the scores of the next token, and a continuation token by
// token.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/weights/trained_model.h"

namespace dynmo::weights {

struct Sampling {
  std::int64_t tokens = 200;  // limit of new tokens
  // 0 is greedy: the likeliest token each time. Otherwise scores are divided by it before softmax.
  double temperature = 0;
  // Draws from the smallest set of likeliest tokens whose probabilities sum to it, in (0, 1].
  // (Holtzman et al., "The curious case of neural text degeneration", 2020.)
  double top_p = 1;
  std::uint64_t seed = 1;
  std::int64_t end = -1;  // token that ends the text; -1: none
};

// Returns the scores before softmax of every token that may follow each of `tokens`, [T,
// vocabulary]. Returns kBadInput if there are no tokens, more than the model's longest input, or
// one outside the vocabulary.
[[nodiscard]] Expected<at::Tensor> logits(const TrainedModel& model,
                                          const std::vector<std::int64_t>& tokens);

// Checks all that generate() checks, before anything is generated. Returns its errors. Returns a
// line for the user if the text may become longer than the model's longest input, else "".
[[nodiscard]] Expected<std::string> check_generation(const TrainedModel& model,
                                                     const std::vector<std::int64_t>& prompt,
                                                     const Sampling& sampling);

// Continues `prompt`, token by token. Keys and values of what the model has read are kept. Calls
// `made` with every token. Deterministic.
//
// If a prompt is longer than the model's longest input, only its last tokens are read. If the input
// is full, its older half is forgotten and the rest read again. So the cost of a token does not
// depend on the length of the text.
//
// Returns kBadInput for an empty prompt, a token outside the vocabulary, or options outside their
// range.
[[nodiscard]] Expected<std::vector<std::int64_t>> generate(
    const TrainedModel& model, std::vector<std::int64_t> prompt, const Sampling& sampling,
    const std::function<void(std::int64_t)>& made = {});

}  // namespace dynmo::weights
