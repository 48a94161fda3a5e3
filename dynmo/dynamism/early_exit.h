// SPDX-License-Identifier: Apache-2.0
#pragma once

// Early exit as a load model: tokens whose prediction is already sure leave the model on the way,
// so that deep layers see few of them. Which share of the tokens is left before block l is
// rho_l = prod_{j < l} (1 - e_j); it never grows with depth, and falls while training goes on and
// the model gets surer.

#include <cstdint>
#include <memory>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"

namespace dynmo::dynamism {

// What later layers do with a token that has left.
enum class ExitedTokens {
  kRemoved,     // nothing: survivors do not attend to it. Attention's core takes rho^2
  kPropagated,  // its keys and values are computed from its exit state (CALM): K, V in full, the
                // core rho, and messages stay whole, since they carry the exit states
};

struct EarlyExitParameters {
  double survivors = 0.1;       // behind the last exit once the model is sure
  std::int64_t exit_every = 4;  // blocks between exits, none behind the last block. Few, because an
                                // exit has a head of its own (EE-LLM takes two in 32 blocks)
  ExitedTokens exited = ExitedTokens::kRemoved;
  std::int64_t warm_up = 500;  // steps without exits, against training deep layers on hard tokens
  std::int64_t ramp_steps = 2000;  // time constant of log(rho) behind the warm-up
  // Exits differ: deviation of the logarithm of an exit's hazard, drawn for each, and how much of
  // it drifts in this many steps.
  double exit_spread = 0.3;
  double drift = 0.1;
  std::int64_t drift_steps = 1000;
  int micro_batches =
      32;  // of a step: batch noise of rho is sqrt(rho (1 - rho) / tokens of a step)
};

// rho before each of `blocks` blocks and, last, before the head, in [0, 1] and never growing. A
// function of (parameters, seed, step). `tokens` of a micro-batch. Requires valid parameters.
[[nodiscard]] std::vector<double> survivors(const EarlyExitParameters& parameters, int blocks,
                                            std::int64_t tokens, std::uint64_t seed,
                                            std::int64_t step);

// A half block works on, keeps and sends on survivors only (with a 4-byte index a token). A token's
// loss is taken where it leaves, with a head of the vocabulary's size: the MLP before an exit does
// the head's work for the tokens that leave, and holds an untied exit head's weights; the test
// itself is one product of 2 T h (a learned classifier). kBadInput naming the field.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_early_exit(
    const EarlyExitParameters& parameters, const LoadInputs& inputs);

}  // namespace dynmo::dynamism
