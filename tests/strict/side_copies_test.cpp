// SPDX-License-Identifier: Apache-2.0
// Copies beside the computation: their bytes, the order that they need, and the memory that stays.
#include "dynmo/runtime/side_copies.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/dynamism/training/sources.h"
#include "dynmo/model/memory.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/runtime/snapshot.h"
#include "tests/runtime/pipeline_fixture.h"
#include "tests/support/strict_device/strict_device.h"

namespace dynmo::runtime::testing {
namespace {

using model::LayerState;
using strict::Mode;
using SideWaits = std::map<std::string, std::int64_t>;

// A layer with a tensor of each kind.
LayerState copied_layer(at::Device device, std::int64_t rows) {
  const auto random = [&](std::int64_t columns) { return at::randn({rows, columns}).to(device); };
  LayerState state{.id = LayerId(0), .parameters = {}, .optimizer_steps = 3, .random_key = 5};
  for (const auto& [name, columns] : {std::pair("weight", 8), std::pair("odd", 3)}) {
    state.parameters.push_back({.name = name,
                                .value = random(columns),
                                .gradient = random(columns),
                                .first_moment = random(columns),
                                .second_moment = random(columns),
                                .compute_copy = random(columns).to(at::kBFloat16)});
  }
  state.parameters.back().mask = at::full({rows}, 7, at::kByte).to(device);
  state.buffers.push_back({.name = "bias", .value = random(1).to(at::kDouble)});
  state.buffers.push_back({.name = "host", .value = at::ones({2}), .on_host = true});
  return state;
}

void expect_same_layer(const LayerState& copy, const LayerState& reference) {
  ASSERT_EQ(copy.parameters.size(), reference.parameters.size());
  for (std::size_t i = 0; i < copy.parameters.size(); ++i) {
    EXPECT_FALSE(copy.parameters[i].gradient.defined());
    EXPECT_FALSE(copy.parameters[i].compute_copy.defined());
  }
  const auto tensors = model::tensors(copy);
  const auto wanted = model::tensors(reference);
  ASSERT_EQ(tensors.size(), wanted.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(tensors[i].name, wanted[i].name);
    EXPECT_TRUE(std::ranges::equal(tensors[i].bytes, wanted[i].bytes)) << tensors[i].name;
  }
  EXPECT_EQ(copy.optimizer_steps, reference.optimizer_steps);
  EXPECT_EQ(copy.random_key, reference.random_key);
}

class CopiesBeside : public ::testing::Test {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    strict::set_mode(Mode::kAtOnce);
    strict::take_waits();
  }
  // Returns the message of a refused call, or "".
  static std::string refused(const std::function<void()>& call) {
    try {
      call();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  }
  at::Device device_ = strict::open(0);
};

using CopiesBesideDeathTest = CopiesBeside;

TEST_F(CopiesBeside, HaveTheBytesFromBeforeTheNextChange) {
  SideCopies beside(device_);
  for (const Mode each : {Mode::kAtOnce, Mode::kLate}) {
    strict::set_mode(each);
    LayerStates layers;
    layers[LayerId(0)] = copied_layer(device_, 33);
    layers[LayerId(1)] = copied_layer(device_, 7);
    const Staging staging{.device = device_};
    LayerStates wanted;
    for (const auto& [id, layer] : layers) wanted[id] = staging.to_host(layer);
    strict::take_waits();
    CopiedLayers copies;
    {
      const strict::NoWait none;
      copies = beside.copy(layers);
      beside.order_changes();
      for (auto& [id, layer] : layers) layer.parameters.front().value.add_(1);
      layers.clear();
    }
    copies.end.wait();
    EXPECT_EQ(strict::take_waits(), (SideWaits{{"synchronize event", 1}}));
    for (const auto& [id, layer] : copies.layers) expect_same_layer(layer, wanted.at(id));
  }
  strict::set_mode(Mode::kAtOnce);
}

TEST_F(CopiesBeside, AChangeThatDoesNotWaitForThemIsFound) {
  SideCopies beside(device_);
  LayerStates layers;
  layers[LayerId(0)] = copied_layer(device_, 33);
  const auto change = [&] { layers[LayerId(0)].parameters.front().first_moment.mul_(2); };
  const CopiedLayers copies = beside.copy(layers);
  const std::string said = refused(change);
  EXPECT_NE(said.find("aten::mul"), std::string::npos) << said;
  EXPECT_NE(said.find("writes memory that aten::copy_"), std::string::npos) << said;
  beside.order_changes();
  change();
}

// The side stream waits for the current stream, not for the one that writes.
TEST_F(CopiesBeside, ACopyThatDoesNotWaitForItsWriterIsFound) {
  const c10::impl::VirtualGuardImpl guard(at::kPrivateUse1);
  const SideCopies beside(device_);
  const at::Tensor x = at::ones({256}, device_);
  guard.synchronizeDevice(device_.index());
  {
    const c10::StreamGuard other(guard.getNewStream(device_));
    x.mul_(2);
  }
  at::Tensor host = x;
  const std::string said = refused([&] { static_cast<void>(beside.copy_message({&host})); });
  EXPECT_NE(said.find("aten::copy_ of stream"), std::string::npos) << said;
  EXPECT_NE(said.find("reads memory that aten::mul"), std::string::npos) << said;
}

TEST_F(CopiesBesideDeathTest, ACopyThatIsReadBeforeItsEndIsFound) {
  SideCopies beside(device_);
  LayerStates layers;
  layers[LayerId(0)] = copied_layer(device_, 33);
  const CopiedLayers copies = beside.copy(layers);
  EXPECT_EXIT(static_cast<void>(model::digest(copies.layers.at(LayerId(0)))),
              ::testing::ExitedWithCode(strict::kTouched), "pinned memory before it has waited");
}

TEST_F(CopiesBesideDeathTest, AMessageThatIsReadBeforeItsEndIsFound) {
  const SideCopies beside(device_);
  const at::Tensor x = at::ones({256}, device_);
  at::Tensor host = x;
  const CopyEnd end = beside.copy_message({&host});
  EXPECT_EXIT(std::printf("%f", double{*host.const_data_ptr<float>()}),
              ::testing::ExitedWithCode(strict::kTouched), "pinned memory before it has waited");
  end.wait();
  EXPECT_EQ(host.sum().item<double>(), 256);
}

// A message waits neither for copies of layers nor for later work.
TEST_F(CopiesBeside, AMessageIsWaitedForAlone) {
  strict::set_mode(Mode::kLate);
  SideCopies beside(device_);
  LayerStates layers;
  layers[LayerId(0)] = copied_layer(device_, 33);
  const CopiedLayers copies = beside.copy(layers);
  at::Tensor host = at::ones({256}, device_);
  const CopyEnd end = beside.copy_message({&host});
  const at::Tensor later = at::ones({8, 8}, device_).mm(at::ones({8, 8}, device_));
  end.wait();
  EXPECT_EQ(host.sum().item<double>(), 256);
  EXPECT_GE(strict::queued(), 8);  // the copies of the layer, and what came later
  strict::set_mode(Mode::kAtOnce);
}

TEST_F(CopiesBeside, KeepTheirMemoryForTheNext) {
  SideCopies beside(device_);
  LayerStates layers;
  for (int i = 0; i < 6; ++i) layers[LayerId(i)] = copied_layer(device_, 4000);
  Bytes set;
  for (const auto& [id, layer] : layers) set += model::tensor_bytes(layer);
  const auto copy = [&] {
    CopiedLayers copies = beside.copy(layers);
    copies.end.wait();
    beside.order_changes();
    return copies;
  };
  // One copy stays while the next is made, as a snapshot does.
  CopiedLayers kept = copy();
  kept = copy();
  const Bytes held = beside.held();
  EXPECT_GE(held, set * 2);
  EXPECT_LE(held, set * 4);  // chunks are powers of two
  for (int round = 0; round < 5; ++round) {
    kept = copy();
    EXPECT_EQ(beside.held(), held);
  }
  // Five of six layers leave.
  layers.erase(layers.upper_bound(LayerId(0)), layers.end());
  for (int round = 0; round < 3; ++round) kept = copy();
  EXPECT_LE(beside.held(), model::tensor_bytes(layers.at(LayerId(0))) * 4);
}

// The copies of a step are waited for after all steps.
TEST_F(CopiesBeside, HaveTheBytesFromBeforeAStepAndASource) {
  for (const Mode each : {Mode::kAtOnce, Mode::kLate}) {
    strict::set_mode(each);
    RunOptions run{.steps = 5, .cut = {kLayers}};
    run.staging.device = device_;
    run.make_sources = [](std::int64_t) {
      dynamism::Sources sources;
      sources.push_back(dynamism::make_pruning_source(
          {.start = 1, .end = 3, .every = 1, .initial_sparsity = 0.2, .final_sparsity = 0.5}));
      return sources;
    };
    std::vector<CopiedLayers> copies;
    std::vector<std::map<LayerId, Digest>> wanted;
    run.before_step = [&](Pipeline& pipeline, std::int64_t) -> Expected<void> {
      std::map<LayerId, Digest>& now = wanted.emplace_back();
      for (const auto& [id, layer] : pipeline.states()) {
        now[id] = model::digest(run.staging.to_host(layer));
      }
      copies.push_back(pipeline.staging().beside->copy(pipeline.states()));
      return {};
    };
    const RunResult result = run_pipeline(run);
    ASSERT_TRUE(result.status) << result.status.error().message;
    ASSERT_EQ(std::ssize(copies), run.steps);
    for (std::size_t step = 0; step < copies.size(); ++step) {
      copies[step].end.wait();
      for (const auto& [id, digest] : wanted[step]) {
        EXPECT_EQ(model::digest(copies[step].layers.at(id)), digest)
            << "step " << step << ", layer " << id.value;
      }
    }
  }
  strict::set_mode(Mode::kAtOnce);
}

TEST_F(CopiesBeside, TheDeviceTellsTheMostThatTensorsTook) {
  EXPECT_EQ(model::peak_device_memory(at::kCPU), Bytes{0});
  const Bytes before = model::peak_device_memory(device_);
  constexpr std::int64_t kElements = 1 << 22;
  const Bytes large = before + Bytes{4 * kElements};
  at::empty({before.value / 4 + kElements}, at::device(device_));
  EXPECT_GE(model::peak_device_memory(device_), large);
  const Bytes most = model::peak_device_memory(device_);
  at::empty({kElements}, at::device(device_));
  EXPECT_EQ(model::peak_device_memory(device_), most);
}

// Snapshots and steps in turn: on each rank one wait, and the layers as they are on the device.
TEST_F(CopiesBeside, MakeASnapshotWithOneWait) {
  for (const Mode each : {Mode::kAtOnce, Mode::kLate}) {
    strict::set_mode(each);
    RunOptions run{.steps = 4, .cut = {3, 5}};
    run.staging.device = device_;
    std::barrier all_here(2);
    std::map<std::int64_t, SideWaits> waits;
    std::mutex mutex;
    run.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
      all_here.arrive_and_wait();
      strict::take_waits();
      all_here.arrive_and_wait();
      DYNMO_ASSIGN(const MigrationReport report, pipeline.take_snapshot(keepers({{0, 0}})));
      EXPECT_TRUE(report.committed) << report.refusal;
      all_here.arrive_and_wait();
      {
        const std::lock_guard lock(mutex);
        for (const auto& [what, count] : strict::take_waits()) waits[step][what] += count;
      }
      all_here.arrive_and_wait();
      const Snapshot& taken = *pipeline.state().snapshot;
      EXPECT_EQ(taken.own.size(), pipeline.states().size());
      for (const auto& [id, layer] : pipeline.states()) {
        const std::string live = model::digest(run.staging.to_host(layer)).hex();
        EXPECT_EQ(model::digest(taken.own.at(id)).hex(), live) << "layer " << id.value;
      }
      EXPECT_EQ(taken.own.size() + taken.neighbours.size(), pipeline.model().size());
      return {};
    };
    const RunResult result = run_pipeline(run);
    ASSERT_TRUE(result.status) << result.status.error().message;
    ASSERT_EQ(std::ssize(waits), run.steps);
    for (const auto& [step, counted] : waits) {
      EXPECT_EQ(counted, (SideWaits{{"synchronize event", 2}})) << "step " << step;
    }
    RunOptions without = run;
    without.before_step = {};
    EXPECT_EQ(run_pipeline(without).losses, result.losses);
  }
  strict::set_mode(Mode::kAtOnce);
}

}  // namespace
}  // namespace dynmo::runtime::testing
