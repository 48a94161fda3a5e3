// SPDX-License-Identifier: Apache-2.0
// A model description that is taken has a valid shape, and costs that the planner takes.
#include "dynmo/cost/device.h"
#include "dynmo/cost/hugging_face.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {

Outcome run_target(std::string_view text) {
  constexpr int kMaxBlocks = 256;  // whose costs are computed
  const auto json = parse_json(text, "config.json");
  if (!json) return refused(json.error());
  const auto shape = cost::parse_config(*json, "config.json", 128, 2);
  if (!shape) return refused(shape.error());
  const auto valid = cost::validate(*shape);
  DYNMO_CHECK(valid.has_value(), "a valid shape, got {}", valid.error().message);
  if (shape->blocks > kMaxBlocks) return Outcome::kTaken;
  const auto model = cost::transformer_costs(*shape, cost::devices().front());
  if (!model) {
    (void)refused(model.error());
    return Outcome::kTaken;
  }
  const auto costs = cost::validate(*model);
  DYNMO_CHECK(costs.has_value(), "valid costs, got {}", costs.error().message);
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  return {
      R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 172, "vocab_size": 1000,
          "max_position_embeddings": 256, "tie_word_embeddings": false})",
      R"({"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
          "vocab_size": 1000, "max_position_embeddings": 256, "num_local_experts": 4,
          "num_experts_per_tok": 2})",
      R"({"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 128,
          "n_inner": null, "vocab_size": 1000})"};
}

}  // namespace dynmo::fuzz
