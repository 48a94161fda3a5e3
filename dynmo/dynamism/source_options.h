// SPDX-License-Identifier: Apache-2.0
#pragma once

// The options of every source of dynamism, and the sources that a training has enabled. A
// training's config and a scenario both have this value.

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
  // Has the sources of sources.def, with their defaults.
  SourceOptions();
  // Has other sources, for tests of a source that is not in the registry.
  explicit SourceOptions(std::vector<SourceEntry> entries);

  // Returns the options of a source by their type. An unknown type is a bug.
  template <typename Options>
  [[nodiscard]] Options& get() {
    return const_cast<Options&>(std::as_const(*this).get<Options>());
  }
  template <typename Options>
  [[nodiscard]] const Options& get() const {
    return *std::any_cast<const Options>(&with(typeid(Options)).options);
  }
  // Returns whether a training runs this source, "freezing.enabled".
  template <typename Options>
  [[nodiscard]] bool enabled() const {
    return with(typeid(Options)).enabled;
  }
  template <typename Options>
  Options& enable() {
    const_cast<One&>(with(typeid(Options))).enabled = true;
    return get<Options>();
  }

  // Returns the tables of all sources in the order of the registry. enabled_tables() returns those
  // that are enabled.
  [[nodiscard]] std::vector<std::string_view> tables() const;
  [[nodiscard]] std::vector<std::string_view> enabled_tables() const;

  // Returns the keys of a scenario, "moe.drift", of every source. Fields are those of this object.
  [[nodiscard]] std::vector<TomlKey> scenario_keys();
  // Returns the keys of a training, "freezing.enabled" and the others, of every source that can
  // train.
  [[nodiscard]] std::vector<TomlKey> training_keys();

  // Returns the same sources with the defaults of all keys, none enabled.
  [[nodiscard]] SourceOptions defaults() const;

  // Returns kBadInput for a bad value, or a bad combination of values, of one source. `table` is
  // one of tables().
  [[nodiscard]] Expected<void> check(std::string_view table) const;
  // Checks the sources before a rank starts. Those that can train must be valid, and their keys
  // must have an effect. Enabled ones must fit the setting and each other (combinations.h), and
  // have something to do in the run. Returns kBadInput with keys.
  [[nodiscard]] Expected<void> check_training(const TrainingSetting& setting) const;
  // Returns why a source would do nothing in a run of setting.steps steps, or "" if it does
  // something.
  [[nodiscard]] std::string idle_in(std::string_view table, const TrainingSetting& setting) const;
  // Makes the source's load model. Returns its error for bad options or inputs. `table` is one of
  // tables().
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
