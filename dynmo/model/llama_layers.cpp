// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <utility>

#include "dynmo/model/hand_written_impl.h"
#include "dynmo/model/llama_impl.h"

namespace dynmo::model {
namespace {

using at::Tensor;

constexpr std::uint64_t kResidualDropout = 1;

struct EmbeddingKept : Kept {
  Tensor tokens_BT;
  Tensor gradient;  // of the output
};

class Embedding final : public HandWritten<EmbeddingKept> {
 public:
  explicit Embedding(Specs specs) : HandWritten("embedding", std::move(specs)) {}

 private:
  Tensor run(const LayerState& state, const Tensor&, const LayerContext& context,
             EmbeddingKept& kept) const override {
    kept.tokens_BT = context.tokens_BT;
    return at::embedding(value(state, 0), context.tokens_BT);
  }
  Tensor differentiate(const LayerState&, EmbeddingKept& kept, const Tensor& output_gradient,
                       InputGradient) const override {
    kept.gradient = output_gradient;
    return {};
  }
  void accumulate(LayerState& state, EmbeddingKept& kept) const override {
    add_rows(state.parameters[0].gradient, kept.tokens_BT, kept.gradient);
  }
};

// How a half block x + f(rms_norm(x)) ends its backward pass: from the gradient of the normed input
// to that of x, undefined unless wanted. Keeps the norm's weight gradient.
template <typename T>
Tensor through_norm_and_residual(T& kept, const Tensor& n_gradient_ND, const Tensor& norm_weight_D,
                                 const Tensor& output_gradient, Layer::InputGradient wanted) {
  NormGradient norm = norm_gradient(n_gradient_ND, kept.x_ND, kept.inverse_N1, norm_weight_D,
                                    wanted, rows(output_gradient));
  kept.norm_gradient_D = std::move(norm.weight_D);
  if (wanted == Layer::InputGradient::kNotWanted) return {};
  return norm.x_ND.view(output_gradient.sizes());
}

struct AttentionKept : Kept {
  Tensor x_ND;
  Tensor inverse_N1;
  Attention attention;
  Tensor q_BTHK, k_BTHK, v_BTHK;  // turned q and k; from input_gradient on, gradients of the
                                  // three products
  Tensor mask;
  Tensor update_gradient_ND;
  Tensor norm_gradient_D;
};

class AttentionLayer final : public HandWritten<AttentionKept> {
 public:
  AttentionLayer(std::string name, Specs specs, const LlamaConfig& config, RotaryTable table)
      : HandWritten(std::move(name), std::move(specs)), config_(config), table_(std::move(table)) {}

 private:
  enum { kNorm, kQ, kK, kV, kO };

  Tensor run(const LayerState& state, const Tensor& x_BTD, const LayerContext& context,
             AttentionKept& kept) const override {
    const auto heads = [&](const Tensor& n_ND, std::size_t matrix, std::int64_t count) {
      return at::linear(n_ND, value(state, matrix))
          .view({x_BTD.size(0), x_BTD.size(1), count, config_.head_size()});
    };
    kept.x_ND = rows(x_BTD);
    kept.inverse_N1 = inverse_rms(kept.x_ND, config_.rms_epsilon);
    const Tensor n_ND = normed(kept.x_ND, kept.inverse_N1, value(state, kNorm));
    kept.q_BTHK = heads(n_ND, kQ, config_.heads);
    kept.k_BTHK = heads(n_ND, kK, config_.kv_heads);
    kept.v_BTHK = heads(n_ND, kV, config_.kv_heads);
    rotate(kept.q_BTHK, table_, Turn::kForward);
    rotate(kept.k_BTHK, table_, Turn::kForward);
    kept.attention = causal_attention(kept.q_BTHK, kept.k_BTHK, kept.v_BTHK);
    const Tensor update_ND = at::linear(mixed(kept), value(state, kO));
    kept.mask = dropout_mask(update_ND, config_.dropout, state, context, kResidualDropout);
    return with_residual(update_ND, kept.mask, config_.dropout, kept.x_ND).view(x_BTD.sizes());
  }

  Tensor differentiate(const LayerState& state, AttentionKept& kept, const Tensor& output_gradient,
                       InputGradient wanted) const override {
    const Tensor dy_ND = rows(output_gradient);
    kept.update_gradient_ND = masked(dy_ND, kept.mask, config_.dropout);
    kept.mask.reset();
    const Tensor mixed_gradient_BTHK =
        at::mm(kept.update_gradient_ND, value(state, kO)).view(kept.q_BTHK.sizes());
    AttentionGradient gradient = causal_attention_gradient(
        mixed_gradient_BTHK, kept.q_BTHK, kept.k_BTHK, kept.v_BTHK, kept.attention);
    kept.attention.log_sum_exp.reset();
    rotate(gradient.q_BTHK, table_, Turn::kBack);
    rotate(gradient.k_BTHK, table_, Turn::kBack);
    kept.q_BTHK = std::move(gradient.q_BTHK);
    kept.k_BTHK = std::move(gradient.k_BTHK);
    kept.v_BTHK = std::move(gradient.v_BTHK);
    Tensor n_gradient_ND = at::mm(flat(kept.q_BTHK), value(state, kQ));
    n_gradient_ND.addmm_(flat(kept.k_BTHK), value(state, kK));
    n_gradient_ND.addmm_(flat(kept.v_BTHK), value(state, kV));
    return through_norm_and_residual(kept, n_gradient_ND, value(state, kNorm), output_gradient,
                                     wanted);
  }

  void accumulate(LayerState& state, AttentionKept& kept) const override {
    const Tensor n_ND = normed(kept.x_ND, kept.inverse_N1, value(state, kNorm));
    std::vector<Parameter>& p = state.parameters;
    p[kNorm].gradient.add_(kept.norm_gradient_D);
    add_product(p[kQ], flat(kept.q_BTHK), n_ND);
    add_product(p[kK], flat(kept.k_BTHK), n_ND);
    add_product(p[kV], flat(kept.v_BTHK), n_ND);
    add_product(p[kO], kept.update_gradient_ND, mixed(kept));
  }

  static Tensor flat(const Tensor& x_BTHK) {
    return x_BTHK.view({x_BTHK.size(0) * x_BTHK.size(1), -1});
  }
  static Tensor mixed(const AttentionKept& kept) {
    const Tensor& out = kept.attention.out_BTHK;
    return out.reshape({out.size(0) * out.size(1), -1});
  }

  LlamaConfig config_;
  RotaryTable table_;
};

struct MlpKept : Kept {
  Tensor x_ND;
  Tensor inverse_N1;
  Tensor gate_NF, up_NF;  // from input_gradient on, their gradients
  Tensor product_NF;      // silu(gate) * up, from input_gradient on
  Tensor mask;
  Tensor update_gradient_ND;
  Tensor norm_gradient_D;
};

class MlpLayer final : public HandWritten<MlpKept> {
 public:
  MlpLayer(std::string name, Specs specs, const LlamaConfig& config)
      : HandWritten(std::move(name), std::move(specs)), config_(config) {}

 private:
  enum { kNorm, kGate, kUp, kDown };

  Tensor run(const LayerState& state, const Tensor& x_BTD, const LayerContext& context,
             MlpKept& kept) const override {
    kept.x_ND = rows(x_BTD);
    kept.inverse_N1 = inverse_rms(kept.x_ND, config_.rms_epsilon);
    const Tensor n_ND = normed(kept.x_ND, kept.inverse_N1, value(state, kNorm));
    kept.gate_NF = at::linear(n_ND, value(state, kGate));
    kept.up_NF = at::linear(n_ND, value(state, kUp));
    const Tensor update_ND = at::linear(silu_times(kept.gate_NF, kept.up_NF), value(state, kDown));
    kept.mask = dropout_mask(update_ND, config_.dropout, state, context, kResidualDropout);
    return with_residual(update_ND, kept.mask, config_.dropout, kept.x_ND).view(x_BTD.sizes());
  }

  Tensor differentiate(const LayerState& state, MlpKept& kept, const Tensor& output_gradient,
                       InputGradient wanted) const override {
    const Tensor dy_ND = rows(output_gradient);
    kept.update_gradient_ND = masked(dy_ND, kept.mask, config_.dropout);
    kept.mask.reset();
    kept.product_NF = at::mm(kept.update_gradient_ND, value(state, kDown));
    silu_times_gradient(kept.gate_NF, kept.up_NF, kept.product_NF);
    Tensor n_gradient_ND = at::mm(kept.gate_NF, value(state, kGate));
    n_gradient_ND.addmm_(kept.up_NF, value(state, kUp));
    return through_norm_and_residual(kept, n_gradient_ND, value(state, kNorm), output_gradient,
                                     wanted);
  }

  void accumulate(LayerState& state, MlpKept& kept) const override {
    const Tensor n_ND = normed(kept.x_ND, kept.inverse_N1, value(state, kNorm));
    std::vector<Parameter>& p = state.parameters;
    p[kNorm].gradient.add_(kept.norm_gradient_D);
    add_product(p[kGate], kept.gate_NF, n_ND);
    add_product(p[kUp], kept.up_NF, n_ND);
    add_product(p[kDown], kept.update_gradient_ND, kept.product_NF);
  }

  LlamaConfig config_;
};

struct HeadKept : Kept {
  std::vector<std::int64_t> shape;  // of the input
  Tensor x_ND;
  Tensor inverse_N1;
  LossKept loss;
  Tensor norm_gradient_D;
};

class HeadLayer final : public HandWritten<HeadKept> {
 public:
  HeadLayer(Specs specs, const LlamaConfig& config)
      : HandWritten("head", std::move(specs)), config_(config) {}

 private:
  enum { kNorm, kHead };

  Tensor run(const LayerState& state, const Tensor& x_BTD, const LayerContext& context,
             HeadKept& kept) const override {
    kept.shape = x_BTD.sizes().vec();
    kept.x_ND = rows(x_BTD);
    kept.inverse_N1 = inverse_rms(kept.x_ND, config_.rms_epsilon);
    const Tensor n_ND = normed(kept.x_ND, kept.inverse_N1, value(state, kNorm));
    return kept.loss.start(n_ND, value(state, kHead), context);
  }

  Tensor differentiate(const LayerState& state, HeadKept& kept, const Tensor& output_gradient,
                       InputGradient wanted) const override {
    const Tensor n_gradient_ND = kept.loss.differentiate(value(state, kHead), output_gradient);
    NormGradient norm =
        norm_gradient(n_gradient_ND, kept.x_ND, kept.inverse_N1, value(state, kNorm), wanted);
    kept.norm_gradient_D = std::move(norm.weight_D);
    if (wanted == InputGradient::kNotWanted) return {};
    return norm.x_ND.to(kept.x_ND.scalar_type()).view(kept.shape);
  }

  void accumulate(LayerState& state, HeadKept& kept) const override {
    const Tensor n_ND = normed(kept.x_ND, kept.inverse_N1, value(state, kNorm));
    state.parameters[kNorm].gradient.add_(kept.norm_gradient_D);
    add_product(state.parameters[kHead], kept.loss.scores_NV, n_ND);
  }

  LlamaConfig config_;
};

}  // namespace

std::shared_ptr<const Layer> embedding_layer(Specs specs) {
  return std::make_shared<Embedding>(std::move(specs));
}

std::shared_ptr<const Layer> attention_layer(std::string name, Specs specs,
                                             const LlamaConfig& config, const RotaryTable& table) {
  return std::make_shared<AttentionLayer>(std::move(name), std::move(specs), config, table);
}

std::shared_ptr<const Layer> mlp_layer(std::string name, Specs specs, const LlamaConfig& config) {
  return std::make_shared<MlpLayer>(std::move(name), std::move(specs), config);
}

std::shared_ptr<const Layer> head_layer(Specs specs, const LlamaConfig& config) {
  return std::make_shared<HeadLayer>(std::move(specs), config);
}

}  // namespace dynmo::model
