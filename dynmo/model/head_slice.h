// SPDX-License-Identifier: Apache-2.0
#pragma once

// A head in slices: a chain of layers, each with some rows of the matrix, a row a word. So a large
// vocabulary does not bound a pipeline by the time of one layer.
//
// Slice j gets the normed hidden values n, and of each token the log-sum-exp l of the scores so far
// and the score z of the target once it has been seen. It passes on n, l' and z':
//
//   s = n W_j^T,  own = lse(s),  l' = log(exp(l) + exp(own)),  z' = z + s[target], where it is here
//
// The first slice has the final norm, and the last one the loss, mean(l' - z'). Backwards
//
//   ds = softmax(s) dl' exp(own - l') + onehot dz',  dn += ds W_j,  dl = dl' exp(l - l'),  dz = dz'
//
// with dl' = 1 / N and dz' = -1 / N at the end: the chain rule, slice by slice. All that passes
// between slices is one tensor of fp32 numbers, hidden + 2 a token, both ways, also where layers
// compute in bf16: the gradient is a sum over all slices, whose rounding would grow with them. The
// layer type bf16 sees it as twice as many numbers, bit for bit.

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
// Nothing for any other name.
[[nodiscard]] std::optional<MatrixRows> parse_matrix_rows(std::string_view name);

// The numbers of a token that pass between two slices, or their gradients: [N, D], [N], [N], of the
// type that sums are kept in.
struct SliceNumbers {
  at::Tensor n_ND;
  at::Tensor log_sum_N;  // of the scores so far
  at::Tensor target_N;   // score of the target, 0 where it has not been seen
};

// The share of some rows of the matrix, of one micro-batch; a slice's stash keeps it. score, then
// pass_on, then the gradients.
class SavedSlice {
 public:
  // From here until pass_on, scores() are the slice's.
  void score(const Parameter& matrix, cost::HeadRows rows, const at::Tensor& n_ND,
             const at::Tensor& targets_N);
  // Adds the slice's share. `before` is undefined in the first slice; its n_ND is not read.
  [[nodiscard]] SliceNumbers pass_on(const SliceNumbers& before);
  // Forgets all tokens but these.
  void keep(const at::Tensor& tokens);
  // From the gradient of what it passed on to that of what it got. `after.n_ND` is undefined in the
  // last slice.
  [[nodiscard]] SliceNumbers gradient(const Parameter& matrix, const SliceNumbers& after);
  // Adds that of the matrix.
  void add_weight_gradient(Parameter& matrix, const at::Tensor& n_ND) const;

  [[nodiscard]] const at::Tensor& scores() const { return scores_NV; }
  // Column of the target among scores(), int64, and whether it lies there.
  [[nodiscard]] const at::Tensor& column() const { return column_N; }
  [[nodiscard]] const at::Tensor& here() const { return here_N; }
  [[nodiscard]] std::vector<at::Tensor> tensors() const { return {scores_NV, own_N, before_N}; }

 private:
  at::Tensor scores_NV;  // of the slice; their softmax; from gradient() on, their gradient
  at::Tensor own_N;      // exp(own - l')
  at::Tensor before_N;   // exp(l - l'); undefined in the first slice
  at::Tensor column_N;   // 0 where the target lies in another slice
  at::Tensor here_N;
};

// Where a layer stands if every chain of slices were one layer, as it is with one slice.
struct WholePlace {
  int layer = 0;  // number of that layer
  int slice = 0;  // number in its chain
};
[[nodiscard]] std::vector<WholePlace> whole_places(const Model& model);
// How many layers the first `layers` are, which are counted with every chain as one.
[[nodiscard]] int layers_up_to(const Model& model, int layers);

// Whether a parameter is the matrix of a head, the model's or an exit's, or rows of one: its name
// ends in "head.weight".
[[nodiscard]] bool is_head(const ParameterSpec& spec);
// Rows of the head's matrix up to the end of a layer's, all in the last slice; 0: the layer has
// none.
[[nodiscard]] std::int64_t head_words(const Layer& layer);
// Number of layers if every chain of slices were one.
[[nodiscard]] int layers_with_whole_head(const Model& model);
[[nodiscard]] int layers_with_whole_head(const Recipe& recipe);

}  // namespace dynmo::model
