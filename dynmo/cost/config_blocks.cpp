// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "dynmo/cost/config_keys.h"

namespace dynmo::cost {
namespace {

double real(std::int64_t value) { return static_cast<double>(value); }

// Widths of the MLPs and the numbers of experts.
struct Widths {
  std::int64_t dense = 0;
  std::int64_t experts = 0;
  std::int64_t chosen = 0;
  std::int64_t expert = 0;
  std::int64_t shared = 0;
};

class BlockReader {
 public:
  BlockReader(ConfigKeys& keys, const FamilyRow& row, TransformerShape& shape)
      : keys_(keys), row_(row), shape_(shape) {}

  void read() {
    read_sizes();
    read_widths();
    read_biases();
    if (!validate(shape_)) return;  // refused by the caller
    norms_ = {.hidden = real(shape_.hidden),
              .biases = shape_.norm_biases,
              .behind = row_.has(kNormBehind)};
    if (row_.has(kSingles)) {
      read_singles();
    } else if (row_.has(kBlockList)) {
      read_block_list();
    } else if (row_.has(kStreams)) {
      read_streams();
    } else {
      read_pairs();
    }
  }

 private:
  void read_sizes() {
    if (row_.has(kSingles)) {
      shape_.blocks = static_cast<int>(single_kinds(keys_).size());
    } else {
      shape_.blocks = static_cast<int>(keys_.size("num_hidden_layers"));
    }
    shape_.hidden = keys_.size("hidden_size");
    shape_.heads = keys_.size("num_attention_heads");
    const std::string kv = keys_.first_of({"num_key_value_heads", "num_attention_groups"});
    shape_.kv_heads = keys_.size(kv, keys_.flag("multi_query", false) ? 1 : shape_.heads);
    if (shape_.heads % shape_.kv_heads != 0) {
      keys_.fail(kv, fmt::format("is {}, wanted a divisor of the {} heads", shape_.kv_heads,
                                 shape_.heads));
    }
    if (row_.has(kLatent)) {
      shape_.kv_heads = shape_.heads;
      shape_.head_size = keys_.size("qk_nope_head_dim") + keys_.size("qk_rope_head_dim");
    } else {
      shape_.head_size = head_size();
    }
  }

  // Returns the config's head size, or hidden / heads, which must be whole.
  std::int64_t head_size() {
    const std::string key = keys_.first_of({"attention_head_dim", "head_dim"});
    if (keys_.has(key)) return keys_.size(key);
    if (shape_.hidden % shape_.heads != 0) {
      keys_.fail("num_attention_heads",
                 fmt::format("is {}, wanted a divisor of the hidden size {}, or head_dim",
                             shape_.heads, shape_.hidden));
    }
    return shape_.hidden / shape_.heads;
  }

  bool has_experts() {
    if (!row_.has(kExperts)) return false;
    if (row_.has(kScaledRouter) && !keys_.flag("enable_moe_block", false)) {
      (void)keys_.has("num_experts");  // without effect, so counted as read
      return false;
    }
    if (!row_.has(kSingles)) return true;
    (void)keys_.first_of({"n_routed_experts", "n_shared_experts", "moe_latent_size"});
    const std::vector<std::string> kinds = single_kinds(keys_);
    return std::find(kinds.begin(), kinds.end(), "moe") != kinds.end();
  }

  void read_widths() {
    const bool experts = has_experts();
    if (experts) read_experts();
    const std::string dense =
        keys_.first_of({"intermediate_size_mlp", "dense_intermediate_size", "intermediate_size"});
    std::optional<std::int64_t> fallback;
    if (row_.has(kLearnedPositions)) fallback = std::min(4 * shape_.hidden, kMaxConfigSize);
    if (experts && keys_.has("moe_intermediate_size")) fallback = widths_.expert;
    if (row_.has(kBlockList)) fallback = shape_.hidden;  // each block has its own
    widths_.dense = keys_.size(dense, fallback);
    if (experts && row_.has(kScaledRouter)) widths_.shared = widths_.dense;
    shape_.experts = widths_.experts;
    shape_.experts_per_token = widths_.chosen;
    shape_.intermediate = experts ? widths_.expert : widths_.dense;
    shape_.gated_mlp = !row_.has(kUngated);
    shape_.vocabulary = keys_.size("vocab_size");
    // No layer has a weight for a rotary position. So a config may omit their number.
    std::optional<std::int64_t> positions;
    if (!row_.has(kLearnedPositions)) positions = shape_.sequence;
    shape_.positions = keys_.size("max_position_embeddings", positions);
    if (shape_.sequence > shape_.positions) {
      keys_.fail("max_position_embeddings",
                 fmt::format("is {}, less than the sequence of {} tokens that is asked for",
                             shape_.positions, shape_.sequence));
    }
  }

  void read_experts() {
    widths_.experts = keys_.size(keys_.first_of(
        {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}));
    const std::string chosen = keys_.first_of({"num_experts_per_tok", "num_experts_per_token",
                                               "top_k_experts", "moe_top_k", "experts_per_token"});
    widths_.chosen = keys_.size(chosen);
    if (widths_.chosen > widths_.experts) {
      keys_.fail(chosen, fmt::format("is {}, wanted at most the {} experts", widths_.chosen,
                                     widths_.experts));
    }
    widths_.expert = keys_.size(keys_.first_of({"moe_intermediate_size", "intermediate_size"}));
    const std::string shared =
        keys_.first_of({"shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
                        "shared_intermediate_size", "share_expert_dim"});
    const std::int64_t count = keys_.size("n_shared_experts", 0, 0);
    widths_.shared = keys_.size(shared, std::min(count * widths_.expert, kMaxConfigSize), 0);
  }

  void read_biases() {
    const bool keys_count = !row_.has(kNoBiasKeys) && !row_.has(kAllBiases);
    const bool given = keys_count && keys_.flag("attention_bias", false);
    shape_.tied_embedding = keys_.flag("tie_word_embeddings", shape_.tied_embedding);
    if (row_.has(kSingles)) shape_.tied_embedding = false;  // its class never ties
    shape_.learned_positions = row_.has(kLearnedPositions);
    shape_.norm_biases = row_.has(kLayerNorm);
    shape_.qkv_biases = row_.has(kAllBiases) || row_.has(kQkvBias) || given;
    shape_.projection_biases = row_.has(kAllBiases) || (given && !row_.has(kPlainOutput));
    if (row_.has(kPlainOutput) && keys_.flag("attention_out_bias", false)) {
      shape_.projection_biases = true;
    }
    shape_.mlp_biases = row_.has(kAllBiases) || row_.has(kMlpBiases) ||
                        (keys_count && keys_.flag("mlp_bias", false));
  }

  // Reads alternating attention and MLP. Blocks of a kind are equal.
  void read_pairs() {
    const std::int64_t blocks = shape_.blocks;
    const std::vector<std::string> kinds = attention_kinds(keys_, row_, blocks);
    std::vector<bool> sparse(kinds.size(), false);
    std::vector<bool> indexers(kinds.size(), false);
    if (widths_.experts > 0) sparse = sparse_blocks(keys_, blocks);
    if (row_.has(kIndexer)) indexers = own_indexers(keys_, blocks);
    std::map<std::pair<std::string, bool>, HalfBlock> known;
    for (std::size_t block = 0; block < kinds.size(); ++block) {
      const auto [place, is_new] = known.try_emplace({kinds[block], indexers[block]});
      if (is_new) place->second = attention_of(kinds[block], indexers[block]);
      add(place->second, block);
      add(sparse[block] ? moe() : mlp(widths_.dense), block);
    }
  }

  void add(HalfBlock half, std::size_t block) {
    half.block = static_cast<int>(block);
    shape_.halves.push_back(std::move(half));
  }

  [[nodiscard]] HalfBlock mlp(std::int64_t width) const {
    return mlp_half({.norms = norms_,
                     .width = real(width),
                     .gated = shape_.gated_mlp,
                     .biases = shape_.mlp_biases});
  }

  HalfBlock moe() {
    return moe_half({.norms = norms_,
                     .experts = real(widths_.experts),
                     .chosen = real(widths_.chosen),
                     .width = real(widths_.expert),
                     .latent = real(row_.has(kSingles) ? keys_.size("moe_latent_size", 0, 0) : 0),
                     .shared_width = real(widths_.shared),
                     .gated = shape_.gated_mlp,
                     .router_bias = row_.has(kRouterBias),
                     .expert_biases = row_.has(kExpertBiases),
                     .common_biases = shape_.mlp_biases,
                     .shared_gate = row_.has(kSharedGate),
                     .scaled_router = row_.has(kScaledRouter)});
  }

  HalfBlock attention_of(const std::string& kind, bool indexer) {
    if (kind == "linear_attention" && keys_.has("linear_num_key_heads")) return delta();
    const bool indexed =
        row_.has(kIndexer) && (kind == "indexed_attention" || kind == "deepseek_sparse_attention");
    const bool sparse = kind == "minimax_m3_sparse" && keys_.has("sparse_attention_config");
    const bool full = kind == "full_attention" || kind == "attention";
    double window = 0;
    if (kind == "sliding_attention") {
      window = real(keys_.size("sliding_window"));
    } else if (kind == "chunked_attention") {
      window = real(keys_.size("attention_chunk_size"));
    } else if (indexed) {
      window = real(keys_.size("index_topk"));
    } else if (sparse) {
      window = sparse_number("sparse_topk_blocks") * sparse_number("sparse_block_size");
    } else if (!full) {
      keys_.fail("layer_types", fmt::format("has '{}', which is not planned in this family", kind));
    }
    if (row_.has(kLatent)) return latent(window, indexed && indexer);
    return grouped(kind, window);
  }

  // Returns a number of sparse_attention_config.
  double sparse_number(const char* key) {
    const Json* sparse = keys_.find("sparse_attention_config");
    const auto found = sparse->find(key);
    const std::int64_t value =
        found != sparse->end() && found->is_number_integer() ? found->get<std::int64_t>() : 0;
    if (value >= 1 && value <= kMaxConfigSize) return real(value);
    keys_.fail("sparse_attention_config",
               fmt::format("has no {} from 1 to {}", key, kMaxConfigSize));
    return 1;
  }

  HalfBlock latent(double window, bool indexer) {
    LatentAttentionShape shape;
    shape.norms = norms_;
    shape.heads = real(shape_.heads);
    shape.query_rank = real(keys_.has("q_lora_rank") ? keys_.size("q_lora_rank") : 0);
    shape.latent_rank = real(keys_.size("kv_lora_rank"));
    shape.plain_size = real(keys_.size("qk_nope_head_dim"));
    shape.rotary_size = real(keys_.size("qk_rope_head_dim"));
    shape.value_size = real(keys_.size("v_head_dim"));
    shape.window = window;
    shape.biases = shape_.qkv_biases;
    if (indexer) {
      shape.indexer = Indexer::kLatent;
      shape.index_heads = real(keys_.size("index_n_heads"));
      shape.index_size = real(keys_.size("index_head_dim"));
    }
    return latent_attention_half(shape);
  }

  HalfBlock grouped(const std::string& kind, double window) {
    const bool sliding = kind == "sliding_attention";
    AttentionShape shape;
    shape.norms = norms_;
    shape.heads = real(shape_.heads);
    shape.kv_heads = real(shape_.kv_heads);
    shape.head_size = shape.value_size = real(shape_.head_size);
    shape.window = window;
    shape.rotary = !shape_.learned_positions && !row_.has(kSingles);
    shape.qkv_biases = shape_.qkv_biases;
    shape.output_bias = shape_.projection_biases;
    shape.sinks = row_.has(kSinks);
    shape.norm = query_key_norm();
    if (row_.has(kElementGate) && keys_.flag("attn_output_gate", true)) {
      shape.gate = OutputGate::kElement;
    }
    if (row_.has(kHeadGate)) shape.gate = OutputGate::kHead;
    if (row_.has(kGlobalHeads) && kind == "full_attention") set_global_heads(shape);
    if (row_.has(kSlidingSinks)) set_sliding_sinks(shape, sliding);
    if (row_.has(kHeadGate) && sliding) {
      shape.heads = real(keys_.size("num_sliding_attention_heads", shape_.heads));
    }
    if (kind == "minimax_m3_sparse") {
      shape.indexer = Indexer::kQueries;
      shape.index_heads = sparse_number("sparse_num_index_heads");
      shape.index_size = sparse_number("sparse_index_dim");
    }
    return attention_half(shape);
  }

  QueryKeyNorm query_key_norm() {
    if (row_.has(kHeadNormKey)) {
      return keys_.flag("use_qk_norm", false) ? QueryKeyNorm::kHead : QueryKeyNorm::kNone;
    }
    if (row_.has(kPlainNorm)) (void)keys_.flag("use_qk_norm", true);
    if (!row_.has(kHeadNorm) && !row_.has(kWideNorm)) return QueryKeyNorm::kNone;
    if (!keys_.flag("use_qk_norm", true)) {
      keys_.fail("use_qk_norm", "is false, planned is true in this family");
    }
    const std::string_view planned = row_.has(kWideNorm) ? "per_layer" : "per_head";
    const Json* kind = keys_.find("qk_norm_type");
    if (kind != nullptr && *kind != planned) {
      keys_.fail("qk_norm_type",
                 fmt::format("is {}, planned is {} in this family", kind->dump(), planned));
    }
    return row_.has(kWideNorm) ? QueryKeyNorm::kWide : QueryKeyNorm::kHead;
  }

  void set_global_heads(AttentionShape& shape) {
    shape.head_size = shape.value_size = real(keys_.size("global_head_dim"));
    shape.key_is_value = keys_.flag("attention_k_eq_v", false);
    if (shape.key_is_value) {
      shape.kv_heads = real(keys_.size("num_global_key_value_heads", shape_.kv_heads));
    }
  }

  void set_sliding_sinks(AttentionShape& shape, bool sliding) {
    const std::int64_t values = keys_.size("v_head_dim", shape_.head_size);
    shape.value_size = real(values);
    shape.sinks = keys_.flag("add_full_attention_sink_bias", false);
    if (!sliding) return;
    shape.heads = real(keys_.size("swa_num_attention_heads", shape_.heads));
    shape.kv_heads = real(keys_.size("swa_num_key_value_heads", 2 * shape_.kv_heads));
    shape.head_size = real(keys_.size("swa_head_dim", shape_.head_size));
    shape.value_size = real(keys_.size("swa_v_head_dim", values));
    shape.sinks = keys_.flag("add_swa_attention_sink_bias", true);
  }

  HalfBlock delta() {
    return delta_half({.norms = norms_,
                       .key_heads = real(keys_.size("linear_num_key_heads")),
                       .key_size = real(keys_.size("linear_key_head_dim")),
                       .value_heads = real(keys_.size("linear_num_value_heads")),
                       .value_size = real(keys_.size("linear_value_head_dim")),
                       .kernel = real(keys_.size("linear_conv_kernel_dim"))});
  }

  void read_singles() {
    const std::vector<std::string> kinds = single_kinds(keys_);
    for (std::size_t block = 0; block < kinds.size(); ++block) {
      const std::string& kind = kinds[block];
      if (kind == "mamba") {
        add(state_space(), block);
      } else if (kind == "attention") {
        add(grouped("full_attention", 0), block);
      } else if (kind == "mlp") {
        add(mlp(widths_.dense), block);
      } else if (kind == "moe") {
        add(moe(), block);
      } else {
        keys_.fail("layers_block_type",
                   fmt::format("has '{}', known are mamba, attention, mlp and moe", kind));
        return;
      }
    }
  }

  HalfBlock state_space() {
    return state_space_half({.norms = norms_,
                             .heads = real(keys_.size("mamba_num_heads")),
                             .head_size = real(keys_.size("mamba_head_dim")),
                             .groups = real(keys_.size("n_groups")),
                             .state = real(keys_.size("ssm_state_size")),
                             .kernel = real(keys_.size("conv_kernel")),
                             .chunk = real(keys_.size("chunk_size")),
                             .biases = keys_.flag("use_bias", false),
                             .kernel_bias = keys_.flag("use_conv_bias", true)});
  }

  // Reads Nemotron-NAS: blocks without attention, and MLPs of different widths.
  void read_block_list() {
    const Json* list = keys_.find("block_configs");
    if (list == nullptr || !list->is_array() ||
        static_cast<std::int64_t>(list->size()) != shape_.blocks) {
      keys_.fail("block_configs", fmt::format("is not a list of {} blocks", shape_.blocks));
      return;
    }
    for (std::size_t block = 0; block < list->size(); ++block) {
      const Json empty = Json::object();
      const auto part = [&](const char* name) -> const Json& {
        const Json& one = (*list)[block];
        const auto found = one.is_object() ? one.find(name) : one.end();
        return found == one.end() || !found->is_object() ? empty : *found;
      };
      const Json& attention = part("attention");
      const Json& ffn = part("ffn");
      if (attention.value("replace_with_linear", Json(false)) == true ||
          ffn.value("replace_with_linear", Json(false)) == true) {
        keys_.fail("block_configs",
                   fmt::format("has replace_with_linear in block {}, which is not planned", block));
      }
      if (attention.value("no_op", Json(false)) != true) {
        const Json group = attention.value("n_heads_in_group", Json());
        if (!group.is_number_integer() || group.get<std::int64_t>() < 1 ||
            shape_.heads % group.get<std::int64_t>() != 0) {
          keys_.fail("block_configs",
                     fmt::format("has n_heads_in_group {} in block {}, wanted a divisor of the {} "
                                 "heads",
                                 group.dump(), block, shape_.heads));
          return;
        }
        shape_.kv_heads = shape_.heads / group.get<std::int64_t>();
        add(grouped("full_attention", 0), block);
      }
      if (ffn.value("no_op", Json(false)) != true) {
        const Json factor = ffn.value("ffn_mult", Json());
        const double given = factor.is_number() ? factor.get<double>() : 0;
        if (!(given > 0 && given < 1e6)) {
          keys_.fail("block_configs", fmt::format("has ffn_mult {} in block {}, wanted more than 0",
                                                  factor.dump(), block));
          return;
        }
        // Two thirds of a multiple of the hidden size, rounded up to a multiple of 256.
        const auto width = static_cast<std::int64_t>(2 * given * real(shape_.hidden) / 3);
        add(mlp((width + 255) / 256 * 256), block);
      }
    }
    if (shape_.halves.empty()) keys_.fail("block_configs", "has neither attention nor MLP");
  }

  // Reads DeepSeek-V4: attention to a window and to compressed keys, several residual streams.
  void read_streams() {
    const std::vector<std::int64_t> ratios = compressions(keys_, shape_.blocks);
    const std::int64_t streams = keys_.size("hc_mult");
    const double hidden = real(shape_.hidden);
    shape_.streams = streams;
    shape_.head_parameters = real(streams) * real(streams) * hidden + real(streams) + 1;
    CompressedAttentionShape attention;
    attention.norms = norms_;
    attention.heads = real(shape_.heads);
    attention.head_size = real(shape_.head_size);
    attention.query_rank = real(keys_.size("q_lora_rank"));
    attention.groups = real(keys_.size("o_groups"));
    attention.output_rank = real(keys_.size("o_lora_rank"));
    attention.index_heads = real(keys_.size("index_n_heads"));
    attention.index_size = real(keys_.size("index_head_dim"));
    const double window = real(keys_.size("sliding_window", 128));
    const double chosen = real(keys_.size("index_topk"));
    for (std::size_t block = 0; block < ratios.size(); ++block) {
      attention.compression = real(ratios[block]);
      const bool indexed = attention.compression == 4;
      attention.indexer = indexed ? Indexer::kLatent : Indexer::kNone;
      attention.window = window;
      if (attention.compression > 0) {
        attention.window +=
            indexed ? chosen : std::floor(real(shape_.sequence) / attention.compression);
      }
      HalfBlock first = compressed_attention_half(attention);
      HalfBlock second = moe();
      add_streams(first, hidden, real(streams));
      add_streams(second, hidden, real(streams));
      add(std::move(first), block);
      add(std::move(second), block);
    }
  }

  ConfigKeys& keys_;
  const FamilyRow& row_;
  TransformerShape& shape_;
  Widths widths_;
  BlockNorms norms_;
};

}  // namespace

void read_blocks(ConfigKeys& keys, const FamilyRow& row, TransformerShape& shape) {
  BlockReader(keys, row, shape).read();
}

}  // namespace dynmo::cost
