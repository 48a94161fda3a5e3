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

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

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

// Rows of the matrix at the end of a model's last layer, and of those that it is a slice of; 0: the
// last layer does not end in a matrix.
[[nodiscard]] std::int64_t head_words(const Model& model);
// Number of layers if the head were one.
[[nodiscard]] int layers_with_whole_head(const Model& model);
[[nodiscard]] int layers_with_whole_head(const Recipe& recipe);

}  // namespace dynmo::model
