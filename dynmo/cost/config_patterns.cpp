// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "dynmo/cost/config_keys.h"

namespace dynmo::cost {
namespace {

// Reads numbers of blocks, from a list or from text with commas. Returns them in ascending order.
std::vector<std::int64_t> numbers(ConfigKeys& keys, const std::string& key) {
  std::vector<std::int64_t> values;
  const Json* found = keys.find(key);
  if (found->is_string()) {
    std::istringstream text(found->get<std::string>());
    for (std::string word; std::getline(text, word, ',');) {
      values.push_back(std::atoll(word.c_str()));
    }
  } else if (found->is_array() && std::all_of(found->begin(), found->end(), [](const Json& value) {
               return value.is_number_integer();
             })) {
    for (const Json& value : *found) values.push_back(value.get<std::int64_t>());
  } else {
    keys.fail(key, fmt::format("is {}, wanted numbers of blocks", found->dump()));
  }
  std::sort(values.begin(), values.end());
  return values;
}

// Marks the blocks of MiniMax-M3 that choose keys with an indexer.
void mark_sparse_attention(ConfigKeys& keys, const Json& sparse, std::vector<std::string>& kinds) {
  const auto flags = sparse.is_object() ? sparse.find("sparse_attention_freq") : sparse.end();
  if (flags == sparse.end() || !flags->is_array() || flags->size() < kinds.size()) {
    keys.fail("sparse_attention_config",
              fmt::format("has no sparse_attention_freq of {} blocks", kinds.size()));
    return;
  }
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    if ((*flags)[i] != 0) kinds[i] = "minimax_m3_sparse";
  }
}

}  // namespace

std::vector<std::string> attention_kinds(ConfigKeys& keys, const FamilyRow& row,
                                         std::int64_t blocks) {
  std::vector<std::string> kinds = keys.list("layer_types", blocks);
  if (!kinds.empty()) return kinds;
  kinds.assign(static_cast<std::size_t>(blocks), "full_attention");
  const auto set = [&](const std::string& kind, auto&& rule) {
    for (std::int64_t i = 0; i < blocks; ++i) {
      if (rule(i)) kinds[static_cast<std::size_t>(i)] = kind;
    }
  };
  const auto flagged = [&](const std::string& kind, const std::vector<std::string>& flags) {
    set(kind, [&](std::int64_t i) {
      return !flags.empty() && flags[static_cast<std::size_t>(i)] != "0";
    });
  };
  if (keys.has("hybrid_layer_pattern")) {
    flagged("sliding_attention", keys.list("hybrid_layer_pattern", blocks));
  } else if (row.has(kSlidingSinks)) {
    set("sliding_attention", [](std::int64_t i) { return i > 0 && (i + 1) % 6 != 0; });
  } else if (keys.has("full_attention_interval")) {
    const std::int64_t every = keys.size("full_attention_interval");
    set("linear_attention", [&](std::int64_t i) { return (i + 1) % every != 0; });
  } else if (keys.has("sliding_window_pattern")) {
    const std::int64_t every = keys.size("sliding_window_pattern");
    set("sliding_attention", [&](std::int64_t i) { return (i + 1) % every != 0; });
    if (row.has(kGlobalHeads)) kinds.back() = "full_attention";
  } else if (keys.has("attention_chunk_size")) {
    if (keys.has("no_rope_layers") && !keys.find("no_rope_layers")->empty()) {
      flagged("chunked_attention", keys.list("no_rope_layers", blocks));
    } else {
      const std::int64_t every = keys.size("no_rope_layer_interval", 4);
      set("chunked_attention", [&](std::int64_t i) { return (i + 1) % every != 0; });
    }
  } else if (const Json* sparse = keys.find("sparse_attention_config"); sparse != nullptr) {
    mark_sparse_attention(keys, *sparse, kinds);
  }
  if (row.has(kIndexer)) kinds.assign(kinds.size(), "indexed_attention");
  return kinds;
}

std::vector<bool> own_indexers(ConfigKeys& keys, std::int64_t blocks) {
  std::vector<bool> own;
  for (const std::string& type : keys.list("indexer_types", blocks)) own.push_back(type == "full");
  if (!own.empty()) return own;
  const std::int64_t every = keys.size("index_topk_freq", 1);
  const std::int64_t offset = keys.size("index_skip_topk_offset", 2, 0);
  for (std::int64_t i = 0; i < blocks; ++i) {
    own.push_back(std::max<std::int64_t>(i - offset + 1, 0) % every == 0);
  }
  return own;
}

std::vector<bool> sparse_blocks(ConfigKeys& keys, std::int64_t blocks) {
  std::vector<bool> sparse(static_cast<std::size_t>(blocks), true);
  const auto set = [&](auto&& rule) {
    for (std::int64_t i = 0; i < blocks; ++i) sparse[static_cast<std::size_t>(i)] = rule(i);
  };
  const auto listed = [&](const std::vector<std::string>& values, auto&& is_sparse) {
    if (values.empty()) return;
    set([&](std::int64_t i) { return is_sparse(values[static_cast<std::size_t>(i)]); });
  };
  const Json* step = keys.find("moe_layer_freq");
  const std::int64_t first = keys.size("first_k_dense_replace", 0, 0);
  if (keys.has("mlp_layer_types")) {
    listed(keys.list("mlp_layer_types", blocks),
           [](const std::string& kind) { return kind != "dense"; });
  } else if (step != nullptr && step->is_array()) {
    listed(keys.list("moe_layer_freq", blocks),
           [](const std::string& value) { return value != "0"; });
  } else if (keys.has("moe_layers") || keys.has("moe_layers_enum")) {
    const std::vector<std::int64_t> chosen =
        numbers(keys, keys.has("moe_layers") ? "moe_layers" : "moe_layers_enum");
    set([&](std::int64_t i) { return std::binary_search(chosen.begin(), chosen.end(), i); });
  } else {
    if (step != nullptr && *step != 1) {
      keys.fail("moe_layer_freq", fmt::format("is {}, wanted 1 or a list", step->dump()));
    }
    const std::int64_t every =
        keys.size(keys.first_of({"interleave_moe_layer_step", "decoder_sparse_step"}), 1);
    std::vector<std::int64_t> dense;
    if (keys.has("mlp_only_layers")) dense = numbers(keys, "mlp_only_layers");
    set([&](std::int64_t i) {
      return i >= first && (i + 1) % every == 0 &&
             !std::binary_search(dense.begin(), dense.end(), i);
    });
  }
  return sparse;
}

std::vector<std::string> single_kinds(ConfigKeys& keys) {
  std::vector<std::string> kinds;
  if (const Json* pattern = keys.find("hybrid_override_pattern"); pattern != nullptr) {
    if (!pattern->is_string() || pattern->get<std::string>().empty()) {
      keys.fail("hybrid_override_pattern",
                fmt::format("is {}, wanted letters such as M*-E", pattern->dump()));
      return {"mlp"};
    }
    for (const char letter : pattern->get<std::string>()) {
      const std::string_view letters = "M*-E";
      const auto place = letters.find(letter);
      constexpr std::string_view kKinds[] = {"mamba", "attention", "mlp", "moe"};
      if (place == std::string_view::npos) {
        keys.fail("hybrid_override_pattern",
                  fmt::format("has '{}', known are M, *, - and E", letter));
        return {"mlp"};
      }
      kinds.emplace_back(kKinds[place]);
    }
    return kinds;
  }
  const std::string key = keys.first_of({"layers_block_type", "layer_types"});
  const Json* list = keys.find(key);
  const std::size_t count = list == nullptr ? 0 : list->size();
  if (count == 0) {
    keys.fail(key, "is missing or empty, wanted the kind of each block");
    return {"mlp"};
  }
  for (std::string& kind : keys.list(key, static_cast<std::int64_t>(count))) {
    if (kind == "linear_attention") kind = "mamba";
    if (kind == "full_attention") kind = "attention";
    kinds.push_back(std::move(kind));
  }
  return kinds.empty() ? std::vector<std::string>{"mlp"} : kinds;
}

std::vector<std::int64_t> compressions(ConfigKeys& keys, std::int64_t blocks) {
  const bool ratios = keys.has("compress_ratios");
  const char* key = ratios ? "compress_ratios" : "layer_types";
  if (!keys.has(key)) keys.fail("compress_ratios", "is missing");
  std::vector<std::int64_t> values;
  for (const std::string& value : keys.list(key, blocks)) {
    if (value == "0" || value == "sliding_attention") {
      values.push_back(0);
    } else if (value == "4" || value == "compressed_sparse_attention") {
      values.push_back(4);
    } else if (value == "128" || value == "heavily_compressed_attention") {
      values.push_back(128);
    } else {
      keys.fail(key, fmt::format("has {}, which is not planned", value));
      return {};
    }
  }
  return values;
}

}  // namespace dynmo::cost
