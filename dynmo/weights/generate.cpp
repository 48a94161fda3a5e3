// SPDX-License-Identifier: Apache-2.0
#include "dynmo/weights/generate.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "dynmo/core/rng.h"
#include "dynmo/model/key_value_cache.h"

namespace dynmo::weights {
namespace {

// Returns the scores before softmax, [rows, vocabulary], of the last token or of all. `tokens`
// follow those in the cache; without a cache they are all tokens. They are at most the model's
// longest input.
enum class Scored { kLast, kAll };
at::Tensor scores_of(const TrainedModel& model, std::span<const std::int64_t> tokens,
                     model::KeyValueCache* cache, Scored scored) {
  const auto length = static_cast<std::int64_t>(tokens.size());
  const std::int64_t first = scored == Scored::kLast ? length - 1 : 0;
  model::LayerContext context;
  context.pass = model::Pass::kGeneration;
  context.tokens_BT = at::empty({1, length}, at::kLong);
  context.cache = cache;
  context.sequences = 1;
  context.sequence_length = length;
  std::ranges::copy(tokens, context.tokens_BT.data_ptr<std::int64_t>());
  at::Tensor scores_NV;  // set if some tokens have left before the head
  const auto take = [&](const at::Tensor& rows, const at::Tensor& given) {
    if (!scores_NV.defined()) {
      scores_NV = at::empty({length - first, given.size(1)}, given.options());
    }
    const at::Tensor places = rows.to(at::kLong).sub(first);
    const at::Tensor wanted = places.ge(0);
    scores_NV.index_copy_(0, places.masked_select(wanted),
                          given.index_select(0, wanted.nonzero().flatten()));
  };
  model::Hidden hidden;
  for (std::size_t i = 0; i + 1 < model.layers.size(); ++i) {
    model::Output output = model.layers[i]->forward(model.states[i], hidden, context, nullptr);
    hidden = std::move(output.hidden);
    if (output.left_rows.defined()) take(output.left_rows, output.left_scores);
    // If the last token has left, the head need not run.
    const bool gone = hidden.rows.defined() &&
                      (hidden.rows.numel() == 0 ||
                       hidden.rows[hidden.rows.numel() - 1].item<std::int32_t>() < length - 1);
    if (scored == Scored::kLast && gone) return scores_NV;
  }
  if (cache != nullptr) cache->advance(length);
  at::Tensor x_BTD = hidden.rows.defined() ? hidden.x.unsqueeze(0) : hidden.x;
  if (scored == Scored::kLast) x_BTD = x_BTD.narrow(1, x_BTD.size(1) - 1, 1);
  const at::Tensor last_NV = model::logits(model.config, model.states.back(), x_BTD).squeeze(0);
  if (!hidden.rows.defined() || scored == Scored::kLast) return last_NV;
  take(hidden.rows, last_NV);
  return scores_NV;
}

// Reads a growing text. While the model's input has room, each token is read once. If attention
// takes no cache, the whole text is read for every token.
class Reader {
 public:
  explicit Reader(const TrainedModel& model)
      : model_(model), longest_(model::shape_of(model.config).sequence), cache_(longest_) {}

  // Returns the next token's scores, [vocabulary], in fp64. `tokens` begin with those of the last
  // call.
  std::vector<double> scores_of(std::span<const std::int64_t> tokens) {
    const std::int64_t size = std::ssize(tokens);
    if (size - first_ > longest_) {
      first_ = size - (started_ ? (longest_ + 1) / 2 : longest_);
      cache_.clear();
    }
    started_ = true;
    const auto read = static_cast<std::size_t>(first_ + cache_.tokens());
    const bool whole = model_.sparse_attention || model_.early_exit;
    const at::Tensor last_V =
        weights::scores_of(model_, tokens.subspan(read), whole ? nullptr : &cache_, Scored::kLast)
            .flatten()
            .to(at::kDouble);
    return {last_V.data_ptr<double>(), last_V.data_ptr<double>() + last_V.numel()};
  }

 private:
  const TrainedModel& model_;
  const std::int64_t longest_;
  bool started_ = false;
  std::int64_t first_ = 0;  // first token of the text that the model still reads
  model::KeyValueCache cache_;
};

// Returns the token with the highest score, the lowest one among equals.
std::int64_t likeliest(const std::vector<double>& scores) {
  return std::max_element(scores.begin(), scores.end()) - scores.begin();
}

std::int64_t draw(const std::vector<double>& scores, const Sampling& sampling, Rng& rng) {
  const double highest = *std::max_element(scores.begin(), scores.end());
  std::vector<std::size_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
  std::vector<double> weights;
  for (const std::size_t token : order) {
    weights.push_back(std::exp((scores[token] - highest) / sampling.temperature));
  }
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::size_t kept = 0;
  double sum = 0;
  while (kept < weights.size() && (kept == 0 || sum < sampling.top_p * all)) sum += weights[kept++];
  double left = rng.uniform() * sum;
  std::size_t chosen = 0;
  while (chosen + 1 < kept && left >= weights[chosen]) left -= weights[chosen++];
  return static_cast<std::int64_t>(order[chosen]);
}

Expected<void> check_tokens(const TrainedModel& model, const std::vector<std::int64_t>& tokens) {
  if (tokens.empty()) {
    return make_error(ErrorCode::kBadInput, "the prompt is empty, wanted at least one token");
  }
  const std::int64_t vocabulary = model::shape_of(model.config).vocabulary;
  for (const std::int64_t token : tokens) {
    if (token >= 0 && token < vocabulary) continue;
    return make_error(ErrorCode::kBadInput, "the prompt has token {}, wanted 0 to {}", token,
                      vocabulary - 1);
  }
  return {};
}

Expected<void> check_sampling(const Sampling& sampling) {
  constexpr std::int64_t kMaxTokens = std::int64_t{1} << 24;
  if (sampling.tokens < 0 || sampling.tokens > kMaxTokens) {
    return make_error(ErrorCode::kBadInput, "{} tokens to make, wanted 0 to {}", sampling.tokens,
                      kMaxTokens);
  }
  if (!(std::isfinite(sampling.temperature) && sampling.temperature >= 0)) {
    return make_error(ErrorCode::kBadInput, "a temperature of {}, wanted 0 or more",
                      sampling.temperature);
  }
  if (!(sampling.top_p > 0 && sampling.top_p <= 1)) {
    return make_error(ErrorCode::kBadInput, "a top-p of {}, wanted above 0 and at most 1",
                      sampling.top_p);
  }
  return {};
}

}  // namespace

Expected<at::Tensor> logits(const TrainedModel& model, const std::vector<std::int64_t>& tokens) {
  DYNMO_TRY(check_tokens(model, tokens));
  const std::int64_t longest = model::shape_of(model.config).sequence;
  if (std::ssize(tokens) > longest) {
    return make_error(ErrorCode::kBadInput, "{} tokens, wanted at most the model's {}",
                      tokens.size(), longest);
  }
  return scores_of(model, tokens, nullptr, Scored::kAll);
}

Expected<std::string> check_generation(const TrainedModel& model,
                                       const std::vector<std::int64_t>& prompt,
                                       const Sampling& sampling) {
  DYNMO_TRY(check_tokens(model, prompt));
  DYNMO_TRY(check_sampling(sampling));
  if (model.experts_choose) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' was trained with moe.router = \"expert_choice\", whose experts choose "
                      "among tokens that are not there yet: wanted a router by which tokens choose",
                      model.checkpoint.string());
  }
  const std::int64_t longest = model::shape_of(model.config).sequence;
  // The last token follows from those before it, and is not read.
  if (std::ssize(prompt) + sampling.tokens - 1 <= longest) return std::string();
  return fmt::format(
      "the model reads at most {} tokens; the prompt has {}, and up to {} are made: when its input "
      "is full, the older half is forgotten",
      longest, prompt.size(), sampling.tokens);
}

Expected<std::vector<std::int64_t>> generate(const TrainedModel& model,
                                             std::vector<std::int64_t> prompt,
                                             const Sampling& sampling,
                                             const std::function<void(std::int64_t)>& made) {
  DYNMO_TRY(check_generation(model, prompt, sampling));
  Rng rng(mix_key({sampling.seed, 0x67656e}));
  Reader reader(model);
  std::vector<std::int64_t> result;
  for (std::int64_t i = 0; i < sampling.tokens; ++i) {
    const std::vector<double> scores = reader.scores_of(prompt);
    const std::int64_t token =
        sampling.temperature == 0 ? likeliest(scores) : draw(scores, sampling, rng);
    if (token == sampling.end) break;
    prompt.push_back(token);
    result.push_back(token);
    if (made) made(token);
  }
  return result;
}

}  // namespace dynmo::weights
