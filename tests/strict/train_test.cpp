// SPDX-License-Identifier: Apache-2.0
// Whole runs with the strict device in the table of kinds: what a run refuses there, and its
// checkpoints. They continue on the device with its bits, and on the CPU with its losses.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/c10d/device_kinds.h"
#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/core/device_names.h"
#include "dynmo/core/files.h"
#include "dynmo/core/rng.h"
#include "dynmo/data/token_shard.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/train/run.h"
#include "dynmo/transport/in_process.h"
#include "tests/strict/like_cpu.h"
#include "tests/support/strict_device/strict_device.h"
#include "tests/support/temp_folder.h"

namespace dynmo::train {
namespace {

constexpr int kTokens = 61;  // of the vocabulary

struct SavedCell {
  const char* precision;
  bool prunes;
  bool deterministic = true;
};

class StrictKind : public ::testing::TestWithParam<SavedCell> {};  // strict_kind.cpp adds it

using StrictKindInput = StrictKind;

TEST_F(StrictKindInput, IsADeviceLikeEachOfTheTable) {
  EXPECT_EQ(device_names(), (std::vector<std::string_view>{"cuda", "strict"}));
  for (const std::string_view name : device_names()) {
    EXPECT_EQ(c10d::device_kind(name).name, name);
  }
  const c10d::DeviceKind kind = c10d::device_kind("strict");
  EXPECT_EQ(kind.load().value(), strict::kDevices);
  EXPECT_EQ(kind.open(3, c10d::Determinism::kDemanded).value(), at::Device(kind.type, 1));
  config::Config config;
  config::Config cpu = config;
  config.run.device = "strict";
  EXPECT_TRUE(validate(config));
  EXPECT_TRUE(on_device(config));
  EXPECT_EQ(identity(config), identity(cpu)) << "a run moves from one device to another";
  for (const char* source :
       {"moe", "pruning", "freezing", "sparse_attention", "early_exit", "mixture_of_depths"}) {
    config::Config changed = config;
    changed.train.steps = 10'000;  // each source has something to do
    ASSERT_TRUE(apply_settings(changed, std::vector{fmt::format("{}.enabled=true", source)}));
    const auto valid = validate(changed);
    EXPECT_TRUE(valid) << source << ": " << (valid ? "" : valid.error().message);
  }
  config::Config sliced = config;
  ASSERT_TRUE(apply_settings(
      sliced, std::vector<std::string>{"early_exit.enabled=true", "model.head_slices=2"}));
  EXPECT_EQ(validate(sliced).error().message,
            "model.head_slices is 2 and early_exit.enabled is true with run.device = strict: heads "
            "of exits are whole there; wanted model.head_slices = 1");
  config::Config dropped = config;
  ASSERT_TRUE(apply_settings(dropped, std::vector<std::string>{"sparse_attention.enabled=true"}));
  EXPECT_TRUE(validate(dropped));
  ASSERT_TRUE(apply_settings(dropped, std::vector<std::string>{"sparse_attention.rule=drop"}));
  EXPECT_EQ(validate(dropped).error().message,
            "sparse_attention.rule is drop with run.device = strict: dropped rows are left out on "
            "CPUs only; wanted sparse_attention.rule = hash or run.device = cpu");
  config::Config fastest = config;
  fastest.run.deterministic = false;
  EXPECT_TRUE(validate(fastest));
  EXPECT_EQ(identity(fastest), identity(cpu)) << "only its last bits are others";
  fastest.run.device = "cpu";
  EXPECT_EQ(validate(fastest).error().message,
            "run.deterministic is false with run.device = cpu, which does not use it: wanted "
            "run.device = cuda or strict, or no run.deterministic");
  config.run.device = "gpu";
  EXPECT_EQ(validate(config).error().message,
            "run.device is 'gpu', wanted cpu, cuda, strict or emulated");
}

void write_drawn_tokens(const std::filesystem::path& prefix) {
  auto writer = data::TokenShardWriter::create(prefix);
  ASSERT_TRUE(writer);
  Rng rng(5);
  std::vector<std::int32_t> tokens(4000);
  for (std::int32_t& token : tokens) token = static_cast<std::int32_t>(rng.below(kTokens));
  ASSERT_TRUE(writer->append(tokens));
  writer->end_document();
  ASSERT_TRUE(writer->finish());
}

// At steps 4, 8 and 12. From 8 on the CPU has compressed matrices.
constexpr const char* kPruning = "[pruning]\nenabled = true\nstart = 4\nend = 12\nevery = 4\n";

// A training of 20 steps in its folder, and what it leaves.
class SavedTraining {
 public:
  SavedTraining(const std::filesystem::path& run, const std::filesystem::path& tokens,
                const SavedCell& cell)
      : folder_(run) {
    const auto applied = apply_text(
        options_.config,
        fmt::format("[model]\nhidden = 16\nblocks = 3\nheads = 2\nkv_heads = 2\nintermediate = 24\n"
                    "sequence = 8\ndropout = 0.1\nprecision = '{}'\n[data]\npath = '{}'\n"
                    "vocabulary = {}\n[batch]\nmicro_batches = 4\nmicro_batch_size = 1\n"
                    "[optimizer]\nwarmup_steps = 3\n[train]\nsteps = 20\nvalidation_every = 10\n"
                    "validation_steps = 1\n[checkpoint]\nevery = 10\nkeep = 9\n",
                    cell.precision, tokens.string(), kTokens) +
            (cell.prunes ? kPruning : ""),
        "the test");
    EXPECT_TRUE(applied) << applied.error().message;
    options_.config.run.deterministic = cell.deterministic;
    options_.config.data.validation_path = tokens.string();
    options_.config.run.directory = run.string();
  }

  void run(const std::string& device, int ranks) {
    options_.config.run.device = device;
    config::Config& config = options_.config;
    if (device == "cpu") config.run.deterministic = true;  // as a flag for the device does
    if (device == "strict") {
      const auto determinism =
          config.run.deterministic ? c10d::Determinism::kDemanded : c10d::Determinism::kNotDemanded;
      options_.rank_device.device = c10d::device_kind(device).open(0, determinism).value();
    }
    const Reporter reporter = {.line = [this](std::string_view line) { lines_.emplace(line); }};
    const auto done = transport::run_ranks(ranks, [&](transport::Transport& group) {
      at::set_num_threads(1);
      return train(group, options_, reporter);
    });
    EXPECT_TRUE(done) << done.error().message;
  }
  // Continues another one's training from its checkpoint of step 10.
  void resume(const SavedTraining& other, const std::string& device, int ranks) {
    std::filesystem::copy(other.folder_.root(), folder_.root(),
                          std::filesystem::copy_options::recursive);
    const auto checkpoints = checkpoint::list_checkpoints(folder_.checkpoints()).value();
    for (const auto& saved : checkpoints) {
      if (saved.step > 10) std::filesystem::remove_all(saved.path);
    }
    options_.resume = true;
    run(device, ranks);
  }

  [[nodiscard]] std::vector<double> losses() const {
    std::map<std::int64_t, double> by_step;
    std::istringstream lines(read_file(folder_.records_of(WorldRank(0))).value());
    for (std::string line; std::getline(lines, line);) {
      const Json record = Json::parse(line);
      by_step[record.at("step").get<std::int64_t>()] = record.at("loss").get<double>();
    }
    std::vector<double> all;
    for (const auto& [step, loss] : by_step) all.push_back(loss);
    return all;
  }
  [[nodiscard]] bool has_said(const std::string& line) const { return lines_.contains(line); }
  [[nodiscard]] std::string line_with(std::string_view part) const {
    const auto found = std::ranges::find_if(
        lines_, [&](const std::string& line) { return line.find(part) != std::string::npos; });
    return found == lines_.end() ? "" : *found;
  }
  // Returns the digests of the files of the last checkpoint.
  [[nodiscard]] std::vector<std::string> saved() const {
    std::vector<std::string> digests;
    const auto newest = checkpoint::newest_verified(folder_.checkpoints(), nullptr);
    EXPECT_TRUE(newest) << newest.error().message;
    if (!newest) return digests;
    EXPECT_EQ(newest->manifest.state.at("step"), 20);
    for (const auto& file : newest->manifest.files) digests.push_back(file.digest.hex());
    return digests;
  }

 private:
  observe::RunFolder folder_;
  std::set<std::string> lines_;
  TrainOptions options_;
};

TEST_P(StrictKind, ACheckpointContinuesWithItsBitsThereAndItsLossesOnTheCpu) {
  const cost::Precision kind = cost::parse_precision(GetParam().precision).value();
  const TempFolder folder;
  const std::filesystem::path tokens = folder.path() / "tokens";
  write_drawn_tokens(tokens);
  const auto in = [&](const char* name) {
    return SavedTraining(folder.path() / name, tokens, GetParam());
  };
  SavedTraining cpu = in("cpu");
  cpu.run("cpu", 1);
  SavedTraining device = in("device");
  device.run("strict", 2);
  ASSERT_EQ(device.losses().size(), 20U);
  dynmo::testing::expect_like_cpu(device.losses(), cpu.losses(), kind);
  EXPECT_EQ(device.has_said("pruning  masks with dense products: on a device it saves neither time "
                            "nor memory, and pruning.form = units saves both"),
            GetParam().prunes);
  EXPECT_EQ(device.has_said("device   the fastest operations, whose last bits differ from run to "
                            "run (run.deterministic = false)"),
            !GetParam().deterministic);
  EXPECT_EQ(device.has_said("device   equal bits each time; run.deterministic = false allows "
                            "faster operations"),
            GetParam().deterministic);

  SavedTraining again = in("again");
  again.resume(device, "strict", 3);
  EXPECT_EQ(again.losses(), device.losses());
  EXPECT_EQ(again.saved(), device.saved());
  EXPECT_EQ(again.line_with("in their last bits"), "");

  SavedTraining back = in("back");
  back.resume(device, "cpu", 2);
  dynmo::testing::expect_like_cpu(back.losses(), cpu.losses(), kind);
  SavedTraining forth = in("forth");
  forth.resume(cpu, "strict", 1);
  dynmo::testing::expect_like_cpu(forth.losses(), cpu.losses(), kind);
}

TEST_F(StrictKindInput, ARunThatGoesOnWithOtherOperationsSaysSo) {
  const TempFolder folder;
  const std::filesystem::path tokens = folder.path() / "tokens";
  write_drawn_tokens(tokens);
  SavedTraining fastest(folder.path() / "fastest", tokens, {"bf16", false, false});
  fastest.run("strict", 1);
  SavedTraining equal(folder.path() / "equal", tokens, {"bf16", false, true});
  equal.resume(fastest, "strict", 1);
  const std::string said = equal.line_with("in their last bits");
  EXPECT_NE(
      said.find("\"device\":\"strict\",\"deterministic\":false,\"fused_kernels\":true}, this is"),
      std::string::npos)
      << said;
  EXPECT_TRUE(said.ends_with("\"device\":\"strict\",\"fused_kernels\":true}")) << said;
}

INSTANTIATE_TEST_SUITE_P(In, StrictKind,
                         ::testing::Values(SavedCell{"fp32", false}, SavedCell{"bf16", false},
                                           SavedCell{"fp32", true},
                                           SavedCell{"bf16", false, false}),
                         [](const auto& test) {
                           return std::string(test.param.precision) +
                                  (test.param.prunes ? "_pruning" : "") +
                                  (test.param.deterministic ? "" : "_fastest");
                         });

}  // namespace
}  // namespace dynmo::train
