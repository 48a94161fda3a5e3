// SPDX-License-Identifier: Apache-2.0
// Runs whose tensors all go through copies in host memory, as those of a device do, against runs
// whose tensors are there already: the same bits.
#include "dynmo/runtime/staging.h"

#include <gtest/gtest.h>

#include "dynmo/model/decoder.h"
#include "pipeline_fixture.h"

namespace dynmo::runtime {
namespace {

using schedule::ScheduleKind;
using testing::RunOptions;
using testing::RunResult;

const Staging kAlways{.device = at::kCPU, .copies = Staging::Copies::kAlways};

TEST(Staging, OfHostMemoryIsTheIdentity) {
  const Staging staging;
  const at::Tensor tensor = at::ones({2, 3});
  EXPECT_FALSE(staging.needed());
  EXPECT_EQ(staging.to_host(tensor).data_ptr(), tensor.data_ptr());
  EXPECT_EQ(staging.to_device(tensor).data_ptr(), tensor.data_ptr());
  EXPECT_FALSE(staging.to_host(at::Tensor()).defined());
  model::LayerState state;
  state.parameters.emplace_back().value = tensor;
  EXPECT_EQ(staging.to_host(state).parameters[0].value.data_ptr(), tensor.data_ptr());
}

TEST(Staging, CopiesEachWayWhereItHasTo) {
  const at::Tensor tensor = at::arange(6).view({2, 3}).t();
  const at::Tensor host = kAlways.to_host(tensor);
  EXPECT_NE(host.data_ptr(), tensor.data_ptr());
  EXPECT_TRUE(host.is_contiguous());
  EXPECT_TRUE(at::equal(host, tensor));
  const at::Tensor back = kAlways.to_device(host);
  EXPECT_NE(back.data_ptr(), host.data_ptr());
  EXPECT_TRUE(at::equal(back, tensor));
  const at::Tensor there = at::zeros({3, 2}, at::kLong);
  kAlways.put(host, there);
  EXPECT_TRUE(at::equal(there, tensor));
  EXPECT_FALSE(kAlways.to_host(at::Tensor()).defined());
  kAlways.put(at::Tensor(), at::Tensor());
}

void expect_equal(const RunResult& actual, const RunResult& expected) {
  ASSERT_TRUE(actual.status) << actual.status.error().message;
  ASSERT_TRUE(expected.status) << expected.status.error().message;
  EXPECT_EQ(actual.losses, expected.losses);
  EXPECT_EQ(actual.gradient_norms, expected.gradient_norms);
  EXPECT_EQ(actual.states, expected.states);
  EXPECT_EQ(actual.gradients, expected.gradients);
  EXPECT_EQ(actual.different, 0);
}

TEST(Staging, ChangesNoBitOfAPipelineThatMovesItsLayers) {
  RunOptions run{.steps = 8, .cut = {3, 2, 3}};
  run.before_step = [](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step != 3 && step != 6) return {};
    const std::vector<int> cut = step == 3 ? std::vector<int>{1, 4, 3} : std::vector<int>{4, 3, 1};
    DYNMO_ASSIGN(const bool moved, pipeline.apply(plan::make_plan(cut, ScheduleKind::kZbH1, step)));
    EXPECT_TRUE(moved);
    return {};
  };
  const RunResult expected = testing::run_pipeline(run);
  run.staging = kAlways;
  expect_equal(testing::run_pipeline(run), expected);
}

TEST(Staging, ChangesNoBitOfReplicasWithTiedParametersInBf16) {
  RunOptions run{.steps = 5, .replicas = 3, .cut = {5, 3}};
  const model::DecoderConfig config = [] {
    model::LlamaConfig small = testing::small_model();
    small.tied_embeddings = true;
    return small;
  }();
  run.layers = model::make_decoder(config);
  run.ties = model::ties(config);
  run.precision = cost::Precision::kBf16;
  const RunResult expected = testing::run_pipeline(run);
  run.staging = kAlways;
  expect_equal(testing::run_pipeline(run), expected);
}

}  // namespace
}  // namespace dynmo::runtime
