// SPDX-License-Identifier: Apache-2.0
// A checkpoint whose head lies in k slices, read back in any other number of slices.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/early_exit/training/exit_layer.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/model/decoder.h"
#include "dynmo/model/head_slice.h"
#include "dynmo/train/setup/checkpoints.h"
#include "tests/model/helpers.h"
#include "tests/support/temp_folder.h"

namespace dynmo::train {
namespace {

constexpr std::int64_t kWords = 9 * 128 + 11;

model::DecoderConfig config_of(std::int64_t slices) {
  model::Gpt2Config config = model::testing::tiny_gpt2();
  config.shape.vocabulary = kWords;
  config.shape.head_slices = slices;
  return config;
}

enum class Exits { kNone, kBehindBlocks };

struct Made {
  model::Model layers;
  TensorName names;
};
Made made_of(const model::DecoderConfig& config, Exits exits = Exits::kNone) {
  model::Recipe recipe = model::make_recipe(config);
  if (exits == Exits::kBehindBlocks) {
    dynamism::EarlyExitOptions options;
    options.exit_every = 1;
    options.confidence = dynamism::ExitConfidence::kClassifier;
    EXPECT_TRUE(dynamism::make_early_exit_source(options)->shape(recipe));
  }
  const auto names = [config, places = model::places_of(recipe)](LayerId layer,
                                                                 std::string_view parameter) {
    return model::checkpoint_name(config, places[layer.index()], parameter);
  };
  return {.layers = model::layers_of(std::move(recipe)), .names = names};
}

// The layers after some updates: no two values or moments are equal.
runtime::LayerStates trained(const model::Model& layers) {
  runtime::LayerStates states;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LayerId id(static_cast<int>(i));
    model::LayerState state = model::make_state(*layers[i], id, 7);
    state.optimizer_steps = 5;
    for (std::size_t p = 0; p < state.parameters.size(); ++p) {
      model::Parameter& parameter = state.parameters[p];
      for (at::Tensor* moment : {&parameter.first_moment, &parameter.second_moment}) {
        const std::uint64_t seed =
            mix_key({i, p, moment == &parameter.first_moment ? std::uint64_t{1} : 2});
        *moment = model::testing::random_tensor(moment->sizes(), seed, at::kFloat);
      }
    }
    states.emplace(id, std::move(state));
  }
  return states;
}

Restored write(const std::filesystem::path& root, const Made& made,
               const runtime::LayerStates& states) {
  const auto pending = checkpoint::begin_checkpoint(root, 5).value();
  std::vector<checkpoint::FileEntry> entries;
  for (const auto& [id, state] : states) {
    const FileOfLayer file = layer_file(*made.layers[id.index()], state, made.names);
    entries.push_back(checkpoint::write_layer(pending, file.file).value());
  }
  EXPECT_TRUE(checkpoint::commit_checkpoint(pending, 5, entries, Json::object()));
  std::vector<Error> skipped;
  return {.checkpoint = checkpoint::newest_verified(root, &skipped).value(),
          .step = 5,
          .plan = {},
          .data = {},
          .notes = {}};
}

Expected<runtime::LayerStates> read(const Restored& restored, const Made& made) {
  return load_states(
      restored, made.layers,
      plan::make_plan({static_cast<int>(made.layers.size())}, schedule::ScheduleKind::k1F1B),
      Rank(0), made.names);
}

// Values and moments of the matrix, whatever layers it lies in, behind those of all other
// parameters.
std::vector<at::Tensor> tensors_of(const runtime::LayerStates& states) {
  std::vector<at::Tensor> tensors;
  std::array<std::vector<at::Tensor>, 3> rows;
  for (const auto& [id, state] : states) {
    for (const model::Parameter& p : state.parameters) {
      const bool head = p.name.starts_with("lm_head.weight");
      const std::array all = {p.value, p.first_moment, p.second_moment};
      for (std::size_t i = 0; i < all.size(); ++i) (head ? rows[i] : tensors).push_back(all[i]);
    }
  }
  for (const auto& part : rows) tensors.push_back(at::cat(part));
  return tensors;
}

TEST(RecutHead, HasTheSameValuesAndMomentsInAnyNumberOfSlices) {
  for (const std::int64_t saved : {1, 2, 5, 9}) {
    const TempFolder folder;
    const Made made = made_of(config_of(saved));
    const runtime::LayerStates states = trained(made.layers);
    const std::vector<at::Tensor> expected = tensors_of(states);
    const Restored restored = write(folder.path(), made, states);
    for (const std::int64_t slices : {1, 2, 3, 5, 9}) {
      const auto loaded = read(restored, made_of(config_of(slices)));
      ASSERT_TRUE(loaded) << loaded.error().message;
      ASSERT_EQ(std::ssize(*loaded), 5 + slices);
      const std::vector<at::Tensor> found = tensors_of(*loaded);
      ASSERT_EQ(found.size(), expected.size());
      for (std::size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(at::equal(found[i], expected[i])) << saved << " to " << slices << ", " << i;
      }
      for (const auto& [id, state] : *loaded) EXPECT_EQ(state.optimizer_steps, 5) << id.value;
    }
  }
}

// Values, moments and buffers by name, rows of heads together.
std::map<std::string, at::Tensor> named(const runtime::LayerStates& states, const Made& made) {
  std::map<std::string, std::vector<at::Tensor>> parts;
  std::map<std::string, at::Tensor> all;
  for (const auto& [id, state] : states) {
    for (const model::Parameter& p : state.parameters) {
      const std::string name = made.names(id, p.name);
      const auto part = model::parse_matrix_rows(name);
      const std::string whole = part ? part->matrix : name;
      parts[whole].push_back(p.value);
      parts["first " + whole].push_back(p.first_moment);
      parts["second " + whole].push_back(p.second_moment);
    }
    for (const model::Buffer& buffer : state.buffers) {
      all["buffer " + made.names(id, buffer.name)] = buffer.value;
    }
  }
  for (const auto& [name, rows] : parts) all[name] = at::cat(rows);
  return all;
}

TEST(RecutHead, OfExitsHasTheSameValuesAndMomentsInAnyNumberOfSlices) {
  for (const std::int64_t saved : {1, 3}) {
    const TempFolder folder;
    const Made made = made_of(config_of(saved), Exits::kBehindBlocks);
    runtime::LayerStates states = trained(made.layers);
    for (auto& [id, state] : states) {
      if (dynamism::has_threshold(*made.layers[id.index()])) {
        dynamism::set_threshold(state, 0.25F);
      }
    }
    const auto expected = named(states, made);
    const Restored restored = write(folder.path(), made, states);
    for (const std::int64_t slices : {1, 2, 3, 9}) {
      const Made other = made_of(config_of(slices), Exits::kBehindBlocks);
      const auto loaded = read(restored, other);
      ASSERT_TRUE(loaded) << loaded.error().message;
      ASSERT_EQ(std::ssize(*loaded), 6 + 2 * (slices - 1));  // an exit and the head
      const auto found = named(*loaded, other);
      ASSERT_EQ(found.size(), expected.size());
      for (const auto& [name, value] : expected) {
        ASSERT_TRUE(found.contains(name)) << name;
        EXPECT_TRUE(at::equal(found.at(name), value)) << saved << " to " << slices << ", " << name;
      }
      for (const auto& [id, state] : *loaded) EXPECT_EQ(state.optimizer_steps, 5) << id.value;
    }
  }
}

// The bytes of every tensor, by layer and name.
std::map<std::string, std::vector<std::byte>> tensor_bytes(const Restored& restored) {
  std::map<std::string, std::vector<std::byte>> bytes;
  for (const auto& entry : restored.checkpoint.manifest.files) {
    const auto file = checkpoint::read_layer(restored.checkpoint, entry.layer).value();
    for (const auto& tensor : file.tensors()) {
      bytes[fmt::format("{}, {}", entry.layer.value, tensor.name)].assign(tensor.bytes.begin(),
                                                                          tensor.bytes.end());
    }
  }
  return bytes;
}

// From 8 slices over other numbers of them, each written and read as a run does, and back to 8.
TEST(RecutHead, ComesBackByteByByte) {
  for (const std::vector<std::int64_t>& way :
       {std::vector<std::int64_t>{1}, {3}, {1, 3}, {3, 1}, {5, 9, 2}}) {
    const TempFolder folder;
    const Made first = made_of(config_of(8));
    Restored restored = write(folder.path() / "first", first, trained(first.layers));
    const auto expected = tensor_bytes(restored);
    ASSERT_TRUE(expected.contains("12, optimizer.exp_avg.lm_head.weight[896:1163]"));
    const auto recut = [&](std::int64_t slices) {
      const Made made = made_of(config_of(slices));
      auto states = read(restored, made);
      ASSERT_TRUE(states) << states.error().message;
      restored = write(folder.path() / fmt::format("as-{}", slices), made, *states);
    };
    for (const std::int64_t slices : way) {
      recut(slices);
      ASSERT_NE(tensor_bytes(restored), expected) << slices;
    }
    recut(8);
    const auto found = tensor_bytes(restored);
    ASSERT_EQ(found.size(), expected.size());
    for (const auto& [name, bytes] : expected) {
      EXPECT_TRUE(found.contains(name) && found.at(name) == bytes)
          << name << ", over " << fmt::format("{}", fmt::join(way, ", ")) << " slices";
    }
  }
}

TEST(RecutHead, OfAnotherNumberOfBlocksIsRefused) {
  const TempFolder folder;
  model::Gpt2Config more = std::get<model::Gpt2Config>(config_of(2));
  const Made made = made_of(more);
  const Restored restored = write(folder.path(), made, trained(made.layers));
  more.shape.blocks = 4;
  const auto loaded = read(restored, made_of(more));
  ASSERT_FALSE(loaded);
  EXPECT_NE(loaded.error().message.find("has 7 layers, the model 11"), std::string::npos)
      << loaded.error().message;
}

}  // namespace
}  // namespace dynmo::train
