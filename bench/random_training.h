// SPDX-License-Identifier: Apache-2.0
#pragma once

// The parts of a training on random tokens that programs which time one have in common.

#include <ATen/ATen.h>

#include <cstdint>

#include "dynmo/core/rng.h"
#include "dynmo/model/llama.h"
#include "dynmo/runtime/pipeline.h"

namespace dynmo::bench {

// `rows` sequences of each micro-batch.
inline runtime::PipelineOptions training_options(const model::LlamaConfig& config,
                                                 std::int64_t rows, std::int64_t steps,
                                                 int micro_batches) {
  runtime::PipelineOptions options;
  options.steps = steps;
  options.micro_batches = micro_batches;
  options.boundary_shape = {rows, config.shape.sequence, config.shape.hidden};
  options.learning_rate.total_steps = steps;
  return options;
}

inline runtime::MicroBatch random_batch(const model::LlamaConfig& config, std::int64_t rows,
                                        std::uint64_t seed, std::int64_t step, MicroBatchId id) {
  Rng rng(mix_key({seed, static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(id.value)}));
  at::Tensor tokens = at::empty({rows, config.shape.sequence + 1}, at::kLong);
  auto* const data = tokens.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < tokens.numel(); ++i) {
    data[i] =
        static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(config.shape.vocabulary)));
  }
  return {tokens.narrow(1, 0, config.shape.sequence).contiguous(),
          tokens.narrow(1, 1, config.shape.sequence).contiguous()};
}

}  // namespace dynmo::bench
