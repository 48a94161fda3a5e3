// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/token_batches.h"

#include <ATen/ATen.h>

#include "dynmo/core/check.h"
#include "dynmo/data/dataset.h"

namespace dynmo::train {

Expected<TokenBatches> TokenBatches::open(const Config& config) {
  if (emulates(config)) return TokenBatches({}, {}, config, 0);
  if (config.data.path.empty()) {
    return make_error(
        ErrorCode::kBadInput,
        "data.path is not set: wanted a folder made by `dynmo data prepare`; use --data FOLDER");
  }
  DYNMO_ASSIGN(const data::Dataset dataset, data::open_dataset(config.data.path));
  const data::SamplerOptions options{.sequence = config.model.sequence,
                                     .vocabulary = dataset.description.vocabulary,
                                     .seed = static_cast<std::uint64_t>(config.train.seed)};
  DYNMO_ASSIGN(data::Sampler training, data::Sampler::make(dataset.train, options));
  std::optional<data::Sampler> validation;
  if (config.train.validation_every > 0) {
    auto made = data::Sampler::make(dataset.validation, options);
    if (!made) {
      return make_error(made.error().code, "{}; or set train.validation_every = 0",
                        made.error().message);
    }
    validation = std::move(made).value();
  }
  return TokenBatches(std::move(training), std::move(validation), config,
                      dataset.description.vocabulary);
}

TokenBatches::TokenBatches(std::optional<data::Sampler> training,
                           std::optional<data::Sampler> validation, const Config& config,
                           std::int64_t vocabulary)
    : training_(std::move(training)),
      validation_(std::move(validation)),
      micro_batches_(step_micro_batches(config)),
      rows_(config.batch.micro_batch_size),
      vocabulary_(vocabulary) {}

runtime::MicroBatch TokenBatches::training(std::int64_t step, MicroBatchId micro_batch) const {
  return training_ ? read(*training_, step, micro_batch) : runtime::MicroBatch{};
}

runtime::MicroBatch TokenBatches::validation(std::int64_t step, MicroBatchId micro_batch) const {
  DYNMO_CHECK(validation_.has_value(), "held-out data");
  return read(*validation_, step, micro_batch);
}

runtime::MicroBatch TokenBatches::read(const data::Sampler& sampler, std::int64_t step,
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
