// SPDX-License-Identifier: Apache-2.0
#pragma once

// Converts between a config's [model] table and its decoder.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/config/config.h"
#include "dynmo/model/decoder.h"

namespace dynmo::weights {

// Returns the decoder of a valid config. `vocabulary` is that of the data. It is used unless
// model.vocabulary is given.
[[nodiscard]] model::DecoderConfig decoder_config(const config::Config& config,
                                                  std::int64_t vocabulary);

// Returns defaults with a [model] table for this decoder, which does not depend on the data.
[[nodiscard]] config::Config config_of(const model::DecoderConfig& decoder);

// Returns the keys of the [model] table that decide which weights fit and what they compute, with
// their values as TOML. These are all except ties, dropout, and a length on which no parameter
// depends.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> settings_of(
    const model::DecoderConfig& decoder);

}  // namespace dynmo::weights
