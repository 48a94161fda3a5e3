// SPDX-License-Identifier: Apache-2.0
#pragma once

// The families of decoders that train, by the names that configs and checkpoints use.

#include <string_view>

#include "dynmo/core/expected.h"

namespace dynmo::cost {

enum class Family { kLlama, kGpt2 };
[[nodiscard]] std::string_view name(Family family);  // "llama", "gpt2"
// kBadInput, with the nearest name.
[[nodiscard]] Expected<Family> parse_family(std::string_view name);

// Which numbers layers compute in (model/precision.h).
enum class Precision { kFp32, kBf16 };
// "fp32", "bf16". kBadInput naming the known ones.
[[nodiscard]] Expected<Precision> parse_precision(std::string_view name);

}  // namespace dynmo::cost
