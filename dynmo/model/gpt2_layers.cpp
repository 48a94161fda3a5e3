// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <utility>

#include "dynmo/model/gpt2_impl.h"
#include "dynmo/model/hand_written_impl.h"
#include "dynmo/model/operations.h"

namespace dynmo::model {
namespace {

using at::Tensor;

constexpr std::uint64_t kResidualDropout = 1;
constexpr std::uint64_t kEmbeddingDropout = 2;

struct EmbeddingKept : Kept {
  Tensor tokens_BT;
  Tensor mask;
  Tensor gradient_BTD;  // of the sum of the two vectors
};

class Gpt2Embedding final : public HandWritten<EmbeddingKept> {
 public:
  Gpt2Embedding(Specs specs, const Gpt2Config& config)
      : HandWritten("embedding", std::move(specs)), config_(config) {}

 private:
  enum { kTokens, kPositions };

  Tensor run(const LayerState& state, const Tensor&, const LayerContext& context,
             EmbeddingKept& kept) const override {
    const std::int64_t T = context.tokens_BT.size(1);
    DYNMO_CHECK(T <= config_.positions, "at most {} tokens, got {}", config_.positions, T);
    kept.tokens_BT = context.tokens_BT;
    const Tensor sum_BTD = at::embedding(value(state, kTokens), context.tokens_BT)
                               .add_(value(state, kPositions).narrow(0, 0, T));
    kept.mask = dropout_mask(sum_BTD, config_.dropout, state, context, kEmbeddingDropout);
    return masked(sum_BTD, kept.mask, config_.dropout);
  }
  Tensor differentiate(const LayerState&, EmbeddingKept& kept, const Tensor& output_gradient,
                       InputGradient) const override {
    kept.gradient_BTD = masked(output_gradient, kept.mask, config_.dropout);
    kept.mask.reset();
    return {};
  }
  void accumulate(LayerState& state, EmbeddingKept& kept) const override {
    add_rows(state.parameters[kTokens].gradient, kept.tokens_BT, kept.gradient_BTD);
    state.parameters[kPositions]
        .gradient.narrow(0, 0, kept.gradient_BTD.size(1))
        .add_(kept.gradient_BTD.sum(0));
  }

  Gpt2Config config_;
};

// Layer normalization (Ba et al., 2016) of x: what its gradient needs, in every stash below.
struct NormKept : Kept {
  Tensor x_ND;
  Tensor mean_N1;
  Tensor inverse_N1;                          // 1 / standard deviation
  Tensor weight_gradient_D, bias_gradient_D;  // from input_gradient on
};

// The first two parameters of every layer with a norm.
enum { kNormWeight, kNormBias };

// Weight or bias of the norm. On the CPU libtorch keeps the statistics in the type of these; on
// CUDA it wants these in that of x, and keeps the statistics in fp32 by itself.
Tensor norm_parameter(const LayerState& state, std::size_t i) {
  const Tensor& parameter = value(state, i);
  return parameter.is_cpu() ? parameter.to(statistics_type(parameter.scalar_type())) : parameter;
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
Tensor start(const LayerState& state, double epsilon, const Tensor& x_BTD, NormKept& kept) {
  kept.x_ND = rows(x_BTD);
  return normalised(state, epsilon, kept.x_ND, &kept.mean_N1, &kept.inverse_N1);
}

// The normed input once more: cheaper to compute than to keep.
Tensor again(const LayerState& state, double epsilon, const NormKept& kept) {
  return normalised(state, epsilon, kept.x_ND, nullptr, nullptr);
}

// From the gradient of the normed input to that of x, [N, D]; undefined unless wanted. Keeps those
// of the norm's parameters.
Tensor through_norm(const LayerState& state, NormKept& kept, const Tensor& n_gradient_ND,
                    Layer::InputGradient wanted) {
  auto [x_ND, weight_D, bias_D] = at::native_layer_norm_backward(
      n_gradient_ND, kept.x_ND, {kept.x_ND.size(1)}, kept.mean_N1, kept.inverse_N1,
      norm_parameter(state, kNormWeight), norm_parameter(state, kNormBias),
      {wanted == Layer::InputGradient::kWanted, true, true});
  kept.weight_gradient_D = std::move(weight_D);
  kept.bias_gradient_D = std::move(bias_D);
  return x_ND;
}

// The end of a half block's backward pass.
Tensor through_norm_and_residual(const LayerState& state, NormKept& kept,
                                 const Tensor& n_gradient_ND, const Tensor& output_gradient,
                                 Layer::InputGradient wanted) {
  const Tensor x_ND = through_norm(state, kept, n_gradient_ND, wanted);
  if (wanted == Layer::InputGradient::kNotWanted) return {};
  return x_ND.add_(rows(output_gradient)).view(output_gradient.sizes());
}

void add_norm_gradients(LayerState& state, const NormKept& kept) {
  state.parameters[kNormWeight].gradient.add_(kept.weight_gradient_D);
  state.parameters[kNormBias].gradient.add_(kept.bias_gradient_D);
}

// y = x W + bias; parameter i is W, the next one bias.
Tensor affine(const LayerState& state, std::size_t i, const Tensor& x_NI) {
  return at::addmm(value(state, i + 1), x_NI, value(state, i));
}
void add_affine_gradients(LayerState& state, std::size_t i, const Tensor& x_NI,
                          const Tensor& dy_NO) {
  add_product(state.parameters[i], x_NI, dy_NO);
  state.parameters[i + 1].gradient.add_(dy_NO.sum(0));
}

struct AttentionKept : NormKept {
  Tensor qkv_N3D;  // from input_gradient on, their gradients
  Attention attention;
  Tensor mask;
  Tensor update_gradient_ND;
};

class Gpt2Attention final : public HandWritten<AttentionKept> {
 public:
  Gpt2Attention(std::string name, Specs specs, const Gpt2Config& config)
      : HandWritten(std::move(name), std::move(specs)), config_(config) {}

 private:
  enum { kQkv = 2, kProjection = 4 };

  Tensor run(const LayerState& state, const Tensor& x_BTD, const LayerContext& context,
             AttentionKept& kept) const override {
    kept.qkv_N3D = affine(state, kQkv, start(state, config_.norm_epsilon, x_BTD, kept));
    const std::int64_t B = x_BTD.size(0);
    kept.attention = causal_attention(part(kept, 0, B), part(kept, 1, B), part(kept, 2, B));
    const Tensor update_ND = affine(state, kProjection, mixed(kept));
    kept.mask = dropout_mask(update_ND, config_.dropout, state, context, kResidualDropout);
    return with_residual(update_ND, kept.mask, config_.dropout, kept.x_ND).view(x_BTD.sizes());
  }

  Tensor differentiate(const LayerState& state, AttentionKept& kept, const Tensor& output_gradient,
                       InputGradient wanted) const override {
    kept.update_gradient_ND = masked(rows(output_gradient), kept.mask, config_.dropout);
    kept.mask.reset();
    const std::int64_t B = output_gradient.size(0);
    const Tensor q = part(kept, 0, B);
    const Tensor k = part(kept, 1, B);
    const Tensor v = part(kept, 2, B);
    const AttentionGradient gradient = causal_attention_gradient(
        at::mm(kept.update_gradient_ND, value(state, kProjection).t()).view(q.sizes()), q, k, v,
        kept.attention);
    kept.attention.log_sum_exp.reset();
    q.copy_(gradient.q_BTHK);
    k.copy_(gradient.k_BTHK);
    v.copy_(gradient.v_BTHK);
    return through_norm_and_residual(state, kept, at::mm(kept.qkv_N3D, value(state, kQkv).t()),
                                     output_gradient, wanted);
  }

  void accumulate(LayerState& state, AttentionKept& kept) const override {
    add_norm_gradients(state, kept);
    add_affine_gradients(state, kQkv, again(state, config_.norm_epsilon, kept), kept.qkv_N3D);
    add_affine_gradients(state, kProjection, mixed(kept), kept.update_gradient_ND);
  }

  // Query (0), key (1) or value (2) of a stash as BTHK: a view.
  [[nodiscard]] Tensor part(const AttentionKept& kept, std::int64_t i, std::int64_t B) const {
    return kept.qkv_N3D.view({B, -1, 3, config_.heads, config_.head_size()}).select(2, i);
  }
  [[nodiscard]] static Tensor mixed(const AttentionKept& kept) {
    const Tensor& out = kept.attention.out_BTHK;
    return out.reshape({out.size(0) * out.size(1), -1});
  }

  Gpt2Config config_;
};

struct MlpKept : NormKept {
  Tensor inner_NF;   // input of gelu; from input_gradient on, its gradient
  Tensor active_NF;  // gelu(inner), from input_gradient on
  Tensor mask;
  Tensor update_gradient_ND;
};

class Gpt2Mlp final : public HandWritten<MlpKept> {
 public:
  Gpt2Mlp(std::string name, Specs specs, const Gpt2Config& config)
      : HandWritten(std::move(name), std::move(specs)), config_(config) {}

 private:
  enum { kFc = 2, kProjection = 4 };
  // GPT-2's approximation (Hendrycks and Gimpel, "Gaussian error linear units", 2016, section 2).
  static constexpr const char* kTanh = "tanh";

  Tensor run(const LayerState& state, const Tensor& x_BTD, const LayerContext& context,
             MlpKept& kept) const override {
    kept.inner_NF = affine(state, kFc, start(state, config_.norm_epsilon, x_BTD, kept));
    const Tensor update_ND = affine(state, kProjection, at::gelu(kept.inner_NF, kTanh));
    kept.mask = dropout_mask(update_ND, config_.dropout, state, context, kResidualDropout);
    return with_residual(update_ND, kept.mask, config_.dropout, kept.x_ND).view(x_BTD.sizes());
  }

  Tensor differentiate(const LayerState& state, MlpKept& kept, const Tensor& output_gradient,
                       InputGradient wanted) const override {
    kept.update_gradient_ND = masked(rows(output_gradient), kept.mask, config_.dropout);
    kept.mask.reset();
    kept.active_NF = at::gelu(kept.inner_NF, kTanh);
    kept.inner_NF = at::gelu_backward(
        at::mm(kept.update_gradient_ND, value(state, kProjection).t()), kept.inner_NF, kTanh);
    return through_norm_and_residual(state, kept, at::mm(kept.inner_NF, value(state, kFc).t()),
                                     output_gradient, wanted);
  }

  void accumulate(LayerState& state, MlpKept& kept) const override {
    add_norm_gradients(state, kept);
    add_affine_gradients(state, kFc, again(state, config_.norm_epsilon, kept), kept.inner_NF);
    add_affine_gradients(state, kProjection, kept.active_NF, kept.update_gradient_ND);
  }

  Gpt2Config config_;
};

struct HeadKept : NormKept {
  std::vector<std::int64_t> shape;  // of the input
  LossKept loss;
};

class Gpt2Head final : public HandWritten<HeadKept> {
 public:
  Gpt2Head(Specs specs, const Gpt2Config& config)
      : HandWritten("head", std::move(specs)), config_(config) {}

 private:
  enum { kHead = 2 };

  Tensor run(const LayerState& state, const Tensor& x_BTD, const LayerContext& context,
             HeadKept& kept) const override {
    kept.shape = x_BTD.sizes().vec();
    const Tensor n_ND = start(state, config_.norm_epsilon, x_BTD, kept);
    return kept.loss.start(n_ND, value(state, kHead), context);
  }

  Tensor differentiate(const LayerState& state, HeadKept& kept, const Tensor& output_gradient,
                       InputGradient wanted) const override {
    const Tensor x_ND = through_norm(
        state, kept, kept.loss.differentiate(value(state, kHead), output_gradient), wanted);
    if (wanted == InputGradient::kNotWanted) return {};
    return x_ND.view(kept.shape);
  }

  void accumulate(LayerState& state, HeadKept& kept) const override {
    add_norm_gradients(state, kept);
    add_product(state.parameters[kHead], kept.loss.scores_NV,
                again(state, config_.norm_epsilon, kept));
  }

  Gpt2Config config_;
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

std::shared_ptr<const Layer> gpt2_head_layer(Specs specs, const Gpt2Config& config) {
  return std::make_shared<Gpt2Head>(std::move(specs), config);
}

}  // namespace dynmo::model
