// SPDX-License-Identifier: Apache-2.0
#include "dynmo/checkpoint/masks.h"

#include <gtest/gtest.h>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/core/bit_mask.h"
#include "tests/support/temp_folder.h"

namespace dynmo::checkpoint {
namespace {

TEST(Masks, AreTheRowsAndColumnsOfTheWeightsThatAreLeft) {
  const TempFolder folder;
  const std::vector<float> values(12, 1);
  const std::vector<std::int32_t> offsets = {1, 4, 11};
  const std::vector<std::uint8_t> bits = pack_mask(offsets, 12);
  const auto pending = begin_checkpoint(folder.path(), 5).value();
  const auto entry =
      write_layer(pending, {.layer = LayerId(0),
                            .tensors = {{.name = "w",
                                         .dtype = DType::kF32,
                                         .shape = {3, 4},
                                         .bytes = std::as_bytes(std::span(values))},
                                        {.name = "mask.w",
                                         .dtype = DType::kU8,
                                         .shape = {static_cast<std::int64_t>(bits.size())},
                                         .bytes = std::as_bytes(std::span(bits))},
                                        {.name = "bias",
                                         .dtype = DType::kF32,
                                         .shape = {12},
                                         .bytes = std::as_bytes(std::span(values))},
                                        {.name = "mask.bias",
                                         .dtype = DType::kU8,
                                         .shape = {static_cast<std::int64_t>(bits.size())},
                                         .bytes = std::as_bytes(std::span(bits))}},
                            .metadata = {}});
  ASSERT_TRUE(entry) << entry.error().message;
  const auto path = commit_checkpoint(pending, 5, {*entry}, Json::object());
  ASSERT_TRUE(path) << path.error().message;
  const auto masks = read_masks(*path);
  ASSERT_TRUE(masks) << masks.error().message;
  ASSERT_EQ(masks->size(), 1U);
  const Mask& mask = masks->front();
  EXPECT_EQ(mask.name, "w");
  EXPECT_EQ(mask.places.sizes, (std::vector<std::uint64_t>{3, 4}));
  EXPECT_EQ(mask.places.indices[0], (std::vector<std::uint32_t>{0, 1, 2}));
  EXPECT_EQ(mask.places.indices[1], (std::vector<std::uint32_t>{1, 0, 3}));
}

TEST(Masks, OfNoMatrixAreRefused) {
  const TempFolder folder;
  const std::vector<std::uint8_t> bits = {1};
  const auto pending = begin_checkpoint(folder.path(), 5).value();
  const auto entry = write_layer(pending, {.layer = LayerId(0),
                                           .tensors = {{.name = "mask.w",
                                                        .dtype = DType::kU8,
                                                        .shape = {1},
                                                        .bytes = std::as_bytes(std::span(bits))}},
                                           .metadata = {}});
  const auto path = commit_checkpoint(pending, 5, {entry.value()}, Json::object()).value();
  const auto masks = read_masks(path);
  ASSERT_FALSE(masks);
  EXPECT_NE(masks.error().message.find("tensor 'mask.w' is the mask of no matrix"),
            std::string::npos)
      << masks.error().message;
}

}  // namespace
}  // namespace dynmo::checkpoint
