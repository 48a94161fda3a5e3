// SPDX-License-Identifier: Apache-2.0
#pragma once

// Text of a trained model: the scores of what may follow, and a continuation token by token.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/weights/trained_model.h"

namespace dynmo::weights {

struct Sampling {
  std::int64_t tokens = 200;  // made at most
  // 0: greedy, the likeliest token each time. Otherwise scores are divided by it before softmax.
  double temperature = 0;
  // Draws from the least set of likeliest tokens whose probabilities sum to it (Holtzman et al.,
  // "The curious case of neural text degeneration", 2020); in (0, 1].
  double top_p = 1;
  std::uint64_t seed = 1;
  std::int64_t end = -1;  // a token that ends the text; -1: none does
};

// Scores before softmax of every token that may follow each of `tokens`, [T, vocabulary].
// kBadInput: none or more than the model's longest input, a token outside the vocabulary.
[[nodiscard]] Expected<at::Tensor> logits(const TrainedModel& model,
                                          const std::vector<std::int64_t>& tokens);

// Refuses what generate() does, before anything is made. Returns a line for people where the text
// may become longer than the model's longest input, else "".
[[nodiscard]] Expected<std::string> check_generation(const TrainedModel& model,
                                                     const std::vector<std::int64_t>& prompt,
                                                     const Sampling& sampling);

// Continues `prompt`, token by token; keys and values of what the model has read are kept.
// Only the last tokens of a prompt longer than the model's longest input are read. Where the input
// is full, its older half is forgotten and the rest read again, so that a token costs the same
// however long the text is. Calls `made` with every token. Deterministic. kBadInput: an empty
// prompt, a token outside the vocabulary, options outside their range.
[[nodiscard]] Expected<std::vector<std::int64_t>> generate(
    const TrainedModel& model, std::vector<std::int64_t> prompt, const Sampling& sampling,
    const std::function<void(std::int64_t)>& made = {});

}  // namespace dynmo::weights
