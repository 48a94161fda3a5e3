// SPDX-License-Identifier: Apache-2.0
// Techniques that train on devices, with each setting of a run. On the strict device they give the
// losses of the CPU within a tolerance, and their own bits on other ranks and while layers move. So
// this is verified without a GPU.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/model/decoder.h"
#include "tests/runtime/pipeline_fixture.h"
#include "tests/strict/like_cpu.h"
#include "tests/support/strict_device/strict_device.h"

namespace dynmo::runtime::testing {
namespace {

enum class Technique { kDense, kFreezing };

struct DeviceCell {
  Technique technique;
  cost::Precision precision;
  std::string_view setting;
};

constexpr std::array<std::string_view, 9> kSettings = {"plain", "recompute", "head_slices",
                                                       "tied",  "replicas",  "accumulation",
                                                       "gpt2",  "zb_v",      "moves"};

std::vector<DeviceCell> device_cells() {
  std::vector<DeviceCell> all;
  for (const Technique technique : {Technique::kDense, Technique::kFreezing}) {
    for (const auto precision : {cost::Precision::kFp32, cost::Precision::kBf16}) {
      for (const std::string_view setting : kSettings) {
        // Refused: dynamism/combinations.
        if (technique == Technique::kFreezing && setting == "tied") continue;
        all.push_back({technique, precision, setting});
      }
    }
  }
  return all;
}

RunOptions run_of(const DeviceCell& cell) {
  model::LlamaConfig llama = small_model();
  llama.tied_embeddings = cell.setting == "tied";
  if (cell.setting == "head_slices") {
    llama.shape.vocabulary = 300;
    llama.shape.head_slices = 2;
  }
  model::DecoderConfig decoder = llama;
  if (cell.setting == "gpt2") {
    model::Gpt2Config gpt2;
    gpt2.shape = llama.shape;
    gpt2.shape.kv_heads = 0;
    gpt2.shape.positions = gpt2.shape.sequence;
    gpt2.tied_embeddings = false;
    decoder = gpt2;
  }
  RunOptions run{.steps = 20};
  run.layers = model::make_decoder(decoder);
  run.ties = model::ties(decoder);
  run.cut = {static_cast<int>(run.layers.size())};
  run.precision = cell.precision;
  if (cell.technique == Technique::kFreezing) run.freezing = freezing();
  if (cell.setting == "recompute") run.recompute = plan::Recompute::kWhole;
  if (cell.setting == "replicas") run.replicas = 2;
  if (cell.setting == "accumulation") run.accumulation = 2;
  if (cell.setting == "moves") run.micro_batches = 6;  // as each schedule takes them on 3 ranks
  return run;
}

// Returns the same training on more ranks.
RunOptions elsewhere(RunOptions run, const DeviceCell& cell) {
  const int layers = run.cut[0];
  run.cut = {3, layers - 3};
  if (cell.setting == "zb_v") {
    run.plan = plan::make_plan({2, 2, 2, layers - 6}, schedule::wave_placement(2, 2), 2,
                               schedule::ScheduleKind::kZbV);
  }
  if (cell.setting == "moves") {
    run.cut = {3, 2, layers - 5};
    run.before_step = random_plans(/*seed=*/31, 3, run.micro_batches, {}, MoveHow::kDuringStep);
  }
  return run;
}

class OnStrictDevice : public ::testing::TestWithParam<DeviceCell> {};

TEST_P(OnStrictDevice, TrainsLikeTheCpuAndToItsOwnBitsAnywhere) {
  const DeviceCell& cell = GetParam();
  RunOptions run = run_of(cell);
  run.staging.device = at::kCPU;
  const RunResult expected = run_pipeline(run);
  ASSERT_TRUE(expected.status) << expected.status.error().message;
  run.staging.device = strict::open(0);
  const RunResult one = run_pipeline(run);
  ASSERT_TRUE(one.status) << one.status.error().message;
  ASSERT_EQ(one.losses.size(), 20U);
  const double largest =
      dynmo::testing::expect_like_cpu(one.losses, expected.losses, cell.precision);
  RecordProperty("distance", fmt::format("{:.1e}", largest));
  expect_same(one, run_pipeline(elsewhere(run, cell)), "one rank and more");
}

INSTANTIATE_TEST_SUITE_P(
    Cells, OnStrictDevice, ::testing::ValuesIn(device_cells()), [](const auto& test) {
      const DeviceCell& cell = test.param;
      return fmt::format("{}_{}_{}", cell.technique == Technique::kDense ? "dense" : "freezing",
                         cell.precision == cost::Precision::kFp32 ? "fp32" : "bf16", cell.setting);
    });

}  // namespace
}  // namespace dynmo::runtime::testing
