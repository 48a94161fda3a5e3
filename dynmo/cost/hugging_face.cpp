// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/hugging_face.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "dynmo/core/files.h"
#include "dynmo/core/nearest.h"
#include "dynmo/cost/config_keys.h"
#include "dynmo/cost/family_table.h"

namespace dynmo::cost {
namespace {

// The object that describes the text model: the whole file, or a part if it has several models.
struct TextModel {
  const Json* json = nullptr;
  std::string pointer;
  bool nested = false;
};

TextModel text_model_of(const Json& json) {
  for (const char* key : {"text_config", "llm_config", "language_config"}) {
    const auto found = json.find(key);
    if (found != json.end() && found->is_object()) {
      return {.json = &*found, .pointer = std::string("/") + key, .nested = true};
    }
  }
  return {.json = &json, .pointer = "", .nested = false};
}

// Returns the row of the text model's type. A part without a type has that of the file.
Expected<const FamilyRow*> family_of(const Json& json, const TextModel& text,
                                     std::string_view origin, std::string& type) {
  const auto own = text.json->find("model_type");
  const bool given = text.nested && own != text.json->end() && !own->is_null();
  JsonObject config(given ? *text.json : json, std::string(origin), given ? text.pointer : "");
  type = config.string("model_type");
  const FamilyRow* row = find_family(type);
  if (row == nullptr) {
    config.fail("model_type",
                fmt::format("is '{}', which is not planned by formulas{} (docs/costs.md lists the "
                            "types; dynmo.plan in Python takes what transformers knows)",
                            type, did_you_mean(type, family_types())));
  }
  for (const auto& [key, value] : (given ? *text.json : json).items()) config.ignore(key);
  DYNMO_TRY(config.finish());
  return row;
}

bool is_class_of(const FamilyRow& row, std::string_view name) {
  return std::find(row.classes.begin(), row.classes.end(), name) != row.classes.end();
}

// Refuses other classes of a known type. Such a class has no head for the vocabulary, or it has
// other layers.
Expected<void> check_classes(const Json& json, const FamilyRow& row, std::string_view origin,
                             const std::string& pointer, bool wrapper) {
  const auto refuse = [&](const std::string& place, const std::string& name) {
    return make_error(ErrorCode::kBadInput,
                      "{}: {}{} is '{}', planned is {}: a model with a language-model head", origin,
                      pointer, place, name, fmt::join(row.classes, " or "));
  };
  const auto fits = [&](const std::string& name) {
    return is_class_of(row, name) || (wrapper && name.ends_with("ForConditionalGeneration"));
  };
  const auto classes = json.find("architectures");
  if (classes != json.end() && classes->is_array() && !classes->empty()) {
    for (std::size_t i = 0; i < classes->size(); ++i) {
      const Json& name = (*classes)[i];
      const std::string text = name.is_string() ? name.get<std::string>() : name.dump();
      if (!fits(text)) return refuse(fmt::format("/architectures/{}", i), text);
    }
    return {};
  }
  // The file may name a class of its own code.
  const auto code = json.find("auto_map");
  if (code == json.end() || !code->is_object()) return {};
  const auto model = code->find("AutoModelForCausalLM");
  const bool named = model != code->end() && model->is_string();
  const std::string path = named ? model->get<std::string>() : "";
  const std::string name = path.substr(path.rfind('.') + 1);
  if (!named) return refuse("/auto_map", "code of its own without AutoModelForCausalLM");
  return fits(name) ? Expected<void>{} : refuse("/auto_map/AutoModelForCausalLM", path);
}

bool is_set(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && !found->is_null() && *found != 0 && *found != false;
}

// Adds notes on parts that a plan leaves out or approximates.
void add_notes(const Json& json, const TextModel& text, TransformerShape& shape) {
  for (const Json* part : {&json, text.json}) {
    if (!is_set(*part, "quantization_config")) continue;
    const Json& quantization = (*part)["quantization_config"];
    const Json method =
        quantization.is_object() ? quantization.value("quant_method", Json()) : Json();
    shape.notes.push_back(fmt::format(
        "the file's weights are quantized{}: planned is training them in the device's precision",
        method.is_string() ? " (" + method.get<std::string>() + ")" : ""));
    break;
  }
  if (text.nested) shape.notes.emplace_back("only the text model is counted");
  for (const char* key :
       {"num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "use_mtp"}) {
    if (!is_set(*text.json, key)) continue;
    shape.notes.emplace_back("multi-token prediction is not counted");
    break;
  }
}

// Puts the literals of Python's json module that are not JSON into quotes.
std::string with_quoted_literals(std::string_view text) {
  std::string out;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string && c == '\\' && i + 1 < text.size()) {
      out += c;
      out += text[++i];
      continue;
    }
    if (c == '"') in_string = !in_string;
    bool replaced = false;
    for (const std::string_view literal : {"-Infinity", "Infinity", "NaN"}) {
      if (in_string || !text.substr(i).starts_with(literal)) continue;
      out += '"';
      out += literal;
      out += '"';
      i += literal.size() - 1;
      replaced = true;
      break;
    }
    if (!replaced) out += c;
  }
  return out;
}

}  // namespace

Expected<TransformerShape> parse_config(const Json& json, std::string_view origin,
                                        std::int64_t sequence, std::int64_t micro_batch_size) {
  if (!json.is_object()) DYNMO_TRY(JsonObject(json, std::string(origin)).finish());
  const TextModel text = text_model_of(json);
  std::string type;
  DYNMO_ASSIGN(const FamilyRow* row, family_of(json, text, origin, type));
  TransformerShape shape;
  shape.sequence = sequence;
  shape.micro_batch_size = micro_batch_size;
  if (text.nested) {
    const auto tied = json.find("tie_word_embeddings");
    shape.tied_embedding = tied != json.end() && *tied == true;
  }
  ConfigKeys keys(*text.json, *row, std::string(origin), text.pointer);
  read_blocks(keys, *row, shape);
  keys.refuse_unread(type);
  DYNMO_TRY(keys.finish());
  DYNMO_TRY(check_classes(json, *row, origin, "", text.nested));
  if (text.nested) DYNMO_TRY(check_classes(*text.json, *row, origin, text.pointer, true));
  DYNMO_TRY(validate(shape));
  add_notes(json, text, shape);
  // Half blocks that follow from the fields need no list.
  TransformerShape plain = shape;
  plain.halves.clear();
  if (half_blocks(plain) == shape.halves) shape.halves.clear();
  return shape;
}

Expected<TransformerShape> read_config(const std::filesystem::path& path, std::int64_t sequence,
                                       std::int64_t micro_batch_size) {
  std::error_code fault;
  const bool folder = std::filesystem::is_directory(path, fault);
  const std::filesystem::path file = folder ? path / "config.json" : path;
  DYNMO_ASSIGN(const std::string text, read_file(file, kMaxJsonBytes));
  DYNMO_ASSIGN(const Json json, parse_json(with_quoted_literals(text), file.string()));
  return parse_config(json, file.string(), sequence, micro_batch_size);
}

}  // namespace dynmo::cost
