// SPDX-License-Identifier: Apache-2.0
#pragma once

// A registry entry describes a source: its table of keys, its checks and its load model. The type
// of its options is erased, so that only sources.def lists the sources.

#include <any>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"
#include "dynmo/dynamism/source_key.h"

namespace dynmo::dynamism {

// The settings that a source may exclude in a training.
struct TrainingSetting {
  bool tied_embeddings = false;
  std::int64_t steps = 0;             // of the run; 0: not known
  std::string_view device = "cpu";    // run.device: cpu, cuda, or emulated, which sleeps instead
  std::string_view family = "llama";  // model.family
  std::int64_t head_slices = 1;       // model.head_slices
  std::int64_t blocks = 0;            // model.blocks; 0: not known
};

// The reason why a source would do nothing in a run. The line for the user is "GIVEN: NOTHING in
// 200 steps, as WHY; wanted WANTED".
struct Idle {
  std::string given;         // "early_exit.warm_up is 500"
  std::string_view nothing;  // "no token would leave"
  std::string why;
  std::string wanted;
};

struct SourceEntry {
  std::string_view table;  // "sparse_attention": of its keys, and its folder
  std::any defaults;       // its options
  std::vector<SourceKey> (*keys)(std::any& options) = nullptr;
  Expected<void> (*check)(const std::any& options) = nullptr;
  Expected<void> (*check_training)(const std::any& options,
                                   const TrainingSetting& setting) = nullptr;
  std::optional<Idle> (*idle_in)(const std::any& options, const TrainingSetting& setting) = nullptr;
  Expected<std::unique_ptr<LoadModel>> (*make_load)(const std::any& options,
                                                    const LoadInputs& inputs) = nullptr;
  bool trains = false;  // it has a runtime half, by sources.def
};

// Returns the entry of a source from keys_of(Options&), check(const Options&) and Make. Two more
// functions are optional, with an Options and a TrainingSetting. The function check_training()
// returns an error if a training does not support the options. The function idle_in() returns why
// the source would do nothing in setting.steps steps.
template <typename Options,
          Expected<std::unique_ptr<LoadModel>> (*Make)(const Options&, const LoadInputs&)>
[[nodiscard]] SourceEntry source_entry(std::string_view table) {
  return {
      .table = table,
      .defaults = Options{},
      .keys = [](std::any& options) { return keys_of(*std::any_cast<Options>(&options)); },
      .check =
          [](const std::any& options) { return check(*std::any_cast<const Options>(&options)); },
      .check_training = [](const std::any& options,
                           const TrainingSetting& setting) -> Expected<void> {
        if constexpr (requires(const Options& o) { check_training(o, setting); }) {
          return check_training(*std::any_cast<const Options>(&options), setting);
        } else {
          return {};
        }
      },
      .idle_in = [](const std::any& options,
                    const TrainingSetting& setting) -> std::optional<Idle> {
        if constexpr (requires(const Options& o) { idle_in(o, setting); }) {
          return idle_in(*std::any_cast<const Options>(&options), setting);
        } else {
          return std::nullopt;
        }
      },
      .make_load =
          [](const std::any& options, const LoadInputs& inputs) {
            return Make(*std::any_cast<const Options>(&options), inputs);
          }};
}

// Return the entries of the sources in sources.def.
#define DYNMO_SOURCE(name) [[nodiscard]] SourceEntry name##_source();
#include "dynmo/dynamism/sources.def"
#undef DYNMO_SOURCE

}  // namespace dynmo::dynamism
