// SPDX-License-Identifier: Apache-2.0
#pragma once

// Between the [model] table of a run's config and the decoder it means.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/config/config.h"
#include "dynmo/model/decoder.h"

namespace dynmo::weights {

// The decoder of a valid config for data of `vocabulary` tokens, unless model.vocabulary is given.
[[nodiscard]] model::DecoderConfig decoder_config(const config::Config& config,
                                                  std::int64_t vocabulary);

// The other way: defaults with a [model] table that means this decoder, whatever the data.
[[nodiscard]] config::Config config_of(const model::DecoderConfig& decoder);

// The keys of the [model] table that decide which weights fit and what they compute, with their
// values as TOML: all but ties, dropout, and a length that no parameter depends on.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> settings_of(
    const model::DecoderConfig& decoder);

}  // namespace dynmo::weights
