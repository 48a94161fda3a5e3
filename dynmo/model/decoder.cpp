// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/decoder.h"

#include <ATen/ATen.h>

#include <array>

#include "dynmo/core/nearest.h"
#include "dynmo/model/family_impl.h"
#include "dynmo/model/head_slice.h"

namespace dynmo::model {
namespace {

Model make(const LlamaConfig& config) { return make_llama(config); }
Model make(const Gpt2Config& config) { return make_gpt2(config); }

at::Tensor scores(const LlamaConfig& config, const LayerState& head, const at::Tensor& hidden_BTD) {
  return llama_logits(config, head, hidden_BTD);
}
at::Tensor scores(const Gpt2Config& config, const LayerState& head, const at::Tensor& hidden_BTD) {
  return gpt2_logits(config, head, hidden_BTD);
}

const char* embedding_name(const LlamaConfig&) { return "embed_tokens.weight"; }
const char* embedding_name(const Gpt2Config&) { return "wte.weight"; }

}  // namespace

cost::Family family(const DecoderConfig& config) {
  return static_cast<cost::Family>(config.index());
}

const cost::DecoderShape& shape_of(const DecoderConfig& config) {
  return std::visit([](const auto& c) -> const cost::DecoderShape& { return c.shape; }, config);
}

Expected<void> validate(const DecoderConfig& config) {
  return std::visit([](const auto& c) { return validate(c); }, config);
}

Recipe make_recipe(const DecoderConfig& config) { return decoder_recipe(make_decoder(config)); }

Model make_decoder(const DecoderConfig& config) {
  return std::visit([](const auto& c) { return make(c); }, config);
}

bool tied(const DecoderConfig& config) {
  return std::visit([](const auto& c) { return c.tied_embeddings; }, config);
}

std::vector<Tie> ties(const DecoderConfig& config) {
  return std::visit(
      [](const auto& c) -> std::vector<Tie> {
        std::vector<Tie> ties;
        const std::int64_t slices = c.tied_embeddings ? c.shape.head_slices : 0;
        for (std::int64_t slice = 0; slice < slices; ++slice) {
          Tie tie{.first = LayerId(0),
                  .first_parameter = embedding_name(c),
                  .second = LayerId(head_of(c.shape.blocks).value + static_cast<int>(slice)),
                  .second_parameter = "lm_head.weight"};
          if (slices > 1) {
            tie.rows = cost::head_rows(c.shape.vocabulary, slices, slice);
            tie.second_parameter = name_of({tie.second_parameter, *tie.rows});
          }
          ties.push_back(std::move(tie));
        }
        return ties;
      },
      config);
}

std::string checkpoint_name(const DecoderConfig& config, const Place& place,
                            std::string_view parameter) {
  return std::visit([&](const auto& c) { return checkpoint_name(c, place, parameter); }, config);
}

at::Tensor logits(const DecoderConfig& config, const LayerState& head,
                  const at::Tensor& hidden_BTD) {
  return std::visit([&](const auto& c) { return scores(c, head, hidden_BTD); }, config);
}

}  // namespace dynmo::model
