// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/recipe.h"

#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/model/head_slice.h"

namespace dynmo::model {

Model layers_of(Recipe recipe) {
  Model layers;
  layers.reserve(recipe.slots.size());
  for (Slot& slot : recipe.slots) layers.push_back(std::move(slot.layer));
  return layers;
}

std::vector<Place> places_of(const Recipe& recipe) {
  std::vector<Place> places;
  for (const Slot& slot : recipe.slots) places.push_back(slot.place);
  return places;
}

Place decoder_place(LayerId layer, std::int64_t blocks) {
  const std::int64_t head = 2 * blocks + 1;
  DYNMO_CHECK(layer.value >= 0, "a layer, got {}", layer);
  if (layer.value == 0) return {.part = Part::kEmbedding};
  if (layer.value >= head) return {.part = Part::kHead};
  return {.part = layer.value % 2 == 1 ? Part::kAttention : Part::kMlp,
          .block = (layer.value - 1) / 2};
}

Recipe decoder_recipe(Model layers) {
  const int with_whole_head = layers_with_whole_head(layers);
  DYNMO_CHECK(with_whole_head >= 2 && with_whole_head % 2 == 0,
              "embedding, two halves a block and a head, got {} layers", with_whole_head);
  const std::int64_t blocks = with_whole_head / 2 - 1;
  Recipe recipe;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    recipe.slots.push_back(
        {decoder_place(LayerId(static_cast<std::int32_t>(i)), blocks), std::move(layers[i])});
  }
  return recipe;
}

}  // namespace dynmo::model
