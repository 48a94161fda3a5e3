// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/combinations.h"

#include <algorithm>
#include <array>

namespace dynmo::dynamism {
namespace {

constexpr std::array<RefusedPair, 3> kRefusedPairs = {{
    {"sparse_attention", "mixture_of_depths",
     "attention inside a routed block runs dense on the tokens that its router chose"},
    {"sparse_attention", "early_exit",
     "the hashed buckets are made for whole sequences, and exits leave ragged ones"},
    {"mixture_of_depths", "early_exit",
     "a router's capacity is a share of whole sequences, and exits leave ragged ones"},
}};

}  // namespace

std::span<const RefusedPair> refused_pairs() { return kRefusedPairs; }

Expected<void> check_combination(std::span<const std::string_view> tables) {
  const auto has = [&](std::string_view table) {
    return std::find(tables.begin(), tables.end(), table) != tables.end();
  };
  for (const RefusedPair& pair : kRefusedPairs) {
    if (!has(pair.one) || !has(pair.other)) continue;
    return make_error(ErrorCode::kBadInput,
                      "{0}.enabled and {1}.enabled are both true: {2}; set one of them to false",
                      pair.one, pair.other, pair.reason);
  }
  return {};
}

}  // namespace dynmo::dynamism
