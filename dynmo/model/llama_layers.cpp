// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "dynmo/model/family_layers_impl.h"
#include "dynmo/model/hand_written.h"
#include "dynmo/model/head_slice_impl.h"
#include "dynmo/model/ragged_rows.h"

namespace dynmo::model {
namespace {

using at::Tensor;

constexpr std::uint64_t kResidualDropout = 1;

struct SavedEmbedding : Saved {
  Tensor tokens_BT;
  Tensor gradient;  // of the output

  std::vector<Tensor> tensors() const override { return {gradient}; }
};

class Embedding final : public HandWritten<SavedEmbedding> {
 public:
  explicit Embedding(Specs specs) : HandWritten("embedding", std::move(specs)) {}

 private:
  Output forward(const LayerState& state, const Hidden&, const LayerContext& context,
                 SavedEmbedding& saved) const override {
    saved.tokens_BT = context.tokens_BT;
    return {.hidden = at::embedding(value(state, 0), context.tokens_BT)};
  }
  Tensor input_gradient(const LayerState&, SavedEmbedding& saved, const Tensor& output_gradient,
                        InputGradient) const override {
    saved.gradient = output_gradient;
    return {};
  }
  void weight_gradient(LayerState& state, SavedEmbedding& saved) const override {
    add_rows(state.parameters[0].gradient, saved.tokens_BT, saved.gradient);
  }
};

// Ends the backward pass of a half block x + f(rms_norm(x)). Converts the gradient of the normed
// input to that of x, which is undefined unless wanted. Saves the norm's weight gradient.
template <typename T>
Tensor through_norm_and_residual(T& saved, const Tensor& n_gradient_ND, const Tensor& norm_weight_D,
                                 const Tensor& output_gradient, Layer::InputGradient wanted) {
  kernels::NormGradient norm = kernels::norm_gradient(n_gradient_ND, saved.x_ND, saved.inverse_N1,
                                                      norm_weight_D, wanted, rows(output_gradient));
  saved.norm_gradient_D = std::move(norm.weight_D);
  if (wanted == Layer::InputGradient::kNotWanted) return {};
  return norm.x_ND.view(output_gradient.sizes());
}

struct SavedAttention : Saved {
  Tensor x_ND;
  Tensor inverse_N1;
  kernels::Attention attention;
  Tensor q_BTHK, k_BTHK, v_BTHK;  // rotated q and k; from input_gradient on, gradients of the
                                  // three products. No k if keys are shared with q
  kernels::Selection selection;   // if there is a pattern
  Tensor positions_BT;            // if the tokens are no whole sequences
  RowsLeft left;                  // if rows have left
  Tensor mask;
  Tensor update_gradient_ND;
  Tensor norm_gradient_D;

  std::vector<Tensor> tensors() const override {
    std::vector<Tensor> all = {
        x_ND,         inverse_N1, attention.out_BTHK, attention.log_sum_exp, q_BTHK, k_BTHK, v_BTHK,
        positions_BT, mask,       update_gradient_ND, norm_gradient_D};
    for (Tensor& tensor : selection.tensors()) all.push_back(std::move(tensor));
    return all;
  }
};

class AttentionLayer final : public HandWritten<SavedAttention>,
                             public TakesPattern,
                             public TakesPositions {
 public:
  AttentionLayer(std::string name, Specs specs, const LlamaConfig& config,
                 kernels::RotaryTable table, std::shared_ptr<const AttentionPattern> pattern = {})
      : HandWritten(std::move(name), std::move(specs)),
        config_(config),
        table_(std::move(table)),
        pattern_(std::move(pattern)) {}

  std::vector<std::string> figures() const override {
    return pattern_ ? pattern_figures() : std::vector<std::string>();
  }
  std::shared_ptr<const Layer> with(
      std::shared_ptr<const AttentionPattern> pattern) const override {
    Specs specs = parameters();
    if (pattern->shares_keys() && !shares_keys()) {
      if (config_.qkv_bias) specs.erase(specs.begin() + static_cast<std::ptrdiff_t>(bias_of(kK)));
      specs.erase(specs.begin() + kK);
    }
    return std::make_shared<AttentionLayer>(name(), std::move(specs), config_, table_,
                                            std::move(pattern));
  }
  Output forward_at(const LayerState& state, const Hidden& input, const Tensor& positions_BT,
                    const LayerContext& context, std::unique_ptr<Stash>* stash) const override {
    const at::NoGradGuard no_graph;
    SavedAttention saved;
    saved.positions_BT = positions_BT;
    Output output = forward(state, input, context, saved);
    if (stash != nullptr) *stash = std::make_unique<SavedAttention>(std::move(saved));
    return output;
  }

 private:
  // v and o follow, then the biases of q, k and v. If keys are shared there is no k, and the later
  // ones move up.
  enum { kNorm, kQ, kK };
  bool shares_keys() const { return pattern_ && pattern_->shares_keys(); }
  std::size_t v() const { return shares_keys() ? kK : kK + 1; }
  std::size_t o() const { return v() + 1; }
  // Returns the index of the bias of q, k or v.
  std::size_t bias_of(std::size_t matrix) const { return o() + matrix; }

  Output forward(const LayerState& state, const Hidden& input, const LayerContext& context,
                 SavedAttention& saved) const override {
    saved.left = rows_left(input, context);
    if (saved.left) saved.positions_BT = positions_of(saved.left);
    const std::int64_t B = saved.left ? 1 : input.x.size(0);
    // The number of heads follows from the matrix, which may have lost some.
    const auto heads = [&](const Tensor& n_ND, std::size_t matrix) {
      Tensor product_NO = times(state.parameters[matrix], n_ND);
      if (config_.qkv_bias) product_NO.add_(value(state, bias_of(matrix)));
      return product_NO.view(
          {B, n_ND.size(0) / B, product_NO.size(1) / config_.head_size(), config_.head_size()});
    };
    saved.x_ND = rows(input.x);
    const auto [n_ND, inverse_N1] =
        kernels::rms_norm(saved.x_ND, value(state, kNorm), config_.rms_epsilon);
    saved.inverse_N1 = inverse_N1;
    saved.q_BTHK = heads(n_ND, kQ);
    if (!shares_keys()) saved.k_BTHK = heads(n_ND, kK);
    saved.v_BTHK = heads(n_ND, v());
    Output output;
    if (pattern_) {
      saved.selection = select(*pattern_, input, saved.q_BTHK, state, context, output);
    }
    turn(saved.q_BTHK, saved, kernels::Rope::kForward, tokens_before(context));
    if (!shares_keys()) turn(saved.k_BTHK, saved, kernels::Rope::kForward, tokens_before(context));
    saved.attention =
        pattern_
            ? kernels::selected_attention(saved.q_BTHK, saved.k_BTHK, saved.v_BTHK, saved.selection)
            : attend(state.id, context, saved.q_BTHK, saved.k_BTHK, saved.v_BTHK, saved.left);
    const Tensor update_ND = times(state.parameters[o()], mixed(saved));
    saved.mask = dropout_mask(update_ND, config_.dropout, state, context, kResidualDropout);
    output.hidden = {
        with_residual(update_ND, saved.mask, config_.dropout, saved.x_ND).view(input.x.sizes()),
        input.rows};
    return output;
  }

  Tensor input_gradient(const LayerState& state, SavedAttention& saved,
                        const Tensor& output_gradient, InputGradient wanted) const override {
    const Tensor dy_ND = rows(output_gradient);
    saved.update_gradient_ND = masked(dy_ND, saved.mask, config_.dropout);
    saved.mask.reset();
    const Tensor mixed_gradient_BTHK =
        times_transposed(state.parameters[o()], saved.update_gradient_ND)
            .view(saved.q_BTHK.sizes());
    kernels::AttentionGradient gradient =
        pattern_
            ? kernels::selected_attention_gradient(mixed_gradient_BTHK, saved.q_BTHK, saved.k_BTHK,
                                                   saved.v_BTHK, saved.attention, saved.selection)
            : attend_gradient(mixed_gradient_BTHK, saved.q_BTHK, saved.k_BTHK, saved.v_BTHK,
                              saved.attention, saved.left);
    saved.attention.log_sum_exp.reset();
    saved.selection = {};
    turn(gradient.q_BTHK, saved, kernels::Rope::kBack);
    if (!shares_keys()) turn(gradient.k_BTHK, saved, kernels::Rope::kBack);
    saved.positions_BT.reset();
    saved.left.reset();
    saved.q_BTHK = std::move(gradient.q_BTHK);
    saved.k_BTHK = std::move(gradient.k_BTHK);
    saved.v_BTHK = std::move(gradient.v_BTHK);
    const std::vector<Parameter>& p = state.parameters;
    Tensor n_gradient_ND = times_transposed(p[kQ], flat(saved.q_BTHK));
    if (!shares_keys()) add_times_transposed(n_gradient_ND, p[kK], flat(saved.k_BTHK));
    add_times_transposed(n_gradient_ND, p[v()], flat(saved.v_BTHK));
    return through_norm_and_residual(saved, n_gradient_ND, value(state, kNorm), output_gradient,
                                     wanted);
  }

  void weight_gradient(LayerState& state, SavedAttention& saved) const override {
    const Tensor n_ND = kernels::normed_again(saved.x_ND, saved.inverse_N1, value(state, kNorm),
                                              config_.rms_epsilon);
    std::vector<Parameter>& p = state.parameters;
    p[kNorm].gradient.add_(saved.norm_gradient_D);
    add_product(p[kQ], flat(saved.q_BTHK), n_ND);
    if (!shares_keys()) add_product(p[kK], flat(saved.k_BTHK), n_ND);
    add_product(p[v()], flat(saved.v_BTHK), n_ND);
    add_product(p[o()], saved.update_gradient_ND, mixed(saved));
    if (!config_.qkv_bias) return;
    p[bias_of(kQ)].gradient.add_(flat(saved.q_BTHK).sum(0));
    if (!shares_keys()) p[bias_of(kK)].gradient.add_(flat(saved.k_BTHK).sum(0));
    p[bias_of(v())].gradient.add_(flat(saved.v_BTHK).sum(0));
  }

  void turn(Tensor& x_BTHK, const SavedAttention& saved, kernels::Rope direction,
            std::int64_t first = 0) const {
    if (saved.positions_BT.defined())
      return kernels::apply_rope(x_BTHK, table_, direction, saved.positions_BT);
    kernels::apply_rope(x_BTHK, table_, direction, first);
  }
  static Tensor flat(const Tensor& x_BTHK) {
    return x_BTHK.view({x_BTHK.size(0) * x_BTHK.size(1), x_BTHK.size(2) * x_BTHK.size(3)});
  }
  static Tensor mixed(const SavedAttention& saved) {
    const Tensor& out = saved.attention.out_BTHK;
    return out.reshape({out.size(0) * out.size(1), out.size(2) * out.size(3)});
  }

  LlamaConfig config_;
  kernels::RotaryTable table_;
  std::shared_ptr<const AttentionPattern> pattern_;  // null: all pairs
};

struct SavedMlp : Saved {
  Tensor x_ND;
  Tensor inverse_N1;
  Tensor gate_NF, up_NF;  // from input_gradient on, their gradients
  Tensor product_NF;      // silu(gate) * up, from input_gradient on
  Tensor mask;
  Tensor update_gradient_ND;
  Tensor norm_gradient_D;

  std::vector<Tensor> tensors() const override {
    return {x_ND, inverse_N1,         gate_NF,        up_NF, product_NF,
            mask, update_gradient_ND, norm_gradient_D};
  }
};

class MlpLayer final : public HandWritten<SavedMlp>, public TakesExperts {
 public:
  MlpLayer(std::string name, Specs specs, const LlamaConfig& config)
      : HandWritten(std::move(name), std::move(specs)), config_(config) {}

  std::shared_ptr<const Layer> with(const MoeConfig& moe) const override {
    const std::string block = name().substr(0, name().rfind('.'));
    return moe_layer(block + ".moe", parameters()[kNorm], config_, moe);
  }

 private:
  enum { kNorm, kGate, kUp, kDown };

  Output forward(const LayerState& state, const Hidden& input, const LayerContext& context,
                 SavedMlp& saved) const override {
    saved.x_ND = rows(input.x);
    const auto [n_ND, inverse_N1] =
        kernels::rms_norm(saved.x_ND, value(state, kNorm), config_.rms_epsilon);
    saved.inverse_N1 = inverse_N1;
    saved.gate_NF = times(state.parameters[kGate], n_ND);
    saved.up_NF = times(state.parameters[kUp], n_ND);
    const Tensor update_ND =
        times(state.parameters[kDown], kernels::swiglu(saved.gate_NF, saved.up_NF));
    saved.mask = dropout_mask(update_ND, config_.dropout, state, context, kResidualDropout);
    return {
        .hidden = {
            with_residual(update_ND, saved.mask, config_.dropout, saved.x_ND).view(input.x.sizes()),
            input.rows}};
  }

  Tensor input_gradient(const LayerState& state, SavedMlp& saved, const Tensor& output_gradient,
                        InputGradient wanted) const override {
    const Tensor dy_ND = rows(output_gradient);
    saved.update_gradient_ND = masked(dy_ND, saved.mask, config_.dropout);
    saved.mask.reset();
    saved.product_NF = times_transposed(state.parameters[kDown], saved.update_gradient_ND);
    kernels::swiglu_gradient(saved.gate_NF, saved.up_NF, saved.product_NF);
    Tensor n_gradient_ND = times_transposed(state.parameters[kGate], saved.gate_NF);
    add_times_transposed(n_gradient_ND, state.parameters[kUp], saved.up_NF);
    return through_norm_and_residual(saved, n_gradient_ND, value(state, kNorm), output_gradient,
                                     wanted);
  }

  void weight_gradient(LayerState& state, SavedMlp& saved) const override {
    const Tensor n_ND = kernels::normed_again(saved.x_ND, saved.inverse_N1, value(state, kNorm),
                                              config_.rms_epsilon);
    std::vector<Parameter>& p = state.parameters;
    p[kNorm].gradient.add_(saved.norm_gradient_D);
    add_product(p[kGate], saved.gate_NF, n_ND);
    add_product(p[kUp], saved.up_NF, n_ND);
    add_product(p[kDown], saved.update_gradient_ND, saved.product_NF);
  }

  LlamaConfig config_;
};

struct SavedHead : Saved {
  std::vector<std::int64_t> shape;  // of the input
  Tensor x_ND;
  Tensor inverse_N1;
  SavedLoss loss;
  Tensor norm_gradient_D;

  std::vector<Tensor> tensors() const override {
    return {x_ND, inverse_N1, loss.scores_NV, norm_gradient_D};
  }
};

class HeadLayer final : public HandWritten<SavedHead> {
 public:
  HeadLayer(Specs specs, const LlamaConfig& config)
      : HandWritten("head", std::move(specs)), config_(config) {}
  Needs needs() const override { return {.targets = true, .loss = true}; }

 private:
  enum { kNorm, kHead };

  Output forward(const LayerState& state, const Hidden& input, const LayerContext& context,
                 SavedHead& saved) const override {
    saved.shape = input.x.sizes().vec();
    saved.x_ND = rows(input.x);
    const auto [n_ND, inverse_N1] =
        kernels::rms_norm(saved.x_ND, value(state, kNorm), config_.rms_epsilon);
    saved.inverse_N1 = inverse_N1;
    return {.loss = saved.loss.forward(state.parameters[kHead], n_ND, input, context)};
  }

  Tensor input_gradient(const LayerState& state, SavedHead& saved, const Tensor&,
                        InputGradient wanted) const override {
    const Tensor n_gradient_ND = saved.loss.gradient(state.parameters[kHead]);
    kernels::NormGradient norm = kernels::norm_gradient(n_gradient_ND, saved.x_ND, saved.inverse_N1,
                                                        value(state, kNorm), wanted);
    saved.norm_gradient_D = std::move(norm.weight_D);
    if (wanted == InputGradient::kNotWanted) return {};
    return norm.x_ND.to(saved.x_ND.scalar_type()).view(saved.shape);
  }

  void weight_gradient(LayerState& state, SavedHead& saved) const override {
    const Tensor n_ND = kernels::normed_again(saved.x_ND, saved.inverse_N1, value(state, kNorm),
                                              config_.rms_epsilon);
    state.parameters[kNorm].gradient.add_(saved.norm_gradient_D);
    add_product(state.parameters[kHead], saved.loss.scores_NV, n_ND);
  }

  LlamaConfig config_;
};

// The norm in front of a head in slices. Its gradient arrives in the accumulation type, and is
// rounded once, after the norm.
class RmsNormOfHead {
 public:
  static constexpr std::size_t kParameters = 1;
  struct Kept {
    Tensor x_ND;
    Tensor inverse_N1;
    Tensor gradient_D;
    std::vector<Tensor> tensors() const { return {x_ND, inverse_N1, gradient_D}; }
  };
  explicit RmsNormOfHead(double epsilon) : epsilon_(epsilon) {}

  Tensor start(const LayerState& state, const Tensor& x_ND, Kept& kept) const {
    kept.x_ND = x_ND;
    auto [n_ND, inverse_N1] = kernels::rms_norm(x_ND, value(state, 0), epsilon_);
    kept.inverse_N1 = std::move(inverse_N1);
    return n_ND;
  }
  Tensor again(const LayerState& state, const Kept& kept) const {
    return kernels::normed_again(kept.x_ND, kept.inverse_N1, value(state, 0), epsilon_);
  }
  Tensor gradient(const LayerState& state, const Tensor& n_gradient_ND, Kept& kept,
                  Layer::InputGradient wanted) const {
    const at::ScalarType sums = n_gradient_ND.scalar_type();
    kernels::NormGradient norm =
        kernels::norm_gradient(n_gradient_ND.contiguous(), kept.x_ND.to(sums), kept.inverse_N1,
                               value(state, 0).to(sums), wanted);
    kept.gradient_D = std::move(norm.weight_D);
    return norm.x_ND;
  }
  void add_gradients(LayerState& state, const Kept& kept) const {
    state.parameters[0].gradient.add_(kept.gradient_D);
  }

 private:
  double epsilon_;
};

}  // namespace

std::shared_ptr<const Layer> embedding_layer(Specs specs) {
  return std::make_shared<Embedding>(std::move(specs));
}

std::shared_ptr<const Layer> attention_layer(std::string name, Specs specs,
                                             const LlamaConfig& config,
                                             const kernels::RotaryTable& table) {
  return std::make_shared<AttentionLayer>(std::move(name), std::move(specs), config, table);
}

std::shared_ptr<const Layer> mlp_layer(std::string name, Specs specs, const LlamaConfig& config) {
  return std::make_shared<MlpLayer>(std::move(name), std::move(specs), config);
}

void add_head(Specs specs, const LlamaConfig& config, Model& model) {
  if (config.shape.head_slices > 1) {
    add_head_slices(specs, RmsNormOfHead(config.rms_epsilon), config.shape, model);
  } else {
    model.push_back(std::make_shared<HeadLayer>(std::move(specs), config));
  }
}

}  // namespace dynmo::model
