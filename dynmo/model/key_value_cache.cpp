// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/key_value_cache.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"

namespace dynmo::model {

KeyValueCache::KeyValues KeyValueCache::append(LayerId layer, const at::Tensor& k_BTHK,
                                               const at::Tensor& v_BTHK) {
  const std::int64_t next = k_BTHK.size(1);
  Room& room = rooms_[layer];
  const std::int64_t all = room.tokens + next;
  DYNMO_CHECK(v_BTHK.size(1) == next && tokens_ + next <= max_tokens_,
              "keys and values of at most {} tokens, got {} behind {}", max_tokens_, next, tokens_);
  reserve(room.all.k_BTHK, k_BTHK, room.tokens, all);
  reserve(room.all.v_BTHK, v_BTHK, room.tokens, all);
  room.all.k_BTHK.narrow(1, room.tokens, next).copy_(k_BTHK);
  room.all.v_BTHK.narrow(1, room.tokens, next).copy_(v_BTHK);
  room.next = next;
  return {room.all.k_BTHK.narrow(1, 0, all), room.all.v_BTHK.narrow(1, 0, all)};
}

// Doubles a tensor that is too small, so that copying costs a constant time for each token.
void KeyValueCache::reserve(at::Tensor& room_BTHK, const at::Tensor& like_BTHK, std::int64_t kept,
                            std::int64_t tokens) const {
  constexpr std::int64_t kMinTokens = 64;
  if (room_BTHK.defined() && room_BTHK.size(1) >= tokens) return;
  std::vector<std::int64_t> shape = like_BTHK.sizes().vec();
  shape[1] = std::min(max_tokens_, std::max(kMinTokens, 2 * tokens));
  const at::Tensor larger_BTHK = at::empty(shape, like_BTHK.options());
  if (kept > 0) larger_BTHK.narrow(1, 0, kept).copy_(room_BTHK.narrow(1, 0, kept));
  room_BTHK = larger_BTHK;
}

void KeyValueCache::advance(std::int64_t tokens) {
  DYNMO_CHECK(tokens >= 0 && tokens_ + tokens <= max_tokens_, "at most {} tokens, got {} behind {}",
              max_tokens_, tokens, tokens_);
  tokens_ += tokens;
  for (auto& [layer, room] : rooms_) room.tokens += std::exchange(room.next, 0);
}

void KeyValueCache::clear() {
  tokens_ = 0;
  for (auto& [layer, room] : rooms_) room.tokens = room.next = 0;
}

std::int64_t KeyValueCache::tokens_of(LayerId layer) const {
  const auto found = rooms_.find(layer);
  return found == rooms_.end() ? 0 : found->second.tokens;
}

}  // namespace dynmo::model
