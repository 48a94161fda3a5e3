// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <thread>

#include "dynmo/model/emulated/device.h"
#include "dynmo/model/emulated/layer.h"
#include "helpers.h"

namespace dynmo::model {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Clock = EmulatedDevice::Clock;
using Message = EmulatedDevice::Message;

// One that has worked, and since when it is free.
struct Free {
  EmulatedDevice device;
  Clock::time_point since;
  Free() {
    device.work(0);
    since = device.time();
  }
};

TEST(EmulatedDevice, WhatTheHostIsLateDoesNotAddUp) {
  Free free;
  std::this_thread::sleep_for(milliseconds(3));
  free.device.work(0.001);
  std::this_thread::sleep_for(milliseconds(1));
  free.device.work(0.002);
  EXPECT_EQ(free.device.time() - free.since, milliseconds(3));
  EXPECT_GE(Clock::now(), free.device.time());
}

TEST(EmulatedDevice, TheHostSleepsUntilWorkIsDone) {
  Free free;
  free.device.work(0.002);
  EXPECT_GE(Clock::now() - free.since, milliseconds(2));
  EXPECT_EQ(free.device.time() - free.since, milliseconds(2));
}

TEST(EmulatedDevice, ItsFirstWorkBeginsWhenItWasMarked) {
  EmulatedDevice device;
  device.mark();
  const auto marked = device.mark();
  std::this_thread::sleep_for(milliseconds(2));
  device.work(0.001);
  EXPECT_EQ(device.time() - marked, milliseconds(1));
  EXPECT_EQ(device.mark(), device.time());
}

TEST(EmulatedDevice, StandsStillWhileTheHostReadsWhatItWorksOn) {
  Free free;
  free.device.stand_still(0.0005);
  EXPECT_EQ(free.device.time() - free.since, microseconds(500));
}

TEST(EmulatedDevice, WithoutWorkItHasTheTimeOfTheHost) {
  EmulatedDevice device;
  EXPECT_FALSE(device.has_worked());
  const auto before = Clock::now();
  device.stand_still(10);
  device.receive(at::zeros({4}), Message::kWaitedFor);
  const auto time = device.time();
  EXPECT_FALSE(device.has_worked());
  EXPECT_GE(time, before);
  EXPECT_LE(time, Clock::now());
}

TEST(EmulatedDevice, ALayerBeginsWhenTheDeviceIsFreeAndTheMessageMade) {
  Free early;
  const at::Tensor made_before = at::zeros({2});
  early.device.stamp(made_before);
  Free sender;
  sender.device.work(0.001);
  const at::Tensor made_after = at::zeros({2});
  sender.device.stamp(made_after);
  Free receiver;
  receiver.device.receive(made_before, Message::kWasThere);
  EXPECT_EQ(receiver.device.time(), receiver.since);
  early.device.receive(made_after, Message::kWasThere);
  EXPECT_EQ(early.device.time(), sender.device.time());
}

TEST(EmulatedDevice, AMessageThatWasWaitedForIsThereNow) {
  Free free;
  const at::Tensor made = at::zeros({2});
  free.device.stamp(made);
  std::this_thread::sleep_for(milliseconds(2));
  const auto before = Clock::now();
  free.device.receive(made, Message::kWaitedFor);
  EXPECT_GE(free.device.time(), before);
  EXPECT_LE(free.device.time(), Clock::now());
}

// Another host's clock, or a message that has no room for a time.
TEST(EmulatedDevice, AStampFromNowhereIsNoLaterThanNowNorEarlierThanTheDevice) {
  for (const std::int64_t stamp : {INT64_MIN, std::int64_t{-1}, std::int64_t{0}, INT64_MAX}) {
    Free free;
    const at::Tensor message = at::full({1}, stamp, at::kLong);
    free.device.receive(message, Message::kWasThere);
    EXPECT_GE(free.device.time(), free.since) << stamp;
    EXPECT_LE(free.device.time(), Clock::now()) << stamp;
  }
  Free free;
  const at::Tensor small = at::full({1}, 7.0F);
  free.device.stamp(small);
  EXPECT_EQ(small.item<float>(), 7.0F);
  free.device.receive(small, Message::kWasThere);
  EXPECT_EQ(free.device.time(), free.since);
}

TEST(EmulatedDevice, AThreadThatWaitsIsSeenTo) {
  const std::int64_t before = EmulatedDevice::waits();
  std::this_thread::sleep_for(milliseconds(1));
  EXPECT_GT(EmulatedDevice::waits(), before);
}

TEST(EmulatedDevice, IsUsedByTheLayersThatItsThreadCalls) {
  EXPECT_EQ(EmulatedDevice::in_use(), nullptr);
  const Model model = make_emulated({.costs = [](std::int64_t) {
                        cost::ModelCost costs{std::vector<cost::LayerCost>(2)};
                        for (cost::LayerCost& layer : costs.layers) {
                          layer.forward_s = 0.001;
                          layer.backward_input_s = 0.002;
                          layer.backward_weight_s = 0.004;
                          layer.boundary_bytes = Bytes{64};
                        }
                        return costs;
                      }}).value();
  LayerState state = make_state(*model[0], LayerId{0}, 1);
  Free free;
  {
    const EmulatedDevice::Use use(free.device);
    EXPECT_EQ(EmulatedDevice::in_use(), &free.device);
    std::thread([] { EXPECT_EQ(EmulatedDevice::in_use(), nullptr); }).join();
    std::unique_ptr<Stash> stash;
    const at::Tensor y = model[0]->forward(state, at::zeros({16}), {}, &stash).hidden.x;
    EXPECT_EQ(free.device.time() - free.since, milliseconds(1));
    model[0]->input_gradient(state, *stash, y, Layer::InputGradient::kWanted);
    EXPECT_EQ(free.device.time() - free.since, milliseconds(3));
    model[0]->weight_gradient(state, *stash);
    EXPECT_EQ(free.device.time() - free.since, milliseconds(7));
  }
  EXPECT_EQ(EmulatedDevice::in_use(), nullptr);
}

}  // namespace
}  // namespace dynmo::model
