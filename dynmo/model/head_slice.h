// SPDX-License-Identifier: Apache-2.0
#pragma once

// A head in slices: a chain of layers, each with some rows of the matrix. The matrix has a row for
// each word. So the time of one layer does not bound a pipeline with a large vocabulary.
//
// Slice j gets the normed hidden values n. For each token it also gets l, the log-sum-exp of the
// scores so far, and z, the target's score if seen. It passes on n, l' and z':
//
//   s = n W_j^T,  own = lse(s),  l' = log(exp(l) + exp(own)),  z' = z + s[target], if it is here
//
// The first slice has the final norm, and the last one the loss, mean(l' - z'). The backward pass
// is
//
//   ds = softmax(s) dl' exp(own - l') + onehot dz',  dn += ds W_j,  dl = dl' exp(l - l'),  dz = dz'
//
// with dl' = 1 / N and dz' = -1 / N at the end: the chain rule, slice by slice.
//
// One tensor of fp32 numbers, hidden + 2 a token, passes between slices in both directions. It is
// fp32 also if layers compute in bf16, because the gradient is a sum over all slices and its
// rounding would grow with them. The layer type bf16 sees the tensor as twice that number of
// values, bit for bit.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/cost/decoder_shape.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/recipe.h"

namespace dynmo::model {

// Name and rows of a parameter that has some rows of a matrix: "lm_head.weight[128:256]".
struct MatrixRows {
  std::string matrix;
  cost::HeadRows rows;
};
[[nodiscard]] std::string name_of(const MatrixRows& rows);
// Parses the name of some rows of a matrix. Returns nullopt for any other name.
[[nodiscard]] std::optional<MatrixRows> parse_matrix_rows(std::string_view name);

// The numbers of a token that pass between two slices, or their gradients: [N, D], [N], [N]. Their
// type is that of sums.
struct SliceNumbers {
  at::Tensor n_ND;
  at::Tensor log_sum_N;  // log-sum-exp of the scores so far
  // Score of the target, or 0 if it has not been seen.
  at::Tensor target_N;
};

// The numbers of one slice for one micro-batch, which the slice's stash keeps. Calls are score(),
// then pass_on(), then the gradients.
class SavedSlice {
 public:
  // Computes the slice's scores, which scores() returns until pass_on().
  void score(const Parameter& matrix, cost::HeadRows rows, const at::Tensor& n_ND,
             const at::Tensor& targets_N);
  // Adds the slice's share to `before` and returns the result. `before` is undefined in the first
  // slice, and `before.n_ND` is not read.
  [[nodiscard]] SliceNumbers pass_on(const SliceNumbers& before);
  // Drops the numbers of all tokens except `tokens`.
  void keep(const at::Tensor& tokens);
  // Converts the gradient of the slice's output to that of its input. `after.n_ND` is undefined in
  // the last slice.
  [[nodiscard]] SliceNumbers gradient(const Parameter& matrix, const SliceNumbers& after);
  // Adds this slice's gradient of the matrix to `matrix`.
  void add_weight_gradient(Parameter& matrix, const at::Tensor& n_ND) const;

  [[nodiscard]] const at::Tensor& scores() const { return scores_NV; }
  // Returns the column of the target among scores(), int64. here() says whether the target is in
  // this slice.
  [[nodiscard]] const at::Tensor& column() const { return column_N; }
  [[nodiscard]] const at::Tensor& here() const { return here_N; }
  [[nodiscard]] std::vector<at::Tensor> tensors() const { return {scores_NV, own_N, before_N}; }

 private:
  at::Tensor scores_NV;  // of the slice; then their softmax; after gradient(), their gradient
  at::Tensor own_N;      // exp(own - l')
  at::Tensor before_N;   // exp(l - l'); undefined in the first slice
  at::Tensor column_N;   // 0 if the target is in another slice
  at::Tensor here_N;
};

// The place of a layer if every chain of slices counts as one layer.
struct WholePlace {
  int layer = 0;  // number of that layer
  int slice = 0;  // number in its chain
};
[[nodiscard]] std::vector<WholePlace> whole_places(const Model& model);
// Converts a number of first layers in which each chain of slices counts as one layer. In the
// result every slice counts.
[[nodiscard]] int layers_up_to(const Model& model, int layers);

// Returns whether a parameter is the matrix of a head, or rows of one. The head may be the model's
// or an exit's. The parameter's name ends in "head.weight".
[[nodiscard]] bool is_head(const ParameterSpec& spec);
// Returns the end of a layer's rows in the matrix of the whole head: the vocabulary's size for the
// last slice. Returns 0 if the layer has no such rows.
[[nodiscard]] std::int64_t head_words(const Layer& layer);
// Returns the number of layers if every chain of slices counts as one.
[[nodiscard]] int layers_with_whole_head(const Model& model);
[[nodiscard]] int layers_with_whole_head(const Recipe& recipe);

}  // namespace dynmo::model
