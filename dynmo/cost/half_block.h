// SPDX-License-Identifier: Apache-2.0
#pragma once

// The amounts of a half block for a token: weights, products, stash. Every family of decoders
// consists of these few kinds (hugging_face.h). Costs follow from their sums alone (transformer.h).
// docs/costs.md has the formulas.

#include <cstdint>
#include <string>
#include <vector>

namespace dynmo::cost {

enum class LayerKind { kEmbedding, kAttention, kMlp, kMoe, kHead };

// Scores of a token's queries with the keys of earlier tokens, and the sum of their values.
struct AttentionCore {
  double heads = 0;
  double query_size = 0;
  double value_size = 0;  // 0: scores only, of an indexer
  double window = 0;      // most tokens that one attends to; 0: all before it
  friend bool operator==(const AttentionCore&, const AttentionCore&) = default;
};

struct HalfBlock {
  LayerKind kind = LayerKind::kMlp;
  std::string name;  // "attention", "mlp", "moe", "mamba", ...
  int block = 0;
  double parameters = 0;  // all of them
  double matrices = 0;    // weights that every token is multiplied with
  double experts = 0;     // in the block
  double chosen = 0;      // experts that a token visits
  double expert = 0;      // weights of one
  double scan_flops = 0;  // recurrences, in chunks: FLOPs of F
  double kept = 0;        // elements of the stash
  double kept_bytes = 0;  // the stash that does not depend on the size of an element
  double moved = 0;       // elements read or written, without the first norm and residual sum
  std::vector<AttentionCore> cores;
  friend bool operator==(const HalfBlock&, const HalfBlock&) = default;

  void multiply(double in, double out, bool bias = false);
  // Adds a norm within the half block, with `weights` weights. Its input of `width` elements is
  // kept, and read and written once.
  void norm(double width, double weights);
};

// The norms of a half block: hidden size, biases of the norms, a second norm behind (Gemma).
struct BlockNorms {
  double hidden = 0;
  bool biases = false;
  bool behind = false;
};

enum class QueryKeyNorm { kNone, kHead, kWide };   // weights of one head, or of all of them
enum class OutputGate { kNone, kHead, kElement };  // a factor of a head or of an element
enum class Indexer { kNone, kQueries, kLatent };   // of MiniMax-M3; of DeepSeek V3.2

// Grouped-query attention.
struct AttentionShape {
  BlockNorms norms;
  double heads = 0;
  double kv_heads = 0;
  double head_size = 0;
  double value_size = 0;
  double window = 0;
  bool rotary = true;
  bool qkv_biases = false;
  bool output_bias = false;
  bool sinks = false;         // a learned score a head
  bool key_is_value = false;  // one projection for both
  QueryKeyNorm norm = QueryKeyNorm::kNone;
  OutputGate gate = OutputGate::kNone;
  Indexer indexer = Indexer::kNone;
  double index_heads = 0;
  double index_size = 0;
};
[[nodiscard]] HalfBlock attention_half(const AttentionShape& shape);

// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). Keys and values are computed from a
// narrow latent vector, and queries too unless `query_rank` is 0.
struct LatentAttentionShape {
  BlockNorms norms;
  double heads = 0;
  double query_rank = 0;
  double latent_rank = 0;
  double plain_size = 0;   // of a head's query, without positions
  double rotary_size = 0;  // with positions; its key is common to all heads
  double value_size = 0;
  double window = 0;
  bool biases = false;
  Indexer indexer = Indexer::kNone;
  double index_heads = 0;
  double index_size = 0;
};
[[nodiscard]] HalfBlock latent_attention_half(const LatentAttentionShape& shape);

// Attention of DeepSeek-V4. All heads have one key of `head_size`, which is the value too. The
// output is computed by way of `groups` narrow vectors. `compression` tokens become one key: 0, 4
// (with an indexer) or more.
struct CompressedAttentionShape {
  BlockNorms norms;
  double heads = 0;
  double head_size = 0;
  double query_rank = 0;
  double groups = 0;
  double output_rank = 0;
  double window = 0;
  double compression = 0;
  Indexer indexer = Indexer::kNone;
  double index_heads = 0;
  double index_size = 0;
};
[[nodiscard]] HalfBlock compressed_attention_half(const CompressedAttentionShape& shape);

// The gated delta rule (arXiv 2412.06464), as in Qwen3-Next.
struct DeltaShape {
  BlockNorms norms;
  double key_heads = 0;
  double key_size = 0;
  double value_heads = 0;
  double value_size = 0;
  double kernel = 0;  // of the convolution
};
[[nodiscard]] HalfBlock delta_half(const DeltaShape& shape);

// Mamba-2 (arXiv 2405.21060).
struct StateSpaceShape {
  BlockNorms norms;
  double heads = 0;
  double head_size = 0;
  double groups = 0;
  double state = 0;
  double kernel = 0;
  double chunk = 0;
  bool biases = false;
  bool kernel_bias = false;
};
[[nodiscard]] HalfBlock state_space_half(const StateSpaceShape& shape);

struct MlpShape {
  BlockNorms norms;
  double width = 0;
  bool gated = true;
  bool biases = false;
};
[[nodiscard]] HalfBlock mlp_half(const MlpShape& shape);

// Experts, and an MLP that all tokens visit.
struct MoeShape {
  BlockNorms norms;
  double experts = 0;
  double chosen = 0;
  double width = 0;
  double latent = 0;        // width of the vectors that the experts take; 0: hidden
  double shared_width = 0;  // of the common MLP; 0: there is none
  bool gated = true;
  bool router_bias = false;
  bool expert_biases = false;
  bool common_biases = false;  // of the common MLP and the latent projections
  bool shared_gate = false;    // a factor for the common MLP
  bool scaled_router = false;  // Gemma 4: factors of the router, and norms around both parts
};
[[nodiscard]] HalfBlock moe_half(const MoeShape& shape);

// Adds hyper-connections of `streams` residual streams (DeepSeek-V4).
void add_streams(HalfBlock& half, double hidden, double streams);

}  // namespace dynmo::cost
