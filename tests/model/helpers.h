// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/model/gpt2.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/llama.h"

namespace dynmo::model::testing {

// Small, with nothing equal to anything else, so that a mixed-up dimension shows.
inline LlamaConfig tiny_config() {
  LlamaConfig config;
  config.shape.vocabulary = 19;
  config.shape.hidden = 24;
  config.shape.blocks = 2;
  config.shape.heads = 4;
  config.shape.kv_heads = 2;
  config.shape.intermediate = 20;
  config.shape.sequence = 10;
  return config;
}

// The same of the other family; fewer tokens than positions.
inline Gpt2Config tiny_gpt2() {
  Gpt2Config config;
  config.shape.vocabulary = 19;
  config.shape.hidden = 24;
  config.shape.blocks = 2;
  config.shape.heads = 4;
  config.shape.intermediate = 20;
  config.shape.sequence = 10;
  config.shape.positions = 13;
  return config;
}

inline at::Tensor random_tensor(at::IntArrayRef shape, std::uint64_t key,
                                at::ScalarType type = at::kDouble) {
  Rng rng(key);
  at::Tensor tensor = at::empty(shape, at::kDouble);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.data_ptr<double>()[i] = rng.normal();
  return tensor.to(type);
}

inline at::Tensor random_tokens(std::int64_t sequences, std::int64_t tokens,
                                std::int64_t vocabulary, std::uint64_t key) {
  Rng rng(key);
  at::Tensor tensor = at::empty({sequences, tokens}, at::kLong);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.data_ptr<std::int64_t>()[i] =
        static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(vocabulary)));
  }
  return tensor;
}

inline LayerContext random_context(const cost::DecoderShape& shape, std::int64_t sequences,
                                   std::uint64_t key) {
  LayerContext context;
  context.tokens_BT = random_tokens(sequences, shape.sequence, shape.vocabulary, 2 * key);
  context.targets_BT = random_tokens(sequences, shape.sequence, shape.vocabulary, 2 * key + 1);
  return context;
}

// The state in fp64 with parameters far from their initial ones: norms differ from 1, matrices are
// large enough that every path carries a gradient.
inline LayerState double_state(const Layer& layer, LayerId id, std::uint64_t seed) {
  LayerState state = make_state(layer, id, seed);
  for (std::size_t i = 0; i < state.parameters.size(); ++i) {
    Parameter& p = state.parameters[i];
    const at::Tensor noise = random_tensor(p.value.sizes(), mix_key({seed, 77, i}));
    p.value = p.value.to(at::kDouble).add_(noise, 0.3);
    p.gradient = at::zeros_like(p.value);
    p.first_moment = at::zeros_like(p.value);
    p.second_moment = at::zeros_like(p.value);
  }
  return state;
}

inline std::vector<LayerState> make_states(const Model& model, std::uint64_t seed) {
  std::vector<LayerState> states;
  for (std::size_t i = 0; i < model.size(); ++i) {
    states.push_back(make_state(*model[i], LayerId{static_cast<int>(i)}, seed));
  }
  return states;
}

// One micro-batch through all layers; every layer with a stash.
struct Pass {
  at::Tensor loss;
  std::vector<std::unique_ptr<Stash>> stashes;
};
inline Pass forward(const Model& model, const std::vector<LayerState>& states,
                    const LayerContext& context) {
  Pass pass;
  pass.stashes.resize(model.size());
  Hidden hidden;
  for (std::size_t i = 0; i < model.size(); ++i) {
    Output output = model[i]->forward(states[i], hidden, context, &pass.stashes[i]);
    hidden = std::move(output.hidden);
    pass.loss = output.loss;
  }
  return pass;
}
inline void input_gradients(const Model& model, const std::vector<LayerState>& states, Pass& pass) {
  at::Tensor gradient;
  for (std::size_t i = model.size(); i-- > 0;) {
    gradient = model[i]->input_gradient(states[i], *pass.stashes[i], gradient,
                                        Layer::InputGradient::kWanted);
  }
}
inline void weight_gradients(const Model& model, std::vector<LayerState>& states, Pass& pass) {
  for (std::size_t i = 0; i < model.size(); ++i) {
    model[i]->weight_gradient(states[i], *pass.stashes[i]);
  }
}
inline double backward(const Model& model, std::vector<LayerState>& states,
                       const LayerContext& context) {
  Pass pass = forward(model, states, context);
  input_gradients(model, states, pass);
  weight_gradients(model, states, pass);
  return pass.loss.item<double>();
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && at::equal(a, b);
}

// Nothing of operations.h, for formulas that layers are held against.
inline at::Tensor plain_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  return x / (x.pow(2).mean(-1, true) + epsilon).sqrt() * weight;
}

// rotate_half; token t is at position t.
inline at::Tensor plain_rotate(const at::Tensor& x_BHTK, double theta) {
  const std::int64_t K = x_BHTK.size(3);
  const at::Tensor frequency = at::pow(theta, at::arange(0, K, 2, at::kDouble) / -double(K));
  const at::Tensor angle = at::outer(at::arange(x_BHTK.size(2), at::kDouble), frequency);
  const at::Tensor both = at::cat({angle, angle}, 1);
  const auto halves = x_BHTK.chunk(2, -1);
  return x_BHTK * both.cos() + at::cat({-halves[1], halves[0]}, -1) * both.sin();
}

// Returns what an attention layer of the Llama family adds to x, without dropout: explicit mask and
// softmax, repeated key heads. Rows that are `here` (undefined: all) attend among those; the
// others' results are of no use.
inline at::Tensor plain_attention(const LlamaConfig& c, const std::vector<at::Tensor>& p,
                                  const at::Tensor& x, const at::Tensor& here_BT = {}) {
  const std::int64_t B = x.size(0);
  const std::int64_t T = x.size(1);
  const at::Tensor n = plain_norm(x, p[0], c.rms_epsilon);
  // Biases of q, k and v, where there are some, follow the matrices.
  const auto heads = [&](std::size_t i, std::int64_t count) {
    at::Tensor product = n.matmul(p[i].t());
    if (c.qkv_bias) product = product + p[4 + i];
    return product.view({B, T, count, c.head_size()}).transpose(1, 2);
  };
  const std::int64_t group = c.shape.heads / c.shape.kv_heads;
  const at::Tensor q = plain_rotate(heads(1, c.shape.heads), c.rope.theta);
  const at::Tensor k =
      plain_rotate(heads(2, c.shape.kv_heads), c.rope.theta).repeat_interleave(group, 1);
  const at::Tensor v = heads(3, c.shape.kv_heads).repeat_interleave(group, 1);
  at::Tensor hidden = at::ones({T, T}, at::kBool).triu(1);
  if (here_BT.defined()) hidden = hidden.logical_or(here_BT.logical_not().view({B, 1, 1, T}));
  const at::Tensor scores =
      (q.matmul(k.transpose(2, 3)) / std::sqrt(double(c.head_size()))).masked_fill(hidden, -1e30);
  return at::softmax(scores, -1).matmul(v).transpose(1, 2).reshape(x.sizes()).matmul(p[4].t());
}

// The same of an MLP.
inline at::Tensor plain_mlp(const LlamaConfig& c, const std::vector<at::Tensor>& p,
                            const at::Tensor& x) {
  const at::Tensor n = plain_norm(x, p[0], c.rms_epsilon);
  const at::Tensor gate = n.matmul(p[1].t());
  return (gate * gate.sigmoid() * n.matmul(p[2].t())).matmul(p[3].t());
}

// Returns the index of the layer's parameter of that name. Throws where there is none.
inline std::size_t index_of(const Layer& layer, std::string_view name) {
  const auto specs = layer.parameters();
  const auto found = std::ranges::find(specs, name, &ParameterSpec::name);
  DYNMO_CHECK(found != specs.end(), "a parameter {}", name);
  return static_cast<std::size_t>(found - specs.begin());
}

}  // namespace dynmo::model::testing
