// SPDX-License-Identifier: Apache-2.0
#pragma once

// The options of every source of dynamism and which of them a training has switched on: a value
// that a training's config and a scenario both hold.

#include <any>
#include <memory>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/toml.h"
#include "dynmo/dynamism/source_entry.h"

namespace dynmo::dynamism {

// Returns the name of a source in dynamism.source of a scenario: "sparse-attention".
[[nodiscard]] std::string load_name(std::string_view table);

class SourceOptions {
 public:
  // The sources of sources.def, with their defaults.
  SourceOptions();
  // Others: what a test of a source that is not in the registry needs.
  explicit SourceOptions(std::vector<SourceEntry> entries);

  // The options of a source by their type. A source that is not there is a bug.
  template <typename Options>
  [[nodiscard]] Options& get() {
    return const_cast<Options&>(std::as_const(*this).get<Options>());
  }
  template <typename Options>
  [[nodiscard]] const Options& get() const {
    return *std::any_cast<const Options>(&with(typeid(Options)).options);
  }
  // Whether a training runs this source, "freezing.enabled".
  template <typename Options>
  [[nodiscard]] bool enabled() const {
    return with(typeid(Options)).enabled;
  }
  template <typename Options>
  Options& enable() {
    const_cast<One&>(with(typeid(Options))).enabled = true;
    return get<Options>();
  }

  // Tables of all sources in the order of the registry; of those that are enabled.
  [[nodiscard]] std::vector<std::string_view> tables() const;
  [[nodiscard]] std::vector<std::string_view> enabled_tables() const;

  // Keys of a scenario, "moe.drift": of every source. Fields are those of this object.
  [[nodiscard]] std::vector<TomlKey> scenario_keys();
  // Keys of a training, "freezing.enabled" and the others: of every source that can train.
  [[nodiscard]] std::vector<TomlKey> training_keys();

  // The same sources with the defaults of all keys, none enabled.
  [[nodiscard]] SourceOptions defaults() const;

  // Values and combinations of values of one source; `table` as tables() has it.
  [[nodiscard]] Expected<void> check(std::string_view table) const;
  // A training calls this check before a rank starts: the sources that can train are valid, their
  // keys have an effect, enabled ones fit the setting and each other (combinations.h) and have
  // something to do in the run. kBadInput naming keys.
  [[nodiscard]] Expected<void> check_training(const TrainingSetting& setting) const;
  // Why a source would do nothing in a run of setting.steps steps; "": it does something.
  [[nodiscard]] std::string idle_in(std::string_view table, const TrainingSetting& setting) const;
  // Its load model; `table` as tables() has it.
  [[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_load(std::string_view table,
                                                               const LoadInputs& inputs) const;

 private:
  struct One {
    SourceEntry entry;
    std::any options;
    bool enabled = false;
  };
  [[nodiscard]] const One& with(const std::type_info& type) const;
  [[nodiscard]] const One& of(std::string_view table) const;

  std::vector<One> all_;
};

}  // namespace dynmo::dynamism
