// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/key_value_cache.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "dynmo/core/check.h"

namespace dynmo::model {

KeyValueCache::KeyValues KeyValueCache::append(LayerId layer, const at::Tensor& k_BTHK,
                                               const at::Tensor& v_BTHK) {
  const std::int64_t next = k_BTHK.size(1);
  const std::int64_t all = tokens_ + next;
  DYNMO_CHECK(v_BTHK.size(1) == next && all <= max_tokens_,
              "keys and values of at most {} tokens, got {} behind {}", max_tokens_, next, tokens_);
  KeyValues& rooms = rooms_[layer];
  reserve(rooms.k_BTHK, k_BTHK, all);
  reserve(rooms.v_BTHK, v_BTHK, all);
  rooms.k_BTHK.narrow(1, tokens_, next).copy_(k_BTHK);
  rooms.v_BTHK.narrow(1, tokens_, next).copy_(v_BTHK);
  return {rooms.k_BTHK.narrow(1, 0, all), rooms.v_BTHK.narrow(1, 0, all)};
}

// Doubled where it is short, so that copying costs no more than a constant a token.
void KeyValueCache::reserve(at::Tensor& room_BTHK, const at::Tensor& like_BTHK,
                            std::int64_t tokens) const {
  constexpr std::int64_t kMinTokens = 64;
  if (room_BTHK.defined() && room_BTHK.size(1) >= tokens) return;
  std::vector<std::int64_t> shape = like_BTHK.sizes().vec();
  shape[1] = std::min(max_tokens_, std::max(kMinTokens, 2 * tokens));
  const at::Tensor larger_BTHK = at::empty(shape, like_BTHK.options());
  if (tokens_ > 0) larger_BTHK.narrow(1, 0, tokens_).copy_(room_BTHK.narrow(1, 0, tokens_));
  room_BTHK = larger_BTHK;
}

void KeyValueCache::advance(std::int64_t tokens) {
  DYNMO_CHECK(tokens >= 0 && tokens_ + tokens <= max_tokens_, "at most {} tokens, got {} behind {}",
              max_tokens_, tokens, tokens_);
  tokens_ += tokens;
}

}  // namespace dynmo::model
