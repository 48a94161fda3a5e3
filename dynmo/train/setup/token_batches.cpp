// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/token_batches.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "dynmo/core/check.h"
#include "dynmo/data/dataset.h"
#include "dynmo/data/token_shards.h"

namespace dynmo::train {

namespace {

// The tokens of a folder or of shards.
struct Tokens {
  data::TokenShards training;
  std::optional<data::TokenShards> validation;
  std::int32_t vocabulary = 0;
  DataIdentity identity = {};
};

Expected<Tokens> open_prepared(const config::Config::Data& config, const std::string& path) {
  DYNMO_ASSIGN(const data::Dataset dataset, data::open_dataset(path));
  const std::int32_t vocabulary = dataset.description.vocabulary;
  if (config.vocabulary != 0 && config.vocabulary != vocabulary) {
    return make_error(ErrorCode::kBadInput,
                      "data.vocabulary is {}, but '{}' was prepared with {}: leave it out",
                      config.vocabulary, path, vocabulary);
  }
  if (!config.validation_path.empty()) {
    return make_error(ErrorCode::kBadInput,
                      "data.validation_path is '{}', but '{}' has held-out documents of its own: "
                      "leave it out",
                      config.validation_path, path);
  }
  return Tokens{dataset.train,
                dataset.validation,
                vocabulary,
                {.tokenizer = data::tokenizer_name(dataset.description),
                 .digest = dataset.description.train.bin.hex()}};
}

// Opens shards without a description.
Expected<Tokens> open_shards(const config::Config& config) {
  DYNMO_ASSIGN(data::TokenShards training, data::TokenShards::open(config.data.path));
  if (config.data.vocabulary == 0) {
    return make_error(
        ErrorCode::kBadInput,
        "data.vocabulary is not set, and the token shards '{}' do not tell: give that "
        "of their tokenizer",
        config.data.path);
  }
  Tokens tokens{std::move(training), {}, static_cast<std::int32_t>(config.data.vocabulary)};
  tokens.identity.digest = fmt::format("{} tokens", tokens.training.tokens());
  if (config.train.validation_every == 0) return tokens;
  if (config.data.validation_path.empty()) {
    return make_error(
        ErrorCode::kBadInput,
        "data.validation_path is not set, and the token shards '{}' hold nothing out: "
        "give it, or set train.validation_every = 0",
        config.data.path);
  }
  DYNMO_ASSIGN(tokens.validation, data::TokenShards::open(config.data.validation_path));
  return tokens;
}

Expected<Tokens> open_tokens(const config::Config& config) {
  if (config.data.path.empty()) {
    return make_error(
        ErrorCode::kBadInput,
        "data.path is not set: wanted a folder made by `dynmo data prepare`, or token shards");
  }
  std::error_code fault;
  const std::filesystem::path path = config.data.path;
  const bool shards = std::filesystem::exists(path.string() + ".idx", fault) ||
                      path.extension() == ".idx" || path.extension() == ".bin" ||
                      (std::filesystem::is_directory(path, fault) &&
                       !std::filesystem::exists(path / data::kDescriptionFile, fault) &&
                       config.data.vocabulary != 0);
  if (shards) return open_shards(config);
  if (std::filesystem::exists(path / data::kDescriptionFile, fault)) {
    return open_prepared(config.data, config.data.path);
  }
  return make_error(
      ErrorCode::kBadInput,
      "data.path is '{}', which {}: wanted a folder made by `dynmo data prepare`, or "
      "token shards and their data.vocabulary",
      config.data.path,
      std::filesystem::exists(path, fault) ? "has no dataset.json" : "does not exist");
}

// The sets of a run: data.path, or all of data.blend.
struct Sets {
  std::vector<Tokens> tokens;
  std::vector<std::int64_t> weights;
  std::string name;  // for the user
};

Expected<Sets> open_sets(const config::Config& config) {
  Sets sets;
  if (config.data.blend.empty()) {
    DYNMO_ASSIGN(Tokens tokens, open_tokens(config));
    sets.tokens.push_back(std::move(tokens));
    sets.weights.push_back(1);
    sets.name = config.data.path;
    return sets;
  }
  if (!config.data.path.empty()) {
    return make_error(ErrorCode::kBadInput,
                      "data.path is '{}' with a data.blend, which does not use it: wanted one of "
                      "them",
                      config.data.path);
  }
  DYNMO_ASSIGN(const auto parts, data::parse_blend(config.data.blend));
  for (const data::BlendPart& part : parts) {
    auto tokens = open_prepared(config.data, part.path);
    if (!tokens) {
      return make_error(tokens.error().code, "data.blend: {}", tokens.error().message);
    }
    if (!sets.tokens.empty() &&
        tokens->identity.tokenizer != sets.tokens.front().identity.tokenizer) {
      return make_error(ErrorCode::kBadInput,
                        "data.blend: '{}' has the tokenizer {}, '{}' {}: prepare both with one",
                        part.path, tokens->identity.tokenizer, parts.front().path,
                        sets.tokens.front().identity.tokenizer);
    }
    sets.tokens.push_back(*std::move(tokens));
    sets.weights.push_back(part.weight);
  }
  sets.name = "data.blend";
  return sets;
}

Expected<data::BlendedSampler> blended(const config::Config& config, const Sets& sets,
                                       bool validation) {
  std::vector<data::Sampler> samplers;
  for (std::size_t k = 0; k < sets.tokens.size(); ++k) {
    const Tokens& tokens = sets.tokens[k];
    const data::SamplerOptions options{
        .sequence = config.model.shape.sequence,
        .vocabulary = tokens.vocabulary,
        .seed = data::seed_of_set(static_cast<std::uint64_t>(config.train.seed), k)};
    DYNMO_ASSIGN(data::Sampler sampler,
                 data::Sampler::make(validation ? *tokens.validation : tokens.training, options));
    samplers.push_back(std::move(sampler));
  }
  return data::BlendedSampler(std::move(samplers), data::Blend(sets.weights));
}

DataIdentity identity_of(const Sets& sets) {
  DataIdentity identity = sets.tokens.front().identity;
  if (sets.tokens.size() == 1) return identity;
  std::string text;
  for (std::size_t k = 0; k < sets.tokens.size(); ++k) {
    text += fmt::format("{} {} ", sets.weights[k], sets.tokens[k].identity.digest);
  }
  identity.digest = digest_of(text).hex();
  return identity;
}

}  // namespace

Expected<TokenBatches> TokenBatches::open(const config::Config& config) {
  if (emulates(config)) return TokenBatches({}, {}, config, 0);
  DYNMO_ASSIGN(const Sets sets, open_sets(config));
  DYNMO_ASSIGN(data::BlendedSampler training, blended(config, sets, /*validation=*/false));
  std::optional<data::BlendedSampler> validation;
  const bool asked = config.train.validation_every > 0;
  std::int64_t held_out = std::numeric_limits<std::int64_t>::max();  // of the smallest set
  for (const Tokens& tokens : sets.tokens) {
    if (tokens.validation) held_out = std::min(held_out, tokens.validation->tokens());
  }
  const bool enough = asked && held_out > config.model.shape.sequence;
  if (enough || (asked && !config.data.validation_path.empty())) {
    DYNMO_ASSIGN(validation, blended(config, sets, /*validation=*/true));
  }
  TokenBatches batches(std::move(training), std::move(validation), config,
                       sets.tokens.front().vocabulary);
  batches.identity_ = identity_of(sets);
  if (asked && !batches.validates()) {
    batches.note_ = fmt::format(
        "no validation: '{}' holds out {} tokens, a sequence takes {}; prepare more text, or hold "
        "more of it out",
        sets.name, held_out, config.model.shape.sequence + 1);
  }
  return batches;
}

TokenBatches::TokenBatches(std::optional<data::BlendedSampler> training,
                           std::optional<data::BlendedSampler> validation,
                           const config::Config& config, std::int64_t vocabulary)
    : training_(std::move(training)),
      validation_(std::move(validation)),
      micro_batches_(step_micro_batches(config)),
      rows_(config.batch.micro_batch_size),
      vocabulary_(vocabulary) {}

std::string TokenBatches::fingerprint() const {
  if (!training_) return "";
  std::string text = training_->fingerprint().hex();
  if (validation_) text += validation_->fingerprint().hex();
  return digest_of(text).hex();
}

runtime::MicroBatch TokenBatches::training(std::int64_t step, MicroBatchId micro_batch) const {
  return training_ ? read(*training_, step, micro_batch) : runtime::MicroBatch{};
}

runtime::MicroBatch TokenBatches::validation(std::int64_t step, MicroBatchId micro_batch) const {
  DYNMO_CHECK(validation_.has_value(), "held-out data");
  return read(*validation_, step, micro_batch);
}

runtime::MicroBatch TokenBatches::read(const data::BlendedSampler& sampler, std::int64_t step,
                                       MicroBatchId id) const {
  const std::int64_t length = sampler.sequence() + 1;
  at::Tensor tokens = at::empty({rows_, length}, at::kLong);
  const std::int64_t first = (step * micro_batches_ + id.value) * rows_;
  for (std::int64_t row = 0; row < rows_; ++row) {
    sampler.sample(first + row, std::span(tokens.data_ptr<std::int64_t>() + row * length,
                                          static_cast<std::size_t>(length)));
  }
  return {tokens.narrow(1, 0, length - 1).contiguous(),
          tokens.narrow(1, 1, length - 1).contiguous()};
}

}  // namespace dynmo::train
