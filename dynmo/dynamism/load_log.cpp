// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/load_log.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "dynmo/core/allowed.h"
#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/files.h"

namespace dynmo::dynamism {
namespace {

constexpr std::string_view kFormat = "dynmo-load-trace-1";
// Changes other than of work, which is written as true.
constexpr std::string_view kFrozen = "frozen";
constexpr std::string_view kPredicted = "predicted";

struct Number {
  const char* key;
  double cost::LayerCost::*field;
  const char* wanted = "seconds from 0 to 1e6";
  bool (*accepts)(double) = [](double v) { return v >= 0 && v <= cost::kMaxSeconds; };
};
constexpr std::array<Number, 5> kNumbers = {{
    {"forward_s", &cost::LayerCost::forward_s},
    {"backward_input_s", &cost::LayerCost::backward_input_s},
    {"backward_weight_s", &cost::LayerCost::backward_weight_s},
    {"update_s", &cost::LayerCost::update_s},
    {"product_time", &cost::LayerCost::product_time, "a number above 0, at most 1",
     [](double v) { return v > 0 && v <= 1; }},
}};

struct Amount {
  const char* key;
  Bytes cost::LayerCost::*field;
};
constexpr std::array<Amount, 6> kAmounts = {{
    {"parameter_bytes", &cost::LayerCost::parameter_bytes},
    {"gradient_bytes", &cost::LayerCost::gradient_bytes},
    {"optimizer_bytes", &cost::LayerCost::optimizer_bytes},
    {"copy_bytes", &cost::LayerCost::copy_bytes},
    {"activation_bytes", &cost::LayerCost::activation_bytes},
    {"boundary_bytes", &cost::LayerCost::boundary_bytes},
}};

template <typename Of>
Json column(const cost::ModelCost& model, const Of& of) {
  Json values = Json::array();
  for (const cost::LayerCost& layer : model.layers) values.push_back(of(layer));
  return values;
}

template <typename Of>
void add_if_changed(Json& line, const char* key, const cost::ModelCost& before,
                    const cost::ModelCost& now, const Of& of) {
  Json values = column(now, of);
  if (values != column(before, of)) line[key] = std::move(values);
}

// Writes the differences from the line before.
Json step_line(std::int64_t step, cost::Announced change, const cost::ModelCost& before,
               const cost::ModelCost& now) {
  Json line = {{"step", step}};
  if (change == cost::Announced::kWork) line["change"] = true;
  if (change == cost::Announced::kKnown) line["change"] = kFrozen;
  if (change == cost::Announced::kPredicted) line["change"] = kPredicted;
  for (const Number& n : kNumbers) {
    add_if_changed(line, n.key, before, now, [&](const auto& layer) { return layer.*n.field; });
  }
  for (const Amount& a : kAmounts) {
    add_if_changed(line, a.key, before, now,
                   [&](const auto& layer) { return (layer.*a.field).value; });
  }
  add_if_changed(line, "frozen", before, now, [](const auto& layer) { return layer.frozen; });
  return line;
}

bool same_layers(const cost::ModelCost& one, const cost::ModelCost& two) {
  const auto same_name = [](const auto& a, const auto& b) { return a.name == b.name; };
  return std::equal(one.layers.begin(), one.layers.end(), two.layers.begin(), two.layers.end(),
                    same_name);
}

// One column of a trace. Steps in which it stays the same share it, so that memory is proportional
// to the file.
template <typename T>
using Column = std::shared_ptr<const std::vector<T>>;

struct TraceStep {
  std::int64_t step = 0;
  cost::Announced change = cost::Announced::kNothing;
  std::array<Column<double>, kNumbers.size()> numbers;
  std::array<Column<std::int64_t>, kAmounts.size()> amounts;
  Column<bool> frozen;
  bool moving = false;
};

template <typename T, typename Of>
Column<T> share(const cost::ModelCost& model, const Of& of) {
  std::vector<T> values;
  for (const cost::LayerCost& layer : model.layers) values.push_back(of(layer));
  return std::make_shared<const std::vector<T>>(std::move(values));
}

TraceStep columns_of(const cost::ModelCost& model) {
  TraceStep columns;
  for (std::size_t i = 0; i < kNumbers.size(); ++i) {
    columns.numbers[i] =
        share<double>(model, [&](const auto& layer) { return layer.*kNumbers[i].field; });
  }
  for (std::size_t i = 0; i < kAmounts.size(); ++i) {
    columns.amounts[i] = share<std::int64_t>(
        model, [&](const auto& layer) { return (layer.*kAmounts[i].field).value; });
  }
  columns.frozen = share<bool>(model, [](const auto& layer) { return layer.frozen; });
  return columns;
}

bool is_amount(const Json& json) {
  return json.is_number_integer() && json.get<double>() >= 0 &&
         json.get<double>() <= static_cast<double>(cost::kMaxBytes.value);
}
bool is_flag(const Json& json) { return json.is_boolean(); }

// Reads the column below `key` if it is there.
template <typename T, typename Accepts>
void read_column(JsonObject& object, const Json& line, const char* key, const Accepts& accepts,
                 std::string_view wanted, Column<T>& column) {
  object.ignore(key);
  const auto found = line.find(key);
  if (found == line.end()) return;
  if (!found->is_array() || found->size() != column->size()) {
    object.fail(key, fmt::format("is not an array of {} elements, one a layer", column->size()));
    return;
  }
  std::vector<T> values;
  for (std::size_t i = 0; i < found->size(); ++i) {
    if (!accepts((*found)[i])) {
      object.fail(fmt::format("{}/{}", key, i),
                  fmt::format("is {}, wanted {}", (*found)[i].dump(), wanted));
      return;
    }
    values.push_back((*found)[i].get<T>());
  }
  column = std::make_shared<const std::vector<T>>(std::move(values));
}

cost::Announced read_change(JsonObject& object, const Json& line) {
  const auto found = line.is_object() ? line.find("change") : line.end();
  if (found != line.end() && found->is_string()) {
    const std::string change = object.string("change");
    if (change == kFrozen) return cost::Announced::kKnown;
    if (change == kPredicted) return cost::Announced::kPredicted;
    object.fail("change", fmt::format("is {}, wanted true, false, \"{}\" or \"{}\"", found->dump(),
                                      kFrozen, kPredicted));
    return cost::Announced::kNothing;
  }
  return object.boolean("change", false) ? cost::Announced::kWork : cost::Announced::kNothing;
}

Expected<TraceStep> read_step(const Json& line, const std::string& origin,
                              const TraceStep& before) {
  JsonObject object(line, origin);
  TraceStep step = before;
  step.step = object.integer("step");
  step.change = read_change(object, line);
  if (step.step <= before.step) {
    object.fail("step", fmt::format("is {}, wanted more than {}", step.step, before.step));
  }
  if (line.is_object()) {
    for (std::size_t i = 0; i < kNumbers.size(); ++i) {
      const Number& number = kNumbers[i];
      const auto accepts = [&](const Json& json) {
        return json.is_number() && number.accepts(json.get<double>());
      };
      read_column(object, line, number.key, accepts, number.wanted, step.numbers[i]);
    }
    for (std::size_t i = 0; i < kAmounts.size(); ++i) {
      read_column(object, line, kAmounts[i].key, is_amount, "whole bytes from 0 to 2^50",
                  step.amounts[i]);
    }
    read_column(object, line, "frozen", is_flag, "true or false", step.frozen);
    step.moving = object.boolean("moving", false);
    object.ignore("measured");
  }
  DYNMO_TRY(object.finish());
  return step;
}

Expected<cost::ModelCost> read_header(Json header, const std::string& origin) {
  JsonObject object(header, origin);
  object.expect_format(kFormat);
  for (const char* key : {"layers", "emulated", "run"}) object.ignore(key);
  DYNMO_TRY(object.finish());
  header["format"] = "dynmo-profile-1";  // which has the same layers
  header.erase("run");
  return cost::parse_profile(header, origin);
}

class Replay final : public LoadModel {
 public:
  Replay(cost::ModelCost header, std::vector<TraceStep> steps, std::optional<Recording> recording)
      : header_(std::move(header)), steps_(std::move(steps)), recording_(std::move(recording)) {}

  cost::ModelCost at(std::int64_t step) const override {
    auto after = std::upper_bound(steps_.begin(), steps_.end(), step, is_before);
    if (after != steps_.begin()) --after;
    const TraceStep& found = *after;
    cost::ModelCost model = header_;
    for (std::size_t layer = 0; layer < model.layers.size(); ++layer) {
      cost::LayerCost& cost = model.layers[layer];
      for (std::size_t i = 0; i < kNumbers.size(); ++i) {
        cost.*kNumbers[i].field = (*found.numbers[i])[layer];
      }
      for (std::size_t i = 0; i < kAmounts.size(); ++i) {
        cost.*kAmounts[i].field = Bytes{(*found.amounts[i])[layer]};
      }
      cost.frozen = (*found.frozen)[layer];
    }
    return model;
  }

  cost::Announced announced_at(std::int64_t step) const override {
    const auto after = std::upper_bound(steps_.begin(), steps_.end(), step, is_before);
    const bool recorded = after != steps_.begin() && (after - 1)->step == step;
    return recorded ? (after - 1)->change : cost::Announced::kNothing;
  }

  const Recording* recording() const override { return recording_ ? &*recording_ : nullptr; }

  std::vector<std::int64_t> recorded_steps() const override {
    std::vector<std::int64_t> steps;
    for (const TraceStep& recorded : steps_) steps.push_back(recorded.step);
    return steps;
  }

 private:
  static bool is_before(std::int64_t step, const TraceStep& recorded) {
    return step < recorded.step;
  }

  cost::ModelCost header_;
  std::vector<TraceStep> steps_;  // at least one, steps ascending
  std::optional<Recording> recording_;
};

}  // namespace

Expected<std::string> TraceLines::add(std::int64_t step, cost::Announced change,
                                      const cost::ModelCost& model, const Measured* measured) {
  if (step <= last_step_) {
    return make_error(ErrorCode::kBadInput, "trace: step is {}, wanted more than {}", step,
                      last_step_);
  }
  if (auto valid = cost::validate(model); !valid) {
    return make_error(ErrorCode::kBadInput, "trace: step {}: {}", step, valid.error().message);
  }
  std::string text;
  if (!has_header_) {
    Json header = cost::profile_json(model);
    header["format"] = kFormat;
    if (emulated_) header["emulated"] = true;
    if (start_) header["run"] = to_json(*start_);
    text = header.dump() + "\n";
    last_ = model;
    has_header_ = true;
  } else if (last_.size() > 0 && !same_layers(model, last_)) {
    return make_error(ErrorCode::kBadInput,
                      "trace: step {}: the layers are not those of step {}, wanted the same names",
                      step, last_step_);
  }
  Json line = step_line(step, change, last_, model);
  if (measured != nullptr) line["measured"] = to_json(measured->step);
  if (measured != nullptr && measured->moving) line["moving"] = true;
  text += line.dump() + "\n";
  last_step_ = step;
  last_ = model;
  return text;
}

Expected<std::string> trace_text(const LoadModel& load, std::int64_t steps, std::int64_t every) {
  DYNMO_TRY(check_allowed("trace: steps", steps, at_least(1)));
  DYNMO_TRY(check_allowed("trace: every", every, at_least(1)));
  TraceLines lines;
  std::string text;
  for (std::int64_t step = 0; step < steps; ++step) {
    const cost::Announced change = load.announced_at(step);
    if (step % every != 0 && change == cost::Announced::kNothing) continue;
    DYNMO_ASSIGN(const std::string line, lines.add(step, change, load.at(step)));
    text += line;
  }
  return text;
}

Expected<void> record(const LoadModel& load, std::int64_t steps, std::int64_t every,
                      const std::filesystem::path& path) {
  DYNMO_ASSIGN(const std::string text, trace_text(load, steps, every));
  return write_file_durably(path, text);
}

Expected<std::unique_ptr<LoadModel>> parse_trace(std::string_view text, std::string_view name) {
  if (text.empty()) {
    return make_error(ErrorCode::kBadInput, "{}: is empty, wanted a \"{}\" file", name, kFormat);
  }
  const std::string head = fmt::format("{}: line 1", name);
  DYNMO_ASSIGN(Json first, parse_json(text.substr(0, text.find('\n')), head));
  DYNMO_ASSIGN(cost::ModelCost header, read_header(first, head));
  std::optional<Recording> recording;
  if (const auto run = first.find("run"); run != first.end()) {
    DYNMO_ASSIGN(RunStart start, parse_run_start(*run, head, header.size()));
    recording = Recording{.start = std::move(start)};
  }
  TraceStep before = columns_of(header);
  before.step = -1;
  std::vector<TraceStep> steps;
  bool is_header = true;
  const auto add = [&](const Json& json, const std::string& origin) -> Expected<void> {
    if (std::exchange(is_header, false)) return {};
    DYNMO_ASSIGN(before, read_step(json, origin, before));
    steps.push_back(before);
    const auto measured = json.find("measured");
    if (!recording || measured == json.end()) return {};
    DYNMO_ASSIGN(recording->steps[before.step],
                 parse_observation(*measured, origin, header.size()));
    if (before.moving) recording->moving.insert(before.step);
    return {};
  };
  DYNMO_TRY(visit_json_lines(text, name, add));
  if (steps.empty()) {
    return make_error(ErrorCode::kBadInput, "{}: has no steps, wanted a line for at least one",
                      name);
  }
  // Keeps a recording only if no step between its first and last is missing, because decisions
  // depend on all of them.
  const bool whole =
      recording && !recording->steps.empty() &&
      std::ssize(recording->steps) == recording->steps.rbegin()->first - steps.front().step + 1;
  if (!whole) recording.reset();
  return std::unique_ptr<LoadModel>(
      std::make_unique<Replay>(std::move(header), std::move(steps), std::move(recording)));
}

Expected<std::unique_ptr<LoadModel>> read_trace(const std::filesystem::path& path) {
  constexpr std::size_t kMaxTraceBytes = std::size_t{1} << 30;
  DYNMO_ASSIGN(const std::string text, read_file(path, kMaxTraceBytes));
  return parse_trace(text, path.string());
}

}  // namespace dynmo::dynamism
