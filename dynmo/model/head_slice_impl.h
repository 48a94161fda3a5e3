// SPDX-License-Identifier: Apache-2.0
#pragma once

// A slice of a head (head_slice.h), for any norm before the head. The first slice has the family's
// norm, all others NoNorm.

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/kernels/operations.h"
#include "dynmo/model/family_impl.h"
#include "dynmo/model/hand_written.h"
#include "dynmo/model/head_slice.h"

namespace dynmo::model {

// Packs the numbers as one contiguous tensor [B, T, D + 2], or [N, D + 2] for `tokens` {N}. In bf16
// it has twice that number of values with the same bits.
[[nodiscard]] at::Tensor pack(const SliceNumbers& numbers, std::vector<std::int64_t> tokens,
                              at::ScalarType compute_type);
// Returns views of the result of pack(), of width D.
[[nodiscard]] SliceNumbers unpack(const at::Tensor& packed, std::int64_t width);

// The mean loss of a micro-batch, and the gradient of the last slice's numbers.
struct SliceLoss {
  at::Tensor loss;
  SliceNumbers gradient;
};
// Computes the loss. `tokens` is the number of tokens of the micro-batch if only some rows are
// here, or 0 if all are.
[[nodiscard]] SliceLoss loss_of(const SliceNumbers& last, double loss_weight, std::int64_t tokens);

// Replaces the norm in every slice but the first.
struct NoNorm {
  static constexpr std::size_t kParameters = 0;
  struct Kept {
    at::Tensor n_ND;
    [[nodiscard]] std::vector<at::Tensor> tensors() const { return {n_ND}; }
  };
  [[nodiscard]] at::Tensor start(const LayerState& state, const at::Tensor& n_ND,
                                 Kept& kept) const {
    // Exact, because the first slice's n had this type.
    kept.n_ND = n_ND.to(value(state, kParameters).scalar_type());
    return kept.n_ND;
  }
  [[nodiscard]] at::Tensor again(const LayerState&, const Kept& kept) const { return kept.n_ND; }
};

template <typename Norm>
struct SavedHeadSlice : Saved {
  std::vector<std::int64_t> batch;  // B and T; or N if rows have left
  typename Norm::Kept norm;
  SavedSlice slice;
  SliceNumbers loss_gradient;  // in the last slice

  std::vector<at::Tensor> tensors() const override {
    std::vector<at::Tensor> all = norm.tensors();
    for (at::Tensor& tensor : slice.tensors()) all.push_back(std::move(tensor));
    all.push_back(loss_gradient.log_sum_N);
    all.push_back(loss_gradient.target_N);
    return all;
  }
};

template <typename Norm>
class HeadSlice final : public HandWritten<SavedHeadSlice<Norm>> {
 public:
  using Kept = SavedHeadSlice<Norm>;
  using InputGradient = Layer::InputGradient;

  HeadSlice(Specs specs, Norm norm, const cost::DecoderShape& shape, std::int64_t slice)
      : HandWritten<Kept>(fmt::format("head.{} of {}", slice, shape.head_slices), std::move(specs)),
        norm_(std::move(norm)),
        hidden_(shape.hidden),
        rows_(cost::head_rows(shape.vocabulary, shape.head_slices, slice)),
        is_last_(slice + 1 == shape.head_slices) {}
  Needs needs() const override { return {.targets = true, .loss = is_last_}; }
  std::int64_t floats_passed() const override { return is_last_ ? 0 : hidden_ + 2; }

 private:
  static constexpr bool kIsFirst = !std::is_same_v<Norm, NoNorm>;
  static constexpr std::size_t kMatrix = Norm::kParameters;

  Output forward(const LayerState& state, const Hidden& input, const LayerContext& context,
                 Kept& saved) const override {
    saved.batch = input.x.sizes().slice(0, static_cast<std::size_t>(input.x.dim()) - 1).vec();
    SliceNumbers before;
    if constexpr (!kIsFirst) before = unpack(input.x, hidden_);
    const at::Tensor n_ND = norm_.start(state, kIsFirst ? rows(input.x) : before.n_ND, saved.norm);
    saved.slice.score(state.parameters[kMatrix], rows_, n_ND, targets_of(input, context));
    SliceNumbers after = saved.slice.pass_on(before);
    if (!is_last_) {
      after.n_ND = n_ND;
      return {.hidden = {pack(after, saved.batch, n_ND.scalar_type()), input.rows}};
    }
    const std::int64_t tokens = input.rows.defined() ? context.targets_BT.numel() : 0;
    SliceLoss end = loss_of(after, context.loss_weight, tokens);
    saved.loss_gradient = std::move(end.gradient);
    return {.loss = std::move(end.loss)};
  }

  at::Tensor input_gradient(const LayerState& state, Kept& saved, const at::Tensor& output_gradient,
                            InputGradient wanted) const override {
    const SliceNumbers after =
        is_last_ ? std::exchange(saved.loss_gradient, {}) : unpack(output_gradient, hidden_);
    SliceNumbers before = saved.slice.gradient(state.parameters[kMatrix], after);
    if constexpr (kIsFirst) {
      const at::Tensor x_ND = norm_.gradient(state, before.n_ND, saved.norm, wanted);
      if (wanted == InputGradient::kNotWanted) return {};
      std::vector<std::int64_t> shape = saved.batch;
      shape.push_back(hidden_);
      return x_ND.to(value(state, kMatrix).scalar_type()).view(shape);
    } else {
      if (wanted == InputGradient::kNotWanted) return {};
      return pack(before, saved.batch, value(state, kMatrix).scalar_type());
    }
  }

  void weight_gradient(LayerState& state, Kept& saved) const override {
    if constexpr (kIsFirst) norm_.add_gradients(state, saved.norm);
    saved.slice.add_weight_gradient(state.parameters[kMatrix], norm_.again(state, saved.norm));
  }

  Norm norm_;
  std::int64_t hidden_;
  cost::HeadRows rows_;
  bool is_last_;
};

// Adds the layers of a head in shape.head_slices slices. `head` has the parameters of the norm,
// then the matrix of the whole head.
template <typename Norm>
void add_head_slices(const Specs& head, const Norm& norm, const cost::DecoderShape& shape,
                     Model& model) {
  for (std::int64_t slice = 0; slice < shape.head_slices; ++slice) {
    const cost::HeadRows rows = cost::head_rows(shape.vocabulary, shape.head_slices, slice);
    ParameterSpec matrix = head.back();
    matrix.name = name_of({.matrix = matrix.name, .rows = rows});
    matrix.shape[0] = rows.end - rows.begin;
    matrix.piece = {
        .layers_before = slice, .parameter = head.size() - 1, .first = rows.begin * shape.hidden};
    if (slice > 0) {
      model.push_back(std::make_shared<HeadSlice<NoNorm>>(Specs{matrix}, NoNorm(), shape, slice));
      continue;
    }
    Specs specs(head.begin(), head.end() - 1);
    specs.push_back(matrix);
    model.push_back(std::make_shared<HeadSlice<Norm>>(std::move(specs), norm, shape, slice));
  }
}

}  // namespace dynmo::model
