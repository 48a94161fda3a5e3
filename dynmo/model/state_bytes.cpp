// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/state_bytes.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cctype>
#include <sstream>

#include "dynmo/core/check.h"
#include "dynmo/kernels/tensor_memory.h"
#include "dynmo/model/pruned.h"
#include "dynmo/model/units.h"

namespace dynmo::model {
namespace {

constexpr std::uint64_t kMagic = 0x314C594F4D4E5944;  // "DYNMOYL1": a layer's state, version 1

template <typename Byte>
TensorView<Byte> view(const at::Tensor& tensor, std::string name, TensorKind kind) {
  DYNMO_CHECK(tensor.defined() && tensor.is_contiguous() && tensor.is_cpu(),
              "{} defined and contiguous in memory of the CPU", name);
  return {.name = std::move(name),
          .kind = kind,
          .type = tensor.scalar_type(),
          .shape = tensor.sizes().vec(),
          .bytes = {static_cast<Byte*>(tensor.data_ptr()), tensor.nbytes()}};
}

// Calls visit(tensor, name of the parameter or buffer, suffix, kind) in the order of tensors().
template <typename Visit>
void visit_tensors(const LayerState& state, const Visit& visit) {
  const auto visit_all = [&](at::Tensor Parameter::*tensor, const char* suffix, TensorKind kind) {
    for (const Parameter& parameter : state.parameters) {
      visit(parameter.*tensor, parameter.name, suffix, kind);
    }
  };
  visit_all(&Parameter::value, "", TensorKind::kValue);
  if (!state.frozen) {
    visit_all(&Parameter::first_moment, ".first_moment", TensorKind::kFirstMoment);
    visit_all(&Parameter::second_moment, ".second_moment", TensorKind::kSecondMoment);
  }
  for (const Parameter& parameter : state.parameters) {
    if (!parameter.mask.defined()) continue;
    visit(parameter.mask, parameter.name, ".mask", TensorKind::kMask);
  }
  for (const Buffer& buffer : state.buffers) {
    visit(buffer.value, buffer.name, "", TensorKind::kBuffer);
  }
}

template <typename Byte>
std::vector<TensorView<Byte>> views(const LayerState& state) {
  std::vector<TensorView<Byte>> result;
  visit_tensors(
      state, [&](const at::Tensor& tensor, const std::string& name, const char* suffix,
                 TensorKind kind) { result.push_back(view<Byte>(tensor, name + suffix, kind)); });
  return result;
}

void add_to_layout(Digester& digester, const std::string& name, at::IntArrayRef shape, bool decays,
                   bool masked) {
  digester.update(
      fmt::format("{} {} {}{}\n", name, fmt::join(shape, ","), decays, masked ? " masked" : ""));
}

Digest layout(const LayerState& state) {
  Digester digester;
  for (const Parameter& p : state.parameters) {
    add_to_layout(digester, p.name, p.value.sizes(), p.weight_decay, p.mask.defined());
  }
  for (const Buffer& b : state.buffers) {
    digester.update(fmt::format("{} {} buffer {}\n", b.name, fmt::join(b.value.sizes(), ","),
                                c10::toString(b.value.scalar_type())));
  }
  return digester.digest();
}

void put(std::span<std::byte> at, std::uint64_t word) {
  for (std::size_t i = 0; i < 8; ++i) at[i] = static_cast<std::byte>(word >> (8 * i));
}

std::uint64_t get(std::span<const std::byte> at) {
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < 8; ++i) word |= std::to_integer<std::uint64_t>(at[i]) << (8 * i);
  return word;
}

}  // namespace

std::vector<NamedTensor> tensors(LayerState& state) { return views<std::byte>(state); }

std::vector<ConstNamedTensor> tensors(const LayerState& state) {
  return views<const std::byte>(state);
}

Bytes tensor_bytes(const LayerState& state) {
  Bytes total;
  visit_tensors(state, [&](const at::Tensor& tensor, const std::string&, const char*, TensorKind) {
    total += Bytes{static_cast<std::int64_t>(tensor.nbytes())};
  });
  return total;
}

StateHeader header(const LayerState& state) {
  return {.id = state.id,
          .frozen = state.frozen,
          .optimizer_steps = state.optimizer_steps,
          .random_key = state.random_key,
          .layout = layout(state)};
}

std::array<std::byte, kHeaderBytes> pack(const StateHeader& header) {
  std::array<std::byte, kHeaderBytes> bytes;
  const std::span<std::byte> all(bytes);
  put(all, kMagic);
  put(all.subspan(8),
      static_cast<std::uint32_t>(header.id.value) | (std::uint64_t{header.frozen ? 1U : 0U} << 32));
  put(all.subspan(16), static_cast<std::uint64_t>(header.optimizer_steps));
  put(all.subspan(24), header.random_key);
  put(all.subspan(32), header.layout.high);
  put(all.subspan(40), header.layout.low);
  return bytes;
}

Expected<StateHeader> unpack(std::span<const std::byte> bytes) {
  if (bytes.size() != kHeaderBytes) {
    return make_error(ErrorCode::kBadInput, "header of a layer has {} bytes, wanted {}",
                      bytes.size(), kHeaderBytes);
  }
  const std::uint64_t flags = get(bytes.subspan(8)) >> 32;
  if (get(bytes) != kMagic || flags > 1) {
    return make_error(ErrorCode::kBadInput,
                      "these bytes are not the header of a layer as this version writes it; use "
                      "the same version at both ends");
  }
  return StateHeader{
      .id = LayerId{static_cast<std::int32_t>(static_cast<std::uint32_t>(get(bytes.subspan(8))))},
      .frozen = flags == 1,
      .optimizer_steps = static_cast<std::int64_t>(get(bytes.subspan(16))),
      .random_key = get(bytes.subspan(24)),
      .layout = {get(bytes.subspan(32)), get(bytes.subspan(40))}};
}

StateShape shape_of(const LayerState& state) {
  StateShape shape{.frozen = state.frozen, .pruned = {}};
  for (std::size_t i = 0; i < state.parameters.size(); ++i) {
    const Parameter& parameter = state.parameters[i];
    if (!parameter.mask.defined()) continue;
    const bool compressed = is_compressed(parameter);
    shape.pruned[i] = {.kept = kept_weights(parameter.mask),
                       .compressed = compressed,
                       .segments = compressed ? parameter.segments : 0,
                       .by_units = parameter.by_units};
  }
  return shape;
}

std::string to_text(const StateShape& shape) {
  std::string text = shape.frozen ? "f" : "t";
  for (const auto& [index, pruned] : shape.pruned) {
    const char masked = pruned.by_units ? 'u' : 'm';
    text += fmt::format(",{}:{}{}", index, pruned.kept, pruned.compressed ? 'c' : masked);
    if (pruned.segments > 0) text += fmt::format("{}", pruned.segments);
  }
  return text;
}

Expected<StateShape> parse_shape(std::string_view text) {
  StateShape shape;
  std::istringstream stream{std::string(text)};
  char mark = 0;
  bool good = static_cast<bool>(stream >> mark) && (mark == 'f' || mark == 't');
  shape.frozen = mark == 'f';
  while (good && stream >> mark) {
    std::size_t index = 0;
    StateShape::Pruned pruned;
    char colon = 0;
    char format = 0;
    good = mark == ',' && stream >> index >> colon >> pruned.kept >> format && colon == ':' &&
           (format == 'c' || format == 'm' || format == 'u') && pruned.kept >= 0;
    pruned.compressed = format == 'c';
    pruned.by_units = format == 'u';
    if (good && pruned.compressed && std::isdigit(stream.peek()) != 0) {
      good = static_cast<bool>(stream >> pruned.segments);
    }
    shape.pruned[index] = pruned;
  }
  if (good) return shape;
  return make_error(ErrorCode::kInternal, "'{}' is not the shape of a layer's state", text);
}

bool fits(const StateShape& shape, const Layer& layer) {
  const std::vector<ParameterSpec> specs = layer.parameters();
  if (!units_fit(shape, specs)) return false;
  return std::ranges::all_of(shape.pruned, [&](const auto& one) {
    const auto& [index, pruned] = one;
    if (pruned.by_units) return true;
    if (index >= specs.size() || !specs[index].prunable || specs[index].shape.size() != 2) {
      return false;
    }
    const std::int64_t rows = specs[index].shape[0];
    const std::int64_t columns = specs[index].shape[1];
    // A weight is in a segment of its row and in one of its column.
    const std::int64_t segments =
        pruned.compressed ? std::min(2 * pruned.kept, cost::all_segments(rows, columns)) : 0;
    return pruned.kept <= rows * columns && pruned.segments <= segments;
  });
}

PrunedBytes pruned_bytes(const Layer& layer, const StateShape& shape) {
  PrunedBytes bytes;
  const std::vector<ParameterSpec> specs = layer.parameters();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    std::int64_t weights = c10::multiply_integers(specs[i].shape);
    if (const auto pruned = shape.pruned.find(i); pruned != shape.pruned.end()) {
      bytes.masks += Bytes{(weights + 7) / 8};
      if (pruned->second.by_units) weights = pruned->second.kept;
      if (pruned->second.compressed) {
        weights = pruned->second.kept;
        bytes.patterns += pattern_bytes(weights, specs[i].shape[0], specs[i].shape[1]);
      }
    }
    bytes.values += Bytes{4 * weights};
  }
  return bytes;
}

double product_time(const Layer& layer, const StateShape& shape, const cost::ProductFit& fit) {
  double all = 0;
  double left = 0;  // weights of dense products that take the same time
  const std::vector<ParameterSpec> specs = layer.parameters();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (!specs[i].prunable) continue;
    const auto weights = static_cast<double>(c10::multiply_integers(specs[i].shape));
    const auto pruned = shape.pruned.find(i);
    const bool compressed = pruned != shape.pruned.end() && pruned->second.compressed;
    constexpr double kLeast = 1e-6;  // minimum share, as a layer takes some time
    all += weights;
    if (!compressed) {
      // A matrix without some units has a smaller dense product, whose time follows its weights.
      const bool units = pruned != shape.pruned.end() && pruned->second.by_units;
      left +=
          units ? std::max(static_cast<double>(pruned->second.kept), kLeast * weights) : weights;
      continue;
    }
    const cost::Occupancy of_matrix = cost::occupancy(pruned->second.kept, pruned->second.segments,
                                                      specs[i].shape[0], specs[i].shape[1]);
    left += weights * std::clamp(fit.time(of_matrix), kLeast, 1.0);
  }
  return all > 0 ? left / all : 1;
}

LayerState allocate_tensors_like(const Layer& layer, LayerId id, const StateShape& shape) {
  DYNMO_CHECK(fits(shape, layer), "a shape of a state of {}, got {}", layer.name(), to_text(shape));
  LayerState state;
  state.id = id;
  state.frozen = shape.frozen;
  std::vector<std::vector<std::int64_t>> sizes;
  for (const ParameterSpec& spec : layer.parameters()) {
    Parameter& parameter = state.parameters.emplace_back();
    parameter.name = spec.name;
    parameter.weight_decay = spec.weight_decay;
    sizes.push_back(spec.shape);
    const auto pruned = shape.pruned.find(state.parameters.size() - 1);
    if (pruned == shape.pruned.end()) continue;
    const std::int64_t weights = c10::multiply_integers(spec.shape);
    if (pruned->second.compressed) sizes.back() = {pruned->second.kept};
    if (pruned->second.by_units) {
      sizes.back() = shape_with(spec, units_of(spec, pruned->second.kept));
      parameter.by_units = true;
    }
    parameter.segments = pruned->second.segments;
    parameter.mask = at::empty({(weights + 7) / 8}, at::kByte);
  }
  // In the order of tensors(), gradients last.
  const std::size_t count = sizes.size();
  const std::size_t kinds = state.frozen ? 1 : 4;
  for (std::size_t i = count; i < kinds * count; ++i) sizes.push_back(sizes[i - count]);
  std::vector<at::Tensor> all = kernels::allocate_together(sizes, state.frozen ? 0 : count);
  for (std::size_t i = 0; i < count; ++i) {
    Parameter& parameter = state.parameters[i];
    parameter.value = std::move(all[i]);
    if (state.frozen) continue;
    parameter.first_moment = std::move(all[count + i]);
    parameter.second_moment = std::move(all[2 * count + i]);
    parameter.gradient = std::move(all[3 * count + i]);
  }
  for (const BufferSpec& spec : layer.buffers()) {
    state.buffers.push_back({spec.name, at::empty(spec.shape, spec.type), spec.on_host});
  }
  return state;
}

void complete_memory(const LayerState& state) {
  // In the order in which they are filled.
  for (at::Tensor Parameter::*tensor : {&Parameter::value, &Parameter::first_moment,
                                        &Parameter::second_moment, &Parameter::gradient}) {
    for (const Parameter& parameter : state.parameters) {
      if ((parameter.*tensor).defined()) kernels::back_memory(parameter.*tensor);
    }
  }
}

LayerState allocate_like(const Layer& layer, LayerId id, const StateShape& shape) {
  LayerState state = allocate_tensors_like(layer, id, shape);
  complete_memory(state);
  return state;
}

Expected<LayerState> allocate_like(const Layer& layer, const StateHeader& header) {
  LayerState state = allocate_like(layer, header.id, {.frozen = header.frozen, .pruned = {}});
  if (layout(state) != header.layout) {
    return make_error(ErrorCode::kBadInput,
                      "state of layer {} has other parameters or shapes than {} of this model; use "
                      "the same model at both ends",
                      header.id, layer.name());
  }
  state.optimizer_steps = header.optimizer_steps;
  state.random_key = header.random_key;
  return state;
}

Digest digest(const LayerState& state) {
  Digester digester;
  digester.update(pack(header(state)));
  for (const ConstNamedTensor& tensor : tensors(state)) digester.update(tensor.bytes);
  return digester.digest();
}

}  // namespace dynmo::model
