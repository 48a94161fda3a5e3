// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/measured_keys.h"

#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <vector>

#include "dynmo/core/files.h"
#include "dynmo/cost/files.h"
#include "dynmo/dynamism/pruning/options.h"
#include "dynmo/train/setup/start.h"
#include "dynmo/transport/in_process.h"
#include "tests/support/temp_folder.h"

namespace dynmo::train {
namespace {

// Finds another weight decay on every rank. A key that is no source's stands in for one that is
// "auto": sources whose layers sleep have none.
class Differing final : public dynamism::Source {
 public:
  explicit Differing(int rank) : rank_(rank) {}
  std::string_view name() const override { return "optimizer"; }
  std::vector<dynamism::Measured> measure(const model::Model&, std::int64_t tokens) const override {
    EXPECT_EQ(tokens, 4 * 128);
    return {{.key = "weight_decay", .value = fmt::format("0.{}", rank_ + 3), .why = "as drawn"}};
  }

 private:
  int rank_;
};

config::Config emulated(const TempFolder& folder) {
  cost::LayerCost layer;
  layer.forward_s = layer.backward_input_s = 1e-3;
  layer.boundary_bytes = Bytes{64};
  const cost::ModelCost model{std::vector<cost::LayerCost>(4, layer)};
  const std::filesystem::path profile = folder.path() / "profile.json";
  EXPECT_TRUE(write_file_durably(profile, cost::profile_json(model).dump()));
  config::Config config;
  config.run.device = "emulated";
  config.emulated.profile = profile.string();
  config.train.validation_every = 0;
  return config;
}

TEST(MeasuredKeys, AreThoseOfRankZeroOnAllRanks) {
  const TempFolder folder;
  const config::Config config = emulated(folder);
  std::mutex mutex;
  std::vector<std::string> lines;
  std::vector<double> found;
  const auto status =
      transport::run_ranks(3, [&](transport::Transport& transport) -> Expected<void> {
        TrainOptions options;
        options.config = config;
        options.make_sources = [rank = transport.rank().value](std::int64_t) {
          dynamism::Sources sources;
          sources.push_back(std::make_unique<Differing>(rank));
          return sources;
        };
        const Reporter reporter{.line = [&](std::string_view line) { lines.emplace_back(line); }};
        DYNMO_ASSIGN(const ValidOptions valid, validated(options));
        DYNMO_ASSIGN(ResolvedRun run, resolve(valid));
        DYNMO_TRY(measure_keys(transport, run, reporter));
        const std::lock_guard lock(mutex);
        found.push_back(run.config().optimizer.weight_decay);
        return {};
      });
  ASSERT_TRUE(status) << status.error().message;
  EXPECT_EQ(found, (std::vector<double>{0.3, 0.3, 0.3}));
  EXPECT_EQ(lines, (std::vector<std::string>{"auto     optimizer.weight_decay = 0.3, as drawn"}));
}

config::Config with_auto(const TempFolder& folder) {
  config::Config config;
  config.run.directory = folder.path().string();
  config.sources.enable<dynamism::PruningOptions>().sparse_above.reset();
  return config;
}

TEST(MeasuredKeys, OfAResumedRunAreWhatItsConfigSays) {
  const TempFolder folder;
  std::filesystem::create_directory(folder.path() / "checkpoints");
  config::Config run = with_auto(folder);
  run.sources.get<dynamism::PruningOptions>().sparse_above = 0.57;
  ASSERT_TRUE(write_file_durably(folder.path() / "config.toml", to_toml(run)));
  config::Config resumed = with_auto(folder);
  const auto measured = measured_before(resumed);
  ASSERT_TRUE(measured) << measured.error().message;
  EXPECT_EQ(*measured, std::vector<std::string>{"pruning.sparse_above=0.57"});
  ASSERT_TRUE(apply_settings(resumed, *measured));
  EXPECT_EQ(identity(resumed), identity(run));

  // Given keys, and those that no enabled source asks for, stay as they are.
  config::Config given = with_auto(folder);
  given.sources.get<dynamism::PruningOptions>().sparse_above = 0.7;
  EXPECT_TRUE(measured_before(given)->empty());
  config::Config disabled;
  disabled.run.directory = folder.path().string();
  disabled.sources.get<dynamism::PruningOptions>().sparse_above.reset();
  EXPECT_TRUE(measured_before(disabled)->empty());
}

TEST(MeasuredKeys, OfARunThatHasMeasuredNothingAreRefused) {
  const TempFolder folder;
  EXPECT_TRUE(measured_before(with_auto(folder))) << "nothing to resume: restore() says so";
  std::filesystem::create_directory(folder.path() / "checkpoints");
  const auto missing = measured_before(with_auto(folder));
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kBadInput);
  EXPECT_NE(missing.error().message.find("pruning.sparse_above is auto"), std::string::npos)
      << missing.error().message;
  ASSERT_TRUE(write_file_durably(folder.path() / "config.toml", to_toml(with_auto(folder))));
  const auto still = measured_before(with_auto(folder));
  ASSERT_FALSE(still);
  EXPECT_NE(still.error().message.find("pruning.sparse_above is auto and so it is in"),
            std::string::npos)
      << still.error().message;
}

TEST(Processors, OfOneKindSayNothingAndOthersAreNamed) {
  for (const std::string second : {"AVX2 (intel avx2)", "AVX2 (amd avx2)"}) {
    const auto done = transport::run_ranks(3, [&](transport::Transport& ranks) -> Expected<void> {
      const std::string own = ranks.rank() == transport::Member(1) ? second : "AVX2 (intel avx2)";
      DYNMO_ASSIGN(const std::string line, unlike_processors(ranks, own));
      EXPECT_EQ(line.empty(), second == "AVX2 (intel avx2)");
      if (line.empty()) return {};
      EXPECT_NE(line.find("rank 1 computes with AVX2 (amd avx2), rank 0 with AVX2 (intel avx2)"),
                std::string::npos)
          << line;
      return {};
    });
    EXPECT_TRUE(done.has_value()) << done.error().message;
  }
}

}  // namespace
}  // namespace dynmo::train
