// SPDX-License-Identifier: Apache-2.0
#pragma once

// A model on its way to be made: its layers with their places, so that who replaces or wraps some
// of them says which ("every MLP"), and need not count.

#include <cstdint>
#include <memory>
#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/model/layer.h"

namespace dynmo::model {

enum class Part { kEmbedding, kAttention, kMlp, kBlock, kHead };

// Where a layer stands in a decoder.
struct Place {
  Part part = Part::kBlock;  // kBlock: a whole block as one layer, or a layer behind its halves
  std::int64_t block = -1;   // of the blocks' parts, from 0
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

// Place of a layer in a decoder of `blocks` blocks in halves: embedding, (attention, MLP) a block,
// head, which may be several layers. Requires a layer from 0 on.
[[nodiscard]] Place decoder_place(LayerId layer, std::int64_t blocks);
// A decoder's layers in that order. Requires an even number of them, 2 or more, with the head's
// slices (head_slice.h) as one.
[[nodiscard]] Recipe decoder_recipe(Model layers);

}  // namespace dynmo::model
