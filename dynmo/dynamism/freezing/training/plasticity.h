// SPDX-License-Identifier: Apache-2.0
#pragma once

// Plasticity is the distance of a layer's outputs from those of a reference model, after Egeria
// (Wang et al., EuroSys'23). It uses the similarity-preserving loss of Tung and Mori (ICCV'19).
// Rows of an output are compared with each other. Then these similarities are compared between the
// two models. So a rotation of all outputs counts as no change.
//
// We depart from Egeria in three ways. Its rows are samples. Ours are token positions, because a
// micro-batch of a language model may have one sample. Its reference model runs on idle CPUs. Ours
// runs in the pipeline, as a second micro-batch after that of the current model. Each layer runs on
// its rank. And Egeria replaces its reference rarely, so it must differentiate plasticity. We
// replace it at every check. So plasticity starts at 0, and its value at the next check is its
// slope.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/training/source.h"

namespace dynmo::dynamism {

inline constexpr std::int64_t kComparedRows = 64;

// Returns the similarities of the rows of a hidden tensor [..., D]. They are G = Q / |Q| by rows, Q
// = A A^T. A has the rows at kComparedRows evenly spread positions (all rows if there are fewer).
// The result is fp32 and on the CPU.
[[nodiscard]] at::Tensor similarities(const at::Tensor& hidden);
// Returns |G - H|^2 / n^2 of two similarities, in fp64.
[[nodiscard]] double similarity_loss(const at::Tensor& g, const at::Tensor& h);

// Layers first <= i < end.
struct ProbedLayers {
  int first = 0;
  int end = 0;
};
// Returns the plasticity by layer against the references in the layers' states, and 0 outside
// `probed`. Layers before `first` are equal in both models, and those from `end` on do not run. All
// ranks call it in before_step, and all get the same numbers. Fails with kPeerLost.
[[nodiscard]] Expected<std::vector<double>> plasticity(const Boundary& boundary,
                                                       const ProbedLayers& probed);

}  // namespace dynmo::dynamism
