// SPDX-License-Identifier: Apache-2.0
#pragma once

// The families of decoders that can be trained, by the names in configs and checkpoints.

#include <string_view>

#include "dynmo/core/expected.h"

namespace dynmo::cost {

enum class Family { kLlama, kGpt2 };
[[nodiscard]] std::string_view name(Family family);  // "llama", "gpt2"
// Parses the name of a family. Returns kBadInput with the nearest name.
[[nodiscard]] Expected<Family> parse_family(std::string_view name);

// The type of the numbers in which layers compute (model/precision.h).
enum class Precision { kFp32, kBf16 };
// Parses "fp32" or "bf16". Returns kBadInput with the known ones.
[[nodiscard]] Expected<Precision> parse_precision(std::string_view name);

}  // namespace dynmo::cost
