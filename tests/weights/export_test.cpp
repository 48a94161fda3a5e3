// SPDX-License-Identifier: Apache-2.0
#include "dynmo/weights/export.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "dynmo/core/files.h"
#include "goldens.h"
#include "tests/support/temp_folder.h"

namespace dynmo::weights {
namespace {

namespace fs = std::filesystem;
using testing::kGoldens;
using testing::tensors_of;

TEST(Export, ReplacesNothingUnlessAsked) {
  const TempFolder scratch;
  const TrainedModel model = open_trained(kGoldens / "llama-tied").value();
  const fs::path out = scratch.path() / "out";
  ASSERT_TRUE(export_hugging_face(model, out));
  std::ofstream(out / "notes.txt") << "mine";
  std::ofstream(out / "config.json") << "older";
  EXPECT_EQ(export_hugging_face(model, out).error().message,
            "'" + out.string() +
                "' is there and holds config.json, model.safetensors, notes.txt: wanted a new or "
                "empty folder, or to be told to overwrite the files of a model in it");
  EXPECT_EQ(read_file(out / "config.json").value(), "older");
  ASSERT_TRUE(export_hugging_face(model, out, {.overwrite = true}));
  EXPECT_TRUE(open_trained(out));
  EXPECT_EQ(read_file(out / "notes.txt").value(), "mine");
}

TEST(Export, ShardsAndRoundedWeightsReadBack) {
  const TempFolder scratch;
  const TrainedModel model = open_trained(kGoldens / "llama-tied").value();
  const fs::path out = scratch.path() / "out";
  const auto files = export_hugging_face(
      model, out, {.dtype = checkpoint::DType::kBF16, .shard_bytes = Bytes{8'000}});
  ASSERT_TRUE(files.has_value()) << files.error().message;
  ASSERT_GT(files->size(), 4U);
  EXPECT_EQ(files->front(), fmt::format("model-00001-of-{:05}.safetensors", files->size() - 2));
  for (const std::string& name : *files) EXPECT_LE(fs::file_size(out / name), 10'000U) << name;
  const auto rounded = tensors_of(out);
  const auto whole = tensors_of(kGoldens / "llama-tied");
  ASSERT_EQ(rounded.size(), whole.size());
  for (const auto& [name, tensor] : whole) {
    EXPECT_TRUE(at::equal(rounded.at(name), tensor.to(at::kBFloat16).to(at::kFloat))) << name;
  }
  EXPECT_TRUE(open_trained(out));
  // One file takes their place.
  EXPECT_EQ(export_hugging_face(model, out, {.overwrite = true}).value(),
            (std::vector<std::string>{"model.safetensors", "config.json"}));
  EXPECT_EQ(std::distance(fs::directory_iterator(out), fs::directory_iterator()), 2);
  EXPECT_TRUE(at::equal(tensors_of(out).at("model.norm.weight"), whole.at("model.norm.weight")));
}

}  // namespace
}  // namespace dynmo::weights
