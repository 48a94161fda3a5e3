// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/layer_pieces.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "dynmo/model/autograd_layer.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/runtime/pieces.h"

namespace dynmo::runtime {
namespace {

// Parameters smaller and larger than a piece; one whose end is at no multiple of an alignment.
std::shared_ptr<const model::Layer> whole_layer() {
  return model::autograd_layer("some",
                               {{.name = "first", .shape = {300, 100}},
                                {.name = "odd", .shape = {3}},
                                {.name = "large", .shape = {700, 1000}},
                                {.name = "last", .shape = {64}}},
                               model::HiddenFunction());
}

model::LayerState filled(const model::Layer& layer) {
  model::LayerState state = model::make_state(layer, LayerId(0), 7);
  for (const model::NamedTensor& tensor : model::tensors(state)) {
    for (std::size_t i = 0; i < tensor.bytes.size(); ++i) {
      tensor.bytes[i] = static_cast<std::byte>((i + 17 * tensor.name.size()) % 251);
    }
  }
  return state;
}

// The same state, each tensor somewhere else.
model::LayerState apart(const model::LayerState& state) {
  model::LayerState copy = state;
  for (model::Parameter& parameter : copy.parameters) {
    for (at::Tensor* tensor :
         {&parameter.value, &parameter.first_moment, &parameter.second_moment}) {
      *tensor = tensor->clone();
    }
  }
  return copy;
}

TEST(LayerPieces, AreAsFewAsTheirSizeAllowsAndAlikeAtBothEnds) {
  const auto layer = whole_layer();
  model::LayerState together = filled(*layer);
  model::LayerState scattered = apart(together);
  const std::vector<LayerPiece> one = layer_pieces(together);
  const std::vector<LayerPiece> other = layer_pieces(scattered);
  const std::int64_t bytes = model::tensor_bytes(together).value;
  ASSERT_EQ(std::ssize(one), (bytes + kPieceBytes - 1) / kPieceBytes);
  ASSERT_EQ(one.size(), other.size());
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < one.size(); ++i) {
    EXPECT_EQ(one[i].message().size(), other[i].message().size());
    EXPECT_LE(std::ssize(one[i].message()), kPieceBytes);
    sum += std::ssize(one[i].message());
  }
  EXPECT_EQ(sum, bytes);
}

TEST(LayerPieces, CarryAStateWhereverItsTensorsLie) {
  const auto layer = whole_layer();
  model::LayerState source = filled(*layer);
  for (const bool from_apart : {false, true}) {
    for (const bool to_apart : {false, true}) {
      model::LayerState from = from_apart ? apart(source) : source;
      model::LayerState to = model::make_state(*layer, LayerId(0), 7);
      if (to_apart) to = apart(to);
      std::vector<LayerPiece> sent = layer_pieces(from);
      const std::vector<LayerPiece> arrived = layer_pieces(to);
      ASSERT_EQ(sent.size(), arrived.size());
      Digester of_source;
      Digester of_copy;
      for (std::size_t i = 0; i < sent.size(); ++i) {
        sent[i].take_from_state();
        sent[i].digest(of_source);
        std::memcpy(arrived[i].message().data(), sent[i].message().data(),
                    sent[i].message().size());
        arrived[i].bring_to_state();
        arrived[i].digest(of_copy);
      }
      EXPECT_EQ(model::digest(to), model::digest(source));
      EXPECT_EQ(of_copy.digest(), of_source.digest());
    }
  }
}

TEST(LayerPieces, OfMemoryThatLiesTogetherAreNotCopied) {
  const auto layer = model::autograd_layer(
      "even", {{.name = "a", .shape = {300, 160}}, {.name = "b", .shape = {700, 1024}}},
      model::HiddenFunction());
  model::LayerState state = model::allocate_like(*layer, LayerId(0), {});
  const std::byte* next = model::tensors(state).front().bytes.data();
  for (const LayerPiece& piece : layer_pieces(state)) {
    EXPECT_EQ(piece.message().data(), next);
    next += piece.message().size();
  }
}

}  // namespace
}  // namespace dynmo::runtime
