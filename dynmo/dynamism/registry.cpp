// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/registry.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "dynmo/core/nearest.h"
#include "dynmo/dynamism/dense_impl.h"

namespace dynmo::dynamism {

namespace {

class Static final : public LoadModel {
 public:
  explicit Static(cost::ModelCost model) : model_(std::move(model)) {}
  cost::ModelCost at(std::int64_t /*step*/) const override { return model_; }

 private:
  cost::ModelCost model_;
};

}  // namespace

Expected<std::unique_ptr<LoadModel>> make_static_load(cost::ModelCost model) {
  DYNMO_TRY(cost::validate(model));
  return std::unique_ptr<LoadModel>(std::make_unique<Static>(std::move(model)));
}

std::vector<SourceEntry> built_in_sources() {
  std::vector<SourceEntry> sources;
#define DYNMO_SOURCE(name)            \
  sources.push_back(name##_source()); \
  sources.back().trains = true;
#include "dynmo/dynamism/sources.def"
#undef DYNMO_SOURCE
  return sources;
}

std::vector<std::string> load_names(const SourceOptions& sources) {
  std::vector<std::string> names = {"none"};
  for (const std::string_view table : sources.tables()) names.push_back(load_name(table));
  return names;
}

Expected<std::unique_ptr<LoadModel>> make_load_model(std::string_view source,
                                                     const LoadOptions& options) {
  if (source == "none") {
    DYNMO_ASSIGN(DenseModel dense, make_dense(source, options.inputs));
    return make_static_load(std::move(dense.costs));
  }
  const std::vector<std::string> names = load_names(options.sources);
  const auto found = std::find(names.begin(), names.end(), source);
  if (found == names.end()) {
    return make_error(ErrorCode::kBadInput, "unknown load model '{}'{}", source,
                      suggestion(source, names));
  }
  const auto index = static_cast<std::size_t>(found - names.begin()) - 1;
  return options.sources.make_load(options.sources.tables()[index], options.inputs);
}

}  // namespace dynmo::dynamism
