// SPDX-License-Identifier: Apache-2.0
#pragma once

// Plasticity of a layer, after Egeria (Wang et al., EuroSys'23): how far its outputs are from those
// of a reference model, by the similarity-preserving loss of Tung and Mori (ICCV'19). Rows of an
// output are compared with each other, and what is compared between the two models is how alike
// they are; so outputs that have only turned count as unmoved.
//
// We depart from Egeria in three ways. Its rows are samples; ours are token positions, as a
// micro-batch of a language model may have one sample. Its reference model runs on CPUs that are
// idle; ours runs in the pipeline, as a second micro-batch behind that of the current model, with
// each layer where it is. And its reference is taken anew once in a while, so that plasticity has
// to be differentiated; ours is taken at every check, so that plasticity begins at nothing and what
// it has come to at the next check is its slope.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/training/source.h"

namespace dynmo::dynamism {

inline constexpr std::int64_t kComparedRows = 64;

// How alike the rows of a hidden tensor [..., D] are: G = Q / |Q| by rows, Q = A A^T, A the rows at
// kComparedRows positions that are spread evenly (all rows where there are fewer). fp32, on the
// CPU, whatever the hidden tensor is.
[[nodiscard]] at::Tensor similarities(const at::Tensor& hidden);
// |G - H|^2 / n^2 of two of them, in fp64.
[[nodiscard]] double similarity_loss(const at::Tensor& g, const at::Tensor& h);

// Layers first <= i < end.
struct ProbedLayers {
  int first = 0;
  int end = 0;
};
// Plasticity by layer against the references in the layers' states; 0 of others than `probed`.
// Those before `first` are as they are in both models, those from `end` on do not run. Called by
// all ranks in before_step, where all get the same numbers.
[[nodiscard]] Expected<std::vector<double>> plasticity(const Boundary& boundary,
                                                       const ProbedLayers& probed);

}  // namespace dynmo::dynamism
