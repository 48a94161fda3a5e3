// SPDX-License-Identifier: Apache-2.0
#include "dynmo/weights/mixtral.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/toml.h"
#include "dynmo/dynamism/moe/options.h"

namespace dynmo::weights {
namespace {

using checkpoint::DType;
using checkpoint::TensorView;

Expected<void> add(TensorMap& tensors, const std::string& name, const TensorView& tensor,
                   std::string_view given, std::string_view origin) {
  if (tensors.emplace(name, tensor).second) return {};
  return make_error(ErrorCode::kBadInput,
                    "'{}': tensor '{}' is there, and '{}', too, which holds the same: wanted one "
                    "of them",
                    origin, name, given);
}

// A tensor with the matrices of all experts, one after another. `names` are those of one expert's
// matrices, each [rows, columns].
struct Fused {
  std::string name;
  std::vector<const char*> names;
  std::int64_t rows;
  std::int64_t columns;
};

Expected<void> separate(TensorMap& tensors, const std::string& block, const Fused& fused,
                        std::int64_t experts, std::string_view origin) {
  const auto found = tensors.find(block + fused.name);
  if (found == tensors.end()) return {};
  const std::string given = found->first;
  const TensorView all = found->second;
  const auto parts = static_cast<std::int64_t>(fused.names.size());
  const std::array wanted = {experts, parts * fused.rows, fused.columns};
  if (!std::ranges::equal(all.shape, wanted)) {
    return make_error(ErrorCode::kBadInput,
                      "'{}': tensor '{}' has shape [{}], wanted [{}] by its config", origin, given,
                      fmt::join(all.shape, ", "), fmt::join(wanted, ", "));
  }
  if (all.dtype != DType::kF32 && all.dtype != DType::kF16 && all.dtype != DType::kBF16) {
    return make_error(ErrorCode::kBadInput, "'{}': tensor '{}' is {}, wanted F32, F16 or BF16",
                      origin, given, checkpoint::name(all.dtype));
  }
  tensors.erase(found);
  const std::size_t bytes = all.bytes.size() / static_cast<std::size_t>(experts * parts);
  std::span<const std::byte> left = all.bytes;
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    for (const char* part : fused.names) {
      const std::string name =
          fmt::format("{}block_sparse_moe.experts.{}.{}.weight", block, expert, part);
      DYNMO_TRY(add(tensors, name,
                    {.name = name,
                     .dtype = all.dtype,
                     .shape = {fused.rows, fused.columns},
                     .bytes = left.first(bytes)},
                    given, origin));
      left = left.subspan(bytes);
    }
  }
  return {};
}

Expected<void> rename_router(TensorMap& tensors, const std::string& block,
                             std::string_view origin) {
  const auto found = tensors.find(block + "mlp.gate.weight");
  if (found == tensors.end()) return {};
  const std::string given = found->first;
  const TensorView router = found->second;
  tensors.erase(found);
  return add(tensors, block + "block_sparse_moe.gate.weight", router, given, origin);
}

}  // namespace

Expected<void> separate_experts(TensorMap& tensors, const cost::DecoderShape& shape,
                                const Experts& experts, std::string_view origin) {
  const Fused up = {"mlp.experts.gate_up_proj", {"w1", "w3"}, shape.intermediate, shape.hidden};
  const Fused down = {"mlp.experts.down_proj", {"w2"}, shape.hidden, shape.intermediate};
  for (int i = 0; i < shape.blocks; ++i) {
    const std::string block = fmt::format("model.layers.{}.", i);
    DYNMO_TRY(rename_router(tensors, block, origin));
    DYNMO_TRY(separate(tensors, block, up, experts.count, origin));
    DYNMO_TRY(separate(tensors, block, down, experts.count, origin));
  }
  return {};
}

dynamism::SourceOptions sources_of(const Experts& experts) {
  dynamism::SourceOptions sources;
  auto& moe = sources.enable<dynamism::MoeOptions>();
  moe.experts = static_cast<int>(experts.count);  // (The limits of a config make it fit.)
  moe.top_k = static_cast<int>(experts.per_token);
  return sources;
}

namespace {

// A key of [moe] with a value that a Mixtral does not have.
struct NotInMixtral {
  std::string key;
  std::string wanted;
};

std::optional<NotInMixtral> not_in_mixtral(const dynamism::MoeOptions& moe) {
  if (moe.router != dynamism::MoeRouter::kTopK) return NotInMixtral{"router", "'top_k'"};
  if (moe.capacity_factor != 0) return NotInMixtral{"capacity_factor", "0: no token dropped"};
  if (moe.top_k < 2) return NotInMixtral{"top_k", "2 or more, whose gates sum to 1"};
  return {};
}

}  // namespace

Expected<HuggingFaceModel> exported_model(const model::DecoderConfig& config,
                                          const dynamism::SourceOptions& sources,
                                          std::string_view origin) {
  HuggingFaceModel model{.decoder = config};
  if (!sources.enabled<dynamism::MoeOptions>()) return model;
  dynamism::MoeOptions moe = sources.get<dynamism::MoeOptions>();
  if (const auto found = not_in_mixtral(moe)) {
    std::string value;
    for (const dynamism::SourceKey& key : dynamism::keys_of(moe)) {
      if (key.name == found->key) value = toml_value(key.field);
    }
    return make_error(ErrorCode::kBadInput,
                      "'{}' was trained with moe.{} = {}, which transformers' Mixtral does not "
                      "have: wanted {}",
                      origin, found->key, value, found->wanted);
  }
  auto* llama = std::get_if<model::LlamaConfig>(&model.decoder);
  DYNMO_CHECK(llama != nullptr, "a decoder whose MLPs take experts");
  if (llama->qkv_bias) {
    return make_error(
        ErrorCode::kBadInput,
        "'{}' was trained with model.qkv_bias = true, which transformers' Mixtral does "
        "not have: wanted false",
        origin);
  }
  if (moe.expert_hidden > 0) llama->shape.intermediate = moe.expert_hidden;
  model.experts = Experts{.count = moe.experts, .per_token = moe.top_k};
  return model;
}

}  // namespace dynmo::weights
