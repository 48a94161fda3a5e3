// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/combinations.h"

#include <algorithm>
#include <array>

#include "dynmo/core/check.h"
#include "dynmo/core/device_names.h"

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

constexpr std::string_view kNoTokens = "emulated layers have no tokens";
constexpr std::array<RefusedSetting, 7> kRefusedSettings = {{
    {"moe", "run.device", "emulated", kNoTokens},
    {"moe", "model.family", "gpt2", "experts are gated MLPs, as Mixtral has them"},
    {"pruning", "run.device", "emulated", "emulated layers have no weights to remove"},
    {"sparse_attention", "run.device", "emulated", kNoTokens},
    {"mixture_of_depths", "run.device", "emulated", kNoTokens},
    {"early_exit", "run.device", "emulated", kNoTokens},
    {"freezing", "model.tied_embeddings", "true",
     "tied embeddings are two equal copies, of which it would stop one"},
}};

// Returns whether a setting is the refused one. If `refused` names a kind of device, all kinds are
// refused.
bool is(const TrainingSetting& setting, const RefusedSetting& refused) {
  if (refused.key == "run.device") {
    return is_device_name(refused.value) ? is_device_name(setting.device)
                                         : setting.device == refused.value;
  }
  if (refused.key == "model.family") return setting.family == refused.value;
  if (refused.key == "model.head_slices") return setting.head_slices > 1;
  DYNMO_CHECK(refused.key == "model.tied_embeddings", "a key that is looked at, got {}",
              refused.key);
  return setting.tied_embeddings == (refused.value == "true");
}

}  // namespace

std::span<const RefusedPair> refused_pairs() { return kRefusedPairs; }
std::span<const RefusedSetting> refused_settings() { return kRefusedSettings; }

Expected<void> check_combination(std::span<const std::string_view> tables,
                                 const TrainingSetting& setting) {
  const auto has = [&](std::string_view table) {
    return std::find(tables.begin(), tables.end(), table) != tables.end();
  };
  for (const RefusedPair& pair : kRefusedPairs) {
    if (!has(pair.one) || !has(pair.other)) continue;
    return make_error(ErrorCode::kBadInput,
                      "{0}.enabled and {1}.enabled are both true: {2}; set one of them to false",
                      pair.one, pair.other, pair.reason);
  }
  for (const RefusedSetting& refused : kRefusedSettings) {
    if (!has(refused.source) || !is(setting, refused)) continue;
    return make_error(ErrorCode::kBadInput,
                      "{0}.enabled is true with {1} = {2}: {3}; set {0}.enabled = false or {1} "
                      "to something else",
                      refused.source, refused.key,
                      refused.key == "run.device" ? setting.device : refused.value, refused.reason);
  }
  return {};
}

}  // namespace dynmo::dynamism
