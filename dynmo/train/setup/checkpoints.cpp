// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/checkpoints.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/version.h>

#include <charconv>
#include <cstring>

#include "dynmo/core/bit_mask.h"
#include "dynmo/core/check.h"
#include "dynmo/core/progress.h"
#include "dynmo/kernels/processor.h"
#include "dynmo/model/head_slice.h"
#include "dynmo/model/pruned.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/model/units.h"
#include "dynmo/observe/run_folder.h"

namespace dynmo::train {
namespace {

constexpr const char* kFirstMoment = "optimizer.exp_avg.";
constexpr const char* kSecondMoment = "optimizer.exp_avg_sq.";

checkpoint::DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return checkpoint::DType::kF32;
    case at::kDouble:
      return checkpoint::DType::kF64;
    case at::kBFloat16:
      return checkpoint::DType::kBF16;
    case at::kLong:
      return checkpoint::DType::kI64;
    case at::kInt:
      return checkpoint::DType::kI32;
    case at::kShort:
      return checkpoint::DType::kI16;
    case at::kChar:
      return checkpoint::DType::kI8;
    case at::kByte:
      return checkpoint::DType::kU8;
    case at::kBool:
      return checkpoint::DType::kBool;
    default:
      DYNMO_CHECK(false, "a type that checkpoints hold, got {}", c10::toString(type));
      return checkpoint::DType::kF32;
  }
}

std::span<const std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// Lists what the bits of a run depend on in addition to its config.
Json machine_json(const config::Config& config) {
  Json machine = {{"threads", at::get_num_threads()},
                  {"instruction_set", kernels::instruction_set_name()},
                  {"torch", TORCH_VERSION}};
  if (on_device(config)) {
    machine["device"] = config.run.device;
    if (!config.run.deterministic) machine["deterministic"] = false;
    machine["fused_kernels"] = config.run.fused_kernels;
  }
  if (config.model.shape.head_slices > 1) machine["head_slices"] = config.model.shape.head_slices;
  return machine;
}

template <typename T>
Expected<T> number(const checkpoint::Safetensors& file, const std::string& key, LayerId layer) {
  const auto found = file.metadata().find(key);
  T value{};
  if (found != file.metadata().end()) {
    const char* end = found->second.data() + found->second.size();
    const auto parsed = std::from_chars(found->second.data(), end, value);
    if (parsed.ec == std::errc() && parsed.ptr == end) return value;
  }
  return make_error(ErrorCode::kBadInput,
                    "checkpoint of layer {}: metadata '{}' is missing or not a number", layer, key);
}

Expected<void> copy_tensor(const checkpoint::Safetensors& file, const std::string& name,
                           const at::Tensor& to) {
  const checkpoint::TensorView* from = file.find(name);
  const bool fits = from != nullptr && from->dtype == dtype_of(to.scalar_type()) &&
                    std::ranges::equal(from->shape, to.sizes()) &&
                    from->bytes.size() == to.nbytes();
  if (!fits) {
    return make_error(ErrorCode::kBadInput, "checkpoint: tensor '{}' {}", name,
                      from == nullptr ? "is missing" : "is not of the model's shape and type");
  }
  std::memcpy(to.data_ptr(), from->bytes.data(), from->bytes.size());
  return {};
}

Expected<model::StateShape> shape_in(const checkpoint::Safetensors& file, const model::Layer& layer,
                                     LayerId id) {
  const auto found = file.metadata().find("shape");
  const std::string text = found == file.metadata().end() ? "" : found->second;
  auto shape = model::parse_shape(text);
  if (shape && model::fits(*shape, layer)) return shape;
  return make_error(
      ErrorCode::kBadInput,
      "checkpoint of layer {}: metadata 'shape' is '{}', which is not that of a state "
      "of {}",
      id, text, layer.name());
}

// Loads a pruned value. A file has it as a matrix, with zeros for removed weights, so that other
// programs can read it.
Expected<void> load_pruned(const checkpoint::Safetensors& file, const std::string& name,
                           const std::vector<std::int64_t>& shape, model::Parameter& parameter) {
  DYNMO_TRY(copy_tensor(file, checkpoint::kMask + name, parameter.mask));
  const at::Tensor whole = at::empty(shape, parameter.value.options());
  DYNMO_TRY(copy_tensor(file, name, whole));
  const auto offsets = unpack_mask(model::mask_bits(parameter.mask), whole.numel());
  if (!offsets) {
    return make_error(ErrorCode::kBadInput, "checkpoint: tensor '{}{}': {}", checkpoint::kMask,
                      name, offsets.error().message);
  }
  if (!model::holds_kept_only(parameter)) {
    parameter.value.copy_(whole);
    return {};
  }
  if (std::ssize(*offsets) != parameter.value.numel()) {
    return make_error(ErrorCode::kBadInput,
                      "checkpoint: tensor '{}{}' keeps {} weights, its layer's shape says {}",
                      checkpoint::kMask, name, offsets->size(), parameter.value.numel());
  }
  const auto* from = whole.const_data_ptr<float>();
  auto* to = parameter.value.data_ptr<float>();
  for (std::size_t k = 0; k < offsets->size(); ++k) to[k] = from[(*offsets)[k]];
  return {};
}

// Derives patterns from the masks. Returns kBadInput if a mask does not remove whole units, or has
// other segments than the shape. Older versions wrote no segments.
Expected<void> derive_all(const model::Layer& layer, const model::StateShape& shape,
                          model::LayerState& state) {
  if (const auto whole = model::check_units(state, layer.parameters()); !whole) {
    return make_error(whole.error().code, "checkpoint: {}", whole.error().message);
  }
  model::derive(layer, state);
  for (const auto& [index, pruned] : shape.pruned) {
    const model::Parameter& parameter = state.parameters[index];
    if (pruned.segments == 0 || pruned.segments == parameter.segments) continue;
    return make_error(ErrorCode::kBadInput,
                      "checkpoint: the mask of '{}' in layer {} has {} segments, the layer's shape "
                      "says {}",
                      parameter.name, state.id, parameter.segments, pruned.segments);
  }
  return {};
}

// Loads a layer whose id in the checkpoint is `saved`.
Expected<model::LayerState> load_layer(const checkpoint::VerifiedCheckpoint& checkpoint,
                                       const model::Layer& layer, LayerId saved, LayerId id,
                                       const TensorName& name) {
  DYNMO_ASSIGN(const checkpoint::Safetensors file, checkpoint::read_layer(checkpoint, saved));
  DYNMO_ASSIGN(const model::StateShape shape, shape_in(file, layer, id));
  model::LayerState state = model::allocate_like(layer, id, shape);
  DYNMO_ASSIGN(state.optimizer_steps, number<std::int64_t>(file, "optimizer_steps", id));
  DYNMO_ASSIGN(state.random_key, number<std::uint64_t>(file, "random_key", id));
  for (std::size_t i = 0; i < state.parameters.size(); ++i) {
    model::Parameter& parameter = state.parameters[i];
    const std::string full = name(id, parameter.name);
    if (parameter.mask.defined()) {
      DYNMO_TRY(load_pruned(file, full, layer.parameters()[i].shape, parameter));
    } else {
      DYNMO_TRY(copy_tensor(file, full, parameter.value));
    }
    if (state.frozen) continue;
    DYNMO_TRY(copy_tensor(file, kFirstMoment + full, parameter.first_moment));
    DYNMO_TRY(copy_tensor(file, kSecondMoment + full, parameter.second_moment));
  }
  for (const model::Buffer& buffer : state.buffers) {
    DYNMO_TRY(copy_tensor(file, checkpoint::kBuffer + name(id, buffer.name), buffer.value));
  }
  DYNMO_TRY(derive_all(layer, shape, state));
  return state;
}

// A head of a checkpoint in slices (model/head_slice.h): the model's or that of an exit. `first` is
// its first layer.
struct SavedHead {
  LayerId first;
  std::int64_t slices = 1;
  std::int64_t vocabulary = 0;
  std::vector<checkpoint::Safetensors> files = {};
};

Expected<SavedHead> open_head(const checkpoint::VerifiedCheckpoint& checkpoint, SavedHead head) {
  for (std::int64_t slice = 0; slice < head.slices; ++slice) {
    const LayerId id(head.first.value + static_cast<std::int32_t>(slice));
    DYNMO_ASSIGN(checkpoint::Safetensors file, checkpoint::read_layer(checkpoint, id));
    head.files.push_back(std::move(file));
  }
  return head;
}

// Copies the rows `wanted` of the head's matrix, or of a tensor of its shape, from the slices. The
// tensor's name is `prefix` and the name of the matrix.
Expected<void> copy_rows(const SavedHead& head, const std::string& prefix,
                         const std::string& matrix, const cost::HeadRows& wanted,
                         const at::Tensor& to) {
  for (std::int64_t slice = 0; slice < head.slices; ++slice) {
    const cost::HeadRows rows = cost::head_rows(head.vocabulary, head.slices, slice);
    const cost::HeadRows both = {.begin = std::max(rows.begin, wanted.begin),
                                 .end = std::min(rows.end, wanted.end)};
    if (both.begin >= both.end) continue;
    const at::Tensor part = at::empty({rows.end - rows.begin, to.size(1)}, to.options());
    const std::string name = head.slices == 1 ? matrix : model::name_of({matrix, rows});
    DYNMO_TRY(copy_tensor(head.files[static_cast<std::size_t>(slice)], prefix + name, part));
    to.narrow(0, both.begin - wanted.begin, both.end - both.begin)
        .copy_(part.narrow(0, both.begin - rows.begin, both.end - both.begin));
  }
  return {};
}

// Copies a tensor that one slice has, or several have alike.
Expected<void> copy_whole(const SavedHead& head, const std::string& name, const at::Tensor& to) {
  const auto found = std::ranges::find_if(
      head.files, [&](const auto& file) { return file.find(name) != nullptr; });
  return copy_tensor(found == head.files.end() ? head.files.front() : *found, name, to);
}

// Loads a layer of a head that the checkpoint has in another number of slices. Tensors other than
// the head's matrix can be pruned in the first slice only.
Expected<model::LayerState> load_recut(const SavedHead& head, const model::Layer& layer, LayerId id,
                                       std::int64_t slice, const TensorName& name) {
  const checkpoint::Safetensors& first = head.files.front();
  const auto text = first.metadata().find("shape");
  DYNMO_ASSIGN(model::StateShape shape,
               model::parse_shape(text == first.metadata().end() ? "" : text->second));
  if (slice > 0) shape.pruned.clear();
  model::LayerState state = model::allocate_like(layer, id, shape);
  DYNMO_ASSIGN(state.optimizer_steps, number<std::int64_t>(first, "optimizer_steps", id));
  DYNMO_ASSIGN(state.random_key, number<std::uint64_t>(first, "random_key", id));
  const std::vector<model::ParameterSpec> specs = layer.parameters();
  for (std::size_t i = 0; i < state.parameters.size(); ++i) {
    model::Parameter& parameter = state.parameters[i];
    const std::string full = name(id, parameter.name);
    const auto part = model::parse_matrix_rows(full);
    const auto copy = [&](const std::string& prefix, const at::Tensor& to) -> Expected<void> {
      if (!model::is_head(specs[i])) return copy_whole(head, prefix + full, to);
      const cost::HeadRows all = {.begin = 0, .end = head.vocabulary};
      return copy_rows(head, prefix, part ? part->matrix : full, part ? part->rows : all, to);
    };
    if (parameter.mask.defined()) {
      DYNMO_TRY(load_pruned(first, full, specs[i].shape, parameter));
    } else {
      DYNMO_TRY(copy("", parameter.value));
    }
    if (state.frozen) continue;
    DYNMO_TRY(copy(kFirstMoment, parameter.first_moment));
    DYNMO_TRY(copy(kSecondMoment, parameter.second_moment));
  }
  for (const model::Buffer& buffer : state.buffers) {
    DYNMO_TRY(copy_whole(head, checkpoint::kBuffer + name(id, buffer.name), buffer.value));
  }
  DYNMO_TRY(derive_all(layer, shape, state));
  return state;
}

// Checks that the config continues the checkpoint's training. Once all steps are done, only a
// larger number of steps does.
Expected<void> check_continues(const config::Config& config, const std::string& saved_text,
                               const Restored& restored) {
  const std::string path = restored.checkpoint.path.string();
  config::Config saved;
  DYNMO_TRY(apply_text(saved, saved_text, path + ": config"));
  config::Config same_steps = config;
  same_steps.train.steps = saved.train.steps;
  const std::string key = first_difference(same_steps, saved);
  const bool steps = key.empty() && config.train.steps != saved.train.steps;
  if (steps && restored.step == saved.train.steps && config.train.steps > saved.train.steps) {
    return {};
  }
  const std::string differs =
      steps ? fmt::format("{}; they may grow once all are done, step {} is the newest",
                          first_difference(config, saved), restored.step)
            : key;
  return make_error(ErrorCode::kBadInput,
                    "checkpoint '{}' is of another training: {}; wanted the settings of its run, "
                    "in {}",
                    path, differs.empty() ? "its settings are of another version" : differs,
                    observe::RunFolder(config.run.directory).config().string());
}

}  // namespace

FileOfLayer layer_file(const model::Layer& layer, const model::LayerState& state,
                       const TensorName& name) {
  FileOfLayer result;
  checkpoint::LayerFile& file = result.file;
  file.layer = state.id;
  const auto add = [&](std::string tensor_name, const at::Tensor& tensor) {
    file.tensors.push_back({.name = std::move(tensor_name),
                            .dtype = dtype_of(tensor.scalar_type()),
                            .shape = tensor.sizes().vec(),
                            .bytes = bytes_of(tensor)});
  };
  const std::vector<model::ParameterSpec> specs = layer.parameters();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const model::Parameter& parameter = state.parameters[i];
    const std::string full = name(state.id, parameter.name);
    result.values.push_back(model::dense_value(parameter, specs[i].shape));
    add(full, result.values.back());
    if (parameter.mask.defined()) add(checkpoint::kMask + full, parameter.mask);
    if (state.frozen) continue;
    add(kFirstMoment + full, parameter.first_moment);
    add(kSecondMoment + full, parameter.second_moment);
  }
  for (const model::Buffer& buffer : state.buffers) {
    add(checkpoint::kBuffer + name(state.id, buffer.name), buffer.value);
  }
  file.metadata["optimizer_steps"] = fmt::format("{}", state.optimizer_steps);
  file.metadata["random_key"] = fmt::format("{}", state.random_key);
  file.metadata["shape"] = model::to_text(model::shape_of(state));
  return result;
}

Json state_json(const runtime::Pipeline& pipeline, const config::Config& config,
                const DataIdentity& data) {
  Json json = {{"step", pipeline.next_step()},
               {"identity", identity(config)},
               {"plan", plan::to_json(pipeline.plan())},
               {"machine", machine_json(config)},
               {"config", to_toml(config)}};
  if (!data.tokenizer.empty()) json["tokenizer"] = data.tokenizer;
  if (!data.digest.empty()) json["data"] = data.digest;
  Json sources = dynamism::state(pipeline.sources());
  if (!sources.empty()) json["sources"] = std::move(sources);
  return json;
}

Expected<Restored> restore(const config::Config& config) {
  std::vector<Error> skipped;
  auto found =
      checkpoint::newest_verified(observe::RunFolder(config.run.directory).checkpoints(), &skipped);
  if (!found) {
    return make_error(found.error().code,
                      "{}; wanted a run.directory whose run has a checkpoint to resume from, or a "
                      "new run in another one",
                      found.error().message);
  }
  Restored restored{
      .checkpoint = std::move(*found), .step = 0, .plan = {}, .data = {}, .notes = {}};
  for (const Error& error : skipped) {
    restored.notes.push_back(fmt::format("passed over a damaged checkpoint: {}", error.message));
  }
  const std::string origin = (restored.checkpoint.path / "manifest.json").string();
  JsonObject state(restored.checkpoint.manifest.state, origin, "/state");
  restored.step = state.integer("step");
  const std::string trained = state.string("identity");
  if (trained == checkpoint::kImportedIdentity) {
    return make_error(ErrorCode::kBadInput,
                      "checkpoint '{}' holds imported weights without optimizer state: start from "
                      "it with train.init={} and another run.directory",
                      restored.checkpoint.path.string(), config.run.directory);
  }
  const std::string saved = state.string("config");
  restored.data = {.tokenizer = state.string("tokenizer", ""), .digest = state.string("data", "")};
  state.ignore("machine");
  state.ignore("sources");
  state.ignore("plan");
  DYNMO_TRY(state.finish());
  if (trained != identity(config)) {
    DYNMO_TRY(check_continues(config, saved, restored));
  }
  const Json& state_value = restored.checkpoint.manifest.state;
  if (!state_value.contains("plan")) {
    return make_error(ErrorCode::kBadInput, "{}: /state/plan is missing", origin);
  }
  DYNMO_ASSIGN(restored.plan, plan::parse_plan(state_value["plan"], origin + ": /state/plan"));
  if (state_value.contains("sources")) restored.sources = state_value["sources"];
  const Json machine = state_value.contains("machine") ? state_value["machine"] : Json();
  if (machine != machine_json(config)) {
    restored.notes.push_back(
        fmt::format("the numbers may differ from an undisturbed run in their last bits: it ran "
                    "with {}, this is {}",
                    machine.dump(), machine_json(config).dump()));
  }
  return restored;
}

std::string changed_data(const Restored& restored, const DataIdentity& data,
                         const std::string& path) {
  // A digest and a number of tokens cannot be compared.
  const auto differ = [](const std::string& a, const std::string& b) {
    return !a.empty() && a.ends_with(" tokens") == b.ends_with(" tokens") && !b.empty() && a != b;
  };
  const bool tokenizer = differ(restored.data.tokenizer, data.tokenizer);
  if (!tokenizer && !differ(restored.data.digest, data.digest)) return "";
  return fmt::format(
      "data     '{}' holds other tokens than the {} steps before were trained on{}: give those by "
      "data.path to continue as before",
      path, restored.step,
      tokenizer ? ", of another tokenizer, in which ids mean something else" : "");
}

Expected<runtime::LayerStates> load_states(const Restored& restored, const model::Model& model,
                                           const plan::Plan& plan, Rank rank,
                                           const TensorName& name) {
  // Only heads may have another number of layers in the checkpoint.
  const auto saved_layers = std::ssize(restored.checkpoint.manifest.files);
  const std::vector<model::WholePlace> places = model::whole_places(model);
  std::vector<bool> is_head(model.size(), false);  // by layer with whole heads
  for (std::size_t i = 0; i < model.size(); ++i) {
    if (model::head_words(*model[i]) > 0) is_head[static_cast<std::size_t>(places[i].layer)] = true;
  }
  const auto heads = std::ranges::count(is_head, true);
  const std::int64_t more = saved_layers - (model.empty() ? 0 : places.back().layer + 1);
  const std::int64_t slices = heads == 0 ? 1 : 1 + more / heads;
  const bool recut =
      saved_layers != std::ssize(model) && heads > 0 && more >= 0 && more % heads == 0 &&
      slices <= std::max<std::int64_t>(1, model::head_words(*model.back()) / cost::kSliceRows);
  if (saved_layers != std::ssize(model) && !recut) {
    return make_error(ErrorCode::kBadInput, "checkpoint '{}' has {} layers, the model {}",
                      restored.checkpoint.path.string(), restored.checkpoint.manifest.files.size(),
                      model.size());
  }
  runtime::LayerStates states;
  std::optional<SavedHead> head;  // newest head that was opened
  for (int i = 0; i < plan.layers(); ++i) {
    const LayerId id(i);
    if (plan.owner(id) != rank) continue;
    note_progress();
    const model::Layer& layer = *model[id.index()];
    const model::WholePlace& place = places[id.index()];
    const auto before = std::count(is_head.begin(), is_head.begin() + place.layer, true);
    const LayerId saved(recut ? place.layer + static_cast<int>(before * (slices - 1)) : i);
    if (!recut || !is_head[static_cast<std::size_t>(place.layer)]) {
      DYNMO_ASSIGN(model::LayerState state,
                   load_layer(restored.checkpoint, layer, saved, id, name));
      states.emplace(id, std::move(state));
      continue;
    }
    if (!head || head->first != saved) {
      DYNMO_ASSIGN(
          head, open_head(restored.checkpoint, {.first = saved,
                                                .slices = slices,
                                                .vocabulary = model::head_words(*model.back())}));
    }
    DYNMO_ASSIGN(model::LayerState state, load_recut(*head, layer, id, place.slice, name));
    states.emplace(id, std::move(state));
  }
  return states;
}

}  // namespace dynmo::train
