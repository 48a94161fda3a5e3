// SPDX-License-Identifier: Apache-2.0
#pragma once

// The model types of Hugging Face's transformers that the planner reads, one row for each family. A
// row has the classes with a language-model head, the parts of half blocks, and the values of
// absent keys.

#include <string>
#include <string_view>
#include <vector>

namespace dynmo::cost {

// A property of a family's half blocks beyond those of Llama.
enum Trait : unsigned {
  kLayerNorm = 1U << 0,         // norms have biases
  kUngated = 1U << 1,           // an MLP of two matrices
  kLearnedPositions = 1U << 2,  // instead of rotary ones
  kNormBehind = 1U << 3,        // norms before and behind each half
  kHeadNorm = 1U << 4,          // norms of queries and keys, with the weights of one head
  kWideNorm = 1U << 5,          // the same, with weights for all heads
  kHeadNormKey = 1U << 6,       // kHeadNorm if use_qk_norm is true
  kQkvBias = 1U << 7,           // always
  kAllBiases = 1U << 8,         // of all projections, always
  kMlpBiases = 1U << 9,         // always
  kNoBiasKeys = 1U << 10,       // attention_bias and mlp_bias mean nothing
  kPlainOutput = 1U << 11,      // attention_bias means Q, K and V only
  kSinks = 1U << 12,            // a learned score a head, in every layer
  kSlidingSinks = 1U << 13,     // in layers with a window, which have twice the key-value heads
  kElementGate = 1U << 14,      // a gate for attention's output
  kHeadGate = 1U << 15,         // a gate a head
  kLatent = 1U << 16,           // multi-head latent attention
  kIndexer = 1U << 17,          // that chooses tokens, where layer_types does not say otherwise
  kExperts = 1U << 18,
  kSharedGate = 1U << 19,    // a factor for the common MLP
  kRouterBias = 1U << 20,    // of the router
  kExpertBiases = 1U << 21,  // of the experts
  kScaledRouter = 1U << 22,  // Gemma 4
  kGlobalHeads = 1U << 23,   // full attention has heads of its own size (Gemma 4)
  kStreams = 1U << 24,       // hyper-connections and compressed attention (DeepSeek-V4)
  kSingles = 1U << 25,       // a block is one mixer, not two (Nemotron-H)
  kPlainNorm = 1U << 26,     // norms of queries and keys have no weights
  kBlockList = 1U << 27,     // block_configs says what each block has (Nemotron-NAS)
};

struct FamilyRow {
  std::vector<std::string_view> types;    // values of model_type
  std::vector<std::string_view> classes;  // with a language-model head
  unsigned traits = 0;
  std::string_view defaults = "{}";  // JSON: values of keys that a file leaves out
  std::string_view names = "{}";     // JSON: its own names of keys

  [[nodiscard]] bool has(Trait trait) const { return (traits & trait) != 0; }
};

// Finds the row of a model type. Returns nullptr if there is none.
[[nodiscard]] const FamilyRow* find_family(std::string_view type);
// Returns all values of model_type, in order.
[[nodiscard]] std::vector<std::string> family_types();

}  // namespace dynmo::cost
