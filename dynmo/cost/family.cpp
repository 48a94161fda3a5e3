// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/family.h"

#include <string>
#include <vector>

#include "dynmo/core/nearest.h"

namespace dynmo::cost {
namespace {

// Returns the names in the order of the enumerators.
const std::vector<std::string>& family_names() {
  static const std::vector<std::string> kNames = {"llama", "gpt2"};
  return kNames;
}

}  // namespace

std::string_view name(Family family) { return family_names()[static_cast<std::size_t>(family)]; }

Expected<Family> parse_family(std::string_view name) {
  for (std::size_t i = 0; i < family_names().size(); ++i) {
    if (family_names()[i] == name) return static_cast<Family>(i);
  }
  return make_error(ErrorCode::kBadInput, "'{}' is no family of models{}", name,
                    suggestion(name, family_names()));
}

Expected<Precision> parse_precision(std::string_view name) {
  if (name == "fp32") return Precision::kFp32;
  if (name == "bf16") return Precision::kBf16;
  return make_error(ErrorCode::kBadInput, "'{}' is no precision, wanted fp32 or bf16", name);
}

}  // namespace dynmo::cost
