// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/question.h"

#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "dynmo/core/fields.h"

namespace dynmo::python {
namespace {

// A layer as the package counted it in a model of transformers.
Expected<cost::LayerWork> parse_layer_work(JsonObject layer) {
  cost::LayerWork work;
  work.name = layer.string("name");
  const std::string kind = layer.string("kind");
  work.kind = kind == "embedding" ? cost::LayerKind::kEmbedding
              : kind == "head"    ? cost::LayerKind::kHead
                                  : cost::LayerKind::kMlp;
  for (const auto& [key, field] : {std::pair{"matrix_flops", &cost::LayerWork::matrix_flops},
                                   {"core_flops", &cost::LayerWork::core_flops},
                                   {"moved_bytes", &cost::LayerWork::moved_bytes},
                                   {"parameters", &cost::LayerWork::parameters},
                                   {"copied_parameters", &cost::LayerWork::copied_parameters},
                                   {"product_parameters", &cost::LayerWork::product_parameters},
                                   {"activation_bytes", &cost::LayerWork::activation_bytes},
                                   {"boundary_bytes", &cost::LayerWork::boundary_bytes}}) {
    work.*field = layer.number(key);
    if (work.*field < 0) layer.fail(key, fmt::format("is {}, wanted 0 or more", work.*field));
  }
  DYNMO_TRY(layer.finish());
  return work;
}

// Reads the options that the dict has.
Expected<plan::Asked> read_asked(const Json& json) {
  plan::Asked asked;
  JsonObject object(json, "dynmo");
  FieldReader read(object);
  for (const plan::Option& option : plan::options_of(asked)) {
    const std::string key(option.argument);
    if (key.empty() || !json.contains(key)) continue;
    if (option.placeholder.ends_with(".json")) {
      object.ignore(key);
      asked.documents[key] = json[key];
      *std::get<std::optional<std::string>*>(option.value) = key;
    } else if (key == "memory" && !json[key].is_string()) {
      asked.memory = std::to_string(object.bytes(key).value);
    } else {
      std::visit([&](auto* value) { read(key.c_str(), *value); }, option.value);
    }
  }
  if (json.contains("work")) {
    asked.model = "config";
    asked.work.emplace();
    for (const JsonObject& layer : object.objects("work")) {
      DYNMO_ASSIGN(cost::LayerWork work, parse_layer_work(layer));
      asked.work->push_back(std::move(work));
    }
  }
  DYNMO_TRY(object.finish());
  return asked;
}

}  // namespace

Expected<plan::Question> read_question(const Json& json) {
  DYNMO_ASSIGN(const plan::Asked asked, read_asked(json));
  DYNMO_ASSIGN(plan::Question question, plan::question_of(asked, plan::Spelling::kArgument));
  DYNMO_TRY(plan::check_effects(asked, question, plan::Spelling::kArgument));
  if (asked.from) {
    DYNMO_ASSIGN(plan::Plan current, plan::parse_plan(json["current"], "current"));
    DYNMO_TRY(plan::set_from(question, std::move(current), "current"));
  }
  return question;
}

Expected<cost::ModelCost> read_costs(const Json& json) {
  DYNMO_ASSIGN(const plan::Asked asked, read_asked(json));
  return plan::costs_of(asked, plan::Spelling::kArgument);
}

Expected<std::vector<cost::LayerWork>> read_work(const Json& json) {
  DYNMO_ASSIGN(const plan::Asked asked, read_asked(json));
  return plan::work_of(asked, plan::Spelling::kArgument);
}

}  // namespace dynmo::python
