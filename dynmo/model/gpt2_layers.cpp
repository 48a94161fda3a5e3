// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <utility>

#include "dynmo/kernels/operations.h"
#include "dynmo/model/family_layers_impl.h"
#include "dynmo/model/hand_written.h"
#include "dynmo/model/head_slice_impl.h"

namespace dynmo::model {
namespace {

using at::Tensor;

constexpr std::uint64_t kResidualDropout = 1;
constexpr std::uint64_t kEmbeddingDropout = 2;

struct SavedEmbedding : Saved {
  Tensor tokens_BT;
  Tensor mask;
  Tensor gradient_BTD;  // of the sum of the two vectors

  std::vector<Tensor> tensors() const override { return {mask, gradient_BTD}; }
};

class Gpt2Embedding final : public HandWritten<SavedEmbedding> {
 public:
  Gpt2Embedding(Specs specs, const Gpt2Config& config)
      : HandWritten("embedding", std::move(specs)), config_(config) {}

 private:
  enum { kTokens, kPositions };

  Output forward(const LayerState& state, const Hidden&, const LayerContext& context,
                 SavedEmbedding& saved) const override {
    const std::int64_t T = context.tokens_BT.size(1);
    const std::int64_t first = tokens_before(context);
    DYNMO_CHECK(first + T <= config_.shape.positions, "at most {} tokens, got {}",
                config_.shape.positions, first + T);
    saved.tokens_BT = context.tokens_BT;
    const Tensor sum_BTD = at::embedding(value(state, kTokens), context.tokens_BT)
                               .add_(value(state, kPositions).narrow(0, first, T));
    saved.mask = dropout_mask(sum_BTD, config_.dropout, state, context, kEmbeddingDropout);
    return {.hidden = masked(sum_BTD, saved.mask, config_.dropout)};
  }
  Tensor input_gradient(const LayerState&, SavedEmbedding& saved, const Tensor& output_gradient,
                        InputGradient) const override {
    saved.gradient_BTD = masked(output_gradient, saved.mask, config_.dropout);
    saved.mask.reset();
    return {};
  }
  void weight_gradient(LayerState& state, SavedEmbedding& saved) const override {
    add_rows(state.parameters[kTokens].gradient, saved.tokens_BT, saved.gradient_BTD);
    state.parameters[kPositions]
        .gradient.narrow(0, 0, saved.gradient_BTD.size(1))
        .add_(saved.gradient_BTD.sum(0));
  }

  Gpt2Config config_;
};

// Holds what the gradient of a layer norm (Ba et al., 2016) of x needs. It is part of every stash
// below.
struct SavedNorm : Saved {
  Tensor x_ND;
  Tensor mean_N1;
  Tensor inverse_N1;                          // 1 / standard deviation
  Tensor weight_gradient_D, bias_gradient_D;  // from input_gradient on

  // Returns `others`, then the tensors of the norm.
  std::vector<Tensor> with_norm(std::vector<Tensor> others) const {
    others.insert(others.end(), {x_ND, mean_N1, inverse_N1, weight_gradient_D, bias_gradient_D});
    return others;
  }
};

// The first two parameters of every layer with a norm.
enum { kNormWeight, kNormBias };

// Returns the weight or bias of the norm. On the CPU libtorch keeps the statistics in their type.
// On CUDA they must have the type of x, and the statistics are fp32.
Tensor norm_parameter(const LayerState& state, std::size_t i) {
  const Tensor& parameter = value(state, i);
  return parameter.is_cpu() ? parameter.to(kernels::accumulation_type(parameter.scalar_type()))
                            : parameter;
}

Tensor normalised(const LayerState& state, double epsilon, const Tensor& x_ND, Tensor* mean_N1,
                  Tensor* inverse_N1) {
  auto [n_ND, mean, inverse] =
      at::native_layer_norm(x_ND, {x_ND.size(1)}, norm_parameter(state, kNormWeight),
                            norm_parameter(state, kNormBias), epsilon);
  if (mean_N1 != nullptr) *mean_N1 = std::move(mean);
  if (inverse_N1 != nullptr) *inverse_N1 = std::move(inverse);
  return n_ND;
}

// Starts the stash of a layer with input x.
Tensor start(const LayerState& state, double epsilon, const Tensor& x_BTD, SavedNorm& saved) {
  saved.x_ND = rows(x_BTD);
  return normalised(state, epsilon, saved.x_ND, &saved.mean_N1, &saved.inverse_N1);
}

// Computes the normed input again, which is cheaper than keeping it.
Tensor again(const LayerState& state, double epsilon, const SavedNorm& saved) {
  return normalised(state, epsilon, saved.x_ND, nullptr, nullptr);
}

// Converts the gradient of the normed input to that of x, [N, D], which is undefined unless wanted.
// Saves the gradients of the norm's parameters.
Tensor through_norm(const LayerState& state, SavedNorm& saved, const Tensor& n_gradient_ND,
                    Layer::InputGradient wanted) {
  auto [x_ND, weight_D, bias_D] = at::native_layer_norm_backward(
      n_gradient_ND, saved.x_ND, {saved.x_ND.size(1)}, saved.mean_N1, saved.inverse_N1,
      norm_parameter(state, kNormWeight), norm_parameter(state, kNormBias),
      {wanted == Layer::InputGradient::kWanted, true, true});
  saved.weight_gradient_D = std::move(weight_D);
  saved.bias_gradient_D = std::move(bias_D);
  return x_ND;
}

// Ends the backward pass of a half block.
Tensor through_norm_and_residual(const LayerState& state, SavedNorm& saved,
                                 const Tensor& n_gradient_ND, const Tensor& output_gradient,
                                 Layer::InputGradient wanted) {
  const Tensor x_ND = through_norm(state, saved, n_gradient_ND, wanted);
  if (wanted == Layer::InputGradient::kNotWanted) return {};
  return x_ND.add_(rows(output_gradient)).view(output_gradient.sizes());
}

void add_norm_gradients(LayerState& state, const SavedNorm& saved) {
  state.parameters[kNormWeight].gradient.add_(saved.weight_gradient_D);
  state.parameters[kNormBias].gradient.add_(saved.bias_gradient_D);
}

// Returns x W + bias. W is parameter i, and bias the next one.
Tensor affine(const LayerState& state, std::size_t i, const Tensor& x_NI) {
  return times_transposed(state.parameters[i], x_NI, state.parameters[i + 1]);
}
void add_affine_gradients(LayerState& state, std::size_t i, const Tensor& x_NI,
                          const Tensor& dy_NO) {
  add_product(state.parameters[i], x_NI, dy_NO);
  state.parameters[i + 1].gradient.add_(dy_NO.sum(0));
}

struct SavedAttention : SavedNorm {
  Tensor qkv_N3D;  // from input_gradient on, their gradients; only q and v if keys are shared
  kernels::Attention attention;
  kernels::Selection selection;  // if there is a pattern
  RowsLeft left;                 // if rows have left
  Tensor mask;
  Tensor update_gradient_ND;

  std::vector<Tensor> tensors() const override {
    std::vector<Tensor> all = {qkv_N3D, attention.out_BTHK, attention.log_sum_exp, mask,
                               update_gradient_ND};
    for (Tensor& tensor : selection.tensors()) all.push_back(std::move(tensor));
    return with_norm(std::move(all));
  }
};

class Gpt2Attention final : public HandWritten<SavedAttention>, public TakesPattern {
 public:
  Gpt2Attention(std::string name, Specs specs, const Gpt2Config& config,
                std::shared_ptr<const AttentionPattern> pattern = {})
      : HandWritten(std::move(name), std::move(specs)),
        config_(config),
        pattern_(std::move(pattern)) {}

  std::vector<std::string> figures() const override {
    return pattern_ ? pattern_figures() : std::vector<std::string>();
  }
  std::shared_ptr<const Layer> with(
      std::shared_ptr<const AttentionPattern> pattern) const override {
    Specs specs = parameters();
    if (pattern->shares_keys()) {
      specs[kQkv].shape[1] = specs[kQkv + 1].shape[0] = 2 * config_.shape.hidden;
      specs[kQkv].units->sections = specs[kQkv + 1].units->sections = 2;
    }
    return std::make_shared<Gpt2Attention>(name(), std::move(specs), config_, std::move(pattern));
  }

 private:
  enum { kQkv = 2, kProjection = 4 };
  bool shares_keys() const { return pattern_ && pattern_->shares_keys(); }

  Output forward(const LayerState& state, const Hidden& input, const LayerContext& context,
                 SavedAttention& saved) const override {
    saved.qkv_N3D = affine(state, kQkv, start(state, config_.norm_epsilon, input.x, saved));
    saved.left = rows_left(input, context);
    const std::int64_t B = saved.left ? 1 : input.x.size(0);
    Output output;
    if (pattern_) {
      saved.selection = select(*pattern_, input, query(saved, B), state, context, output);
      saved.attention = kernels::selected_attention(query(saved, B), key(saved, B),
                                                    value_of(saved, B), saved.selection);
    } else {
      saved.attention =
          attend(state.id, context, query(saved, B), key(saved, B), value_of(saved, B), saved.left);
    }
    const Tensor update_ND = affine(state, kProjection, mixed(saved));
    saved.mask = dropout_mask(update_ND, config_.dropout, state, context, kResidualDropout);
    output.hidden = {
        with_residual(update_ND, saved.mask, config_.dropout, saved.x_ND).view(input.x.sizes()),
        input.rows};
    return output;
  }

  Tensor input_gradient(const LayerState& state, SavedAttention& saved,
                        const Tensor& output_gradient, InputGradient wanted) const override {
    saved.update_gradient_ND = masked(rows(output_gradient), saved.mask, config_.dropout);
    saved.mask.reset();
    const std::int64_t B = saved.left ? 1 : output_gradient.size(0);
    const Tensor q = query(saved, B);
    const Tensor k = key(saved, B);
    const Tensor v = value_of(saved, B);
    const Tensor mixed_gradient_BTHK =
        times(state.parameters[kProjection], saved.update_gradient_ND).view(q.sizes());
    const kernels::AttentionGradient gradient =
        pattern_ ? kernels::selected_attention_gradient(mixed_gradient_BTHK, q, k, v,
                                                        saved.attention, saved.selection)
                 : attend_gradient(mixed_gradient_BTHK, q, k, v, saved.attention, saved.left);
    saved.attention.log_sum_exp.reset();
    saved.selection = {};
    saved.left.reset();
    q.copy_(gradient.q_BTHK);
    if (k.defined()) k.copy_(gradient.k_BTHK);
    v.copy_(gradient.v_BTHK);
    return through_norm_and_residual(state, saved, times(state.parameters[kQkv], saved.qkv_N3D),
                                     output_gradient, wanted);
  }

  void weight_gradient(LayerState& state, SavedAttention& saved) const override {
    add_norm_gradients(state, saved);
    add_affine_gradients(state, kQkv, again(state, config_.norm_epsilon, saved), saved.qkv_N3D);
    add_affine_gradients(state, kProjection, mixed(saved), saved.update_gradient_ND);
  }

  // Returns views of the stash as BTHK. An undefined key is shared with the query.
  [[nodiscard]] Tensor query(const SavedAttention& saved, std::int64_t B) const {
    return part(saved, 0, B);
  }
  [[nodiscard]] Tensor key(const SavedAttention& saved, std::int64_t B) const {
    return shares_keys() ? Tensor() : part(saved, 1, B);
  }
  [[nodiscard]] Tensor value_of(const SavedAttention& saved, std::int64_t B) const {
    return part(saved, shares_keys() ? 1 : 2, B);
  }
  [[nodiscard]] Tensor part(const SavedAttention& saved, std::int64_t i, std::int64_t B) const {
    const std::int64_t parts = shares_keys() ? 2 : 3;
    const std::int64_t heads = saved.qkv_N3D.size(1) / (parts * config_.head_size());
    return saved.qkv_N3D.view({B, saved.qkv_N3D.size(0) / B, parts, heads, config_.head_size()})
        .select(2, i);
  }
  [[nodiscard]] static Tensor mixed(const SavedAttention& saved) {
    const Tensor& out = saved.attention.out_BTHK;
    return out.reshape({out.size(0) * out.size(1), out.size(2) * out.size(3)});
  }

  Gpt2Config config_;
  std::shared_ptr<const AttentionPattern> pattern_;  // null: all pairs
};

struct SavedMlp : SavedNorm {
  Tensor inner_NF;   // input of gelu; from input_gradient on, its gradient
  Tensor active_NF;  // gelu(inner), from input_gradient on
  Tensor mask;
  Tensor update_gradient_ND;

  std::vector<Tensor> tensors() const override {
    return with_norm({inner_NF, active_NF, mask, update_gradient_ND});
  }
};

class Gpt2Mlp final : public HandWritten<SavedMlp> {
 public:
  Gpt2Mlp(std::string name, Specs specs, const Gpt2Config& config)
      : HandWritten(std::move(name), std::move(specs)), config_(config) {}

 private:
  enum { kFc = 2, kProjection = 4 };
  // GPT-2's approximation (Hendrycks and Gimpel, "Gaussian error linear units", 2016, section 2).
  static constexpr const char* kTanh = "tanh";

  Output forward(const LayerState& state, const Hidden& input, const LayerContext& context,
                 SavedMlp& saved) const override {
    saved.inner_NF = affine(state, kFc, start(state, config_.norm_epsilon, input.x, saved));
    const Tensor update_ND = affine(state, kProjection, at::gelu(saved.inner_NF, kTanh));
    saved.mask = dropout_mask(update_ND, config_.dropout, state, context, kResidualDropout);
    return {
        .hidden = {
            with_residual(update_ND, saved.mask, config_.dropout, saved.x_ND).view(input.x.sizes()),
            input.rows}};
  }

  Tensor input_gradient(const LayerState& state, SavedMlp& saved, const Tensor& output_gradient,
                        InputGradient wanted) const override {
    saved.update_gradient_ND = masked(rows(output_gradient), saved.mask, config_.dropout);
    saved.mask.reset();
    saved.active_NF = at::gelu(saved.inner_NF, kTanh);
    saved.inner_NF = at::gelu_backward(
        times(state.parameters[kProjection], saved.update_gradient_ND), saved.inner_NF, kTanh);
    return through_norm_and_residual(state, saved, times(state.parameters[kFc], saved.inner_NF),
                                     output_gradient, wanted);
  }

  void weight_gradient(LayerState& state, SavedMlp& saved) const override {
    add_norm_gradients(state, saved);
    add_affine_gradients(state, kFc, again(state, config_.norm_epsilon, saved), saved.inner_NF);
    add_affine_gradients(state, kProjection, saved.active_NF, saved.update_gradient_ND);
  }

  Gpt2Config config_;
};

struct SavedHead : SavedNorm {
  std::vector<std::int64_t> shape;  // of the input
  SavedLoss loss;

  std::vector<Tensor> tensors() const override { return with_norm({loss.scores_NV}); }
};

class Gpt2Head final : public HandWritten<SavedHead> {
 public:
  Gpt2Head(Specs specs, const Gpt2Config& config)
      : HandWritten("head", std::move(specs)), config_(config) {}
  Needs needs() const override { return {.targets = true, .loss = true}; }

 private:
  enum { kHead = 2 };

  Output forward(const LayerState& state, const Hidden& input, const LayerContext& context,
                 SavedHead& saved) const override {
    saved.shape = input.x.sizes().vec();
    const Tensor n_ND = start(state, config_.norm_epsilon, input.x, saved);
    return {.loss = saved.loss.forward(state.parameters[kHead], n_ND, input, context)};
  }

  Tensor input_gradient(const LayerState& state, SavedHead& saved, const Tensor&,
                        InputGradient wanted) const override {
    const Tensor x_ND =
        through_norm(state, saved, saved.loss.gradient(state.parameters[kHead]), wanted);
    if (wanted == InputGradient::kNotWanted) return {};
    return x_ND.view(saved.shape);
  }

  void weight_gradient(LayerState& state, SavedHead& saved) const override {
    add_norm_gradients(state, saved);
    add_product(state.parameters[kHead], saved.loss.scores_NV,
                again(state, config_.norm_epsilon, saved));
  }

  Gpt2Config config_;
};

// The norm in front of a head in slices. Its gradient arrives in the accumulation type, and is
// rounded once, after the norm.
class LayerNormOfHead {
 public:
  static constexpr std::size_t kParameters = 2;
  struct Kept : SavedNorm {
    std::vector<Tensor> tensors() const override { return with_norm({}); }
  };
  explicit LayerNormOfHead(double epsilon) : epsilon_(epsilon) {}

  Tensor start(const LayerState& state, const Tensor& x_ND, Kept& kept) const {
    return model::start(state, epsilon_, x_ND, kept);
  }
  Tensor again(const LayerState& state, const Kept& kept) const {
    return model::again(state, epsilon_, kept);
  }
  Tensor gradient(const LayerState& state, const Tensor& n_gradient_ND, Kept& kept,
                  Layer::InputGradient wanted) const {
    const at::ScalarType sums = n_gradient_ND.scalar_type();
    auto [x_ND, weight_D, bias_D] = at::native_layer_norm_backward(
        n_gradient_ND, kept.x_ND.to(sums), {kept.x_ND.size(1)}, kept.mean_N1, kept.inverse_N1,
        norm_parameter(state, kNormWeight).to(sums), norm_parameter(state, kNormBias).to(sums),
        {wanted == Layer::InputGradient::kWanted, true, true});
    kept.weight_gradient_D = std::move(weight_D);
    kept.bias_gradient_D = std::move(bias_D);
    return x_ND;
  }
  void add_gradients(LayerState& state, const Kept& kept) const { add_norm_gradients(state, kept); }

 private:
  double epsilon_;
};

}  // namespace

std::shared_ptr<const Layer> gpt2_embedding_layer(Specs specs, const Gpt2Config& config) {
  return std::make_shared<Gpt2Embedding>(std::move(specs), config);
}

std::shared_ptr<const Layer> gpt2_attention_layer(std::string name, Specs specs,
                                                  const Gpt2Config& config) {
  return std::make_shared<Gpt2Attention>(std::move(name), std::move(specs), config);
}

std::shared_ptr<const Layer> gpt2_mlp_layer(std::string name, Specs specs,
                                            const Gpt2Config& config) {
  return std::make_shared<Gpt2Mlp>(std::move(name), std::move(specs), config);
}

void add_gpt2_head(Specs specs, const Gpt2Config& config, Model& model) {
  if (config.shape.head_slices > 1) {
    add_head_slices(specs, LayerNormOfHead(config.norm_epsilon), config.shape, model);
  } else {
    model.push_back(std::make_shared<Gpt2Head>(std::move(specs), config));
  }
}

}  // namespace dynmo::model
