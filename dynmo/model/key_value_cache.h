// SPDX-License-Identifier: Apache-2.0
#pragma once

// Holds what attention layers have read, so that generating a token runs the layers on that token
// alone. These are the keys and values of every token so far, by layer.
//
// Its owner passes it to the layers in LayerContext::cache, each time with the tokens that follow.
// Then the owner says how many tokens these were. Layers that process single tokens need only the
// position. A layer that reads some of the tokens has the keys and values of those alone.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>

#include "dynmo/core/ids.h"

namespace dynmo::model {

// Keys and values of all tokens that each layer has read. One thread uses it.
class KeyValueCache {
 public:
  // Holds at most `max_tokens` of every sequence. Memory grows with the tokens that are there.
  explicit KeyValueCache(std::int64_t max_tokens) : max_tokens_(max_tokens) {}

  // Returns the number of tokens in every sequence that all layers have read.
  [[nodiscard]] std::int64_t tokens() const { return tokens_; }
  struct KeyValues {
    at::Tensor k_BTHK;
    at::Tensor v_BTHK;
  };
  // Adds keys and values of the next tokens that a layer reads. Returns views of all that it has
  // read. A second call before advance() replaces the first. Requires the same number of sequences
  // each time.
  [[nodiscard]] KeyValues append(LayerId layer, const at::Tensor& k_BTHK, const at::Tensor& v_BTHK);
  // Adds `tokens` to tokens(), after all layers have read them.
  void advance(std::int64_t tokens);
  // Removes all keys and values, and keeps their memory for new ones.
  void clear();
  // Returns the number of tokens that a layer has read of every sequence.
  [[nodiscard]] std::int64_t tokens_of(LayerId layer) const;

 private:
  struct Room {
    KeyValues all = {};       // may be longer than `tokens`
    std::int64_t tokens = 0;  // tokens that the layer has read
    std::int64_t next = 0;    // tokens appended since the last advance()
  };
  void reserve(at::Tensor& room_BTHK, const at::Tensor& like_BTHK, std::int64_t kept,
               std::int64_t tokens) const;

  std::int64_t max_tokens_;
  std::int64_t tokens_ = 0;
  std::map<LayerId, Room> rooms_;
};

}  // namespace dynmo::model
