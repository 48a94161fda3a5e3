// SPDX-License-Identifier: Apache-2.0
#pragma once

// A model before it is made: its layers with their places. So code that replaces or wraps layers
// can name them ("every MLP") and need not count.

#include <cstdint>
#include <memory>
#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/model/layer.h"

namespace dynmo::model {

enum class Part { kEmbedding, kAttention, kMlp, kBlock, kHead };

// The place of a layer in a decoder.
struct Place {
  // kBlock is a whole block as one layer, or a layer behind its halves.
  Part part = Part::kBlock;
  std::int64_t block = -1;  // from 0; for parts of blocks
  friend bool operator==(const Place&, const Place&) = default;
};

struct Slot {
  Place place;
  std::shared_ptr<const Layer> layer;
};

// The slots by LayerId.
struct Recipe {
  std::vector<Slot> slots;
};

[[nodiscard]] Model layers_of(Recipe recipe);
// Returns the places in order of LayerId.
[[nodiscard]] std::vector<Place> places_of(const Recipe& recipe);

// Returns the place of a layer in a decoder of `blocks` blocks in halves. The order is embedding,
// (attention, MLP) for each block, head, which may be several layers. Requires layer >= 0.
[[nodiscard]] Place decoder_place(LayerId layer, std::int64_t blocks);
// Returns a decoder's layers with their places, in decoder_place() order. Requires an even number
// of them, 2 or more, with the head's slices (head_slice.h) as one.
[[nodiscard]] Recipe decoder_recipe(Model layers);

}  // namespace dynmo::model
