// SPDX-License-Identifier: Apache-2.0
// Each kind of mistake that the strict device is for, made once and found.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "dynmo/kernels/fused.h"
#include "dynmo/runtime/staging.h"
#include "tests/support/strict_device/strict_device.h"

namespace dynmo::strict {
namespace {

using at::Tensor;
using c10::impl::VirtualGuardImpl;

// Returns the message of a call that the device refuses, or "".
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& refused) {
    return refused.what_without_backtrace();
  }
  return "";
}

void expect_refused(const std::function<void()>& call, const std::vector<std::string>& words) {
  const std::string said = refusal(call);
  for (const std::string& word : words) EXPECT_NE(said.find(word), std::string::npos) << said;
}

class StrictDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // a fork would share the memory
    set_mode(Mode::kAtOnce);
    take_waits();
  }
  Tensor ones() const { return at::ones({4, 3}, device_); }
  static Tensor pinned(float value) {
    return at::full({1024}, value, at::TensorOptions().pinned_memory(true));
  }
  at::Device device_ = open(0);
};

using StrictDeviceDeathTest = StrictDevice;

TEST_F(StrictDevice, ComputesTheBitsOfTheCpu) {
  for (const Mode each : {Mode::kAtOnce, Mode::kLate}) {
    set_mode(each);
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
      const Tensor x = at::randn({5, 8}).to(type);
      const Tensor w = at::randn({8, 8}).to(type);
      const auto formula = [](const Tensor& a, const Tensor& b) {
        return at::silu(at::mm(a, b)).add_(at::logsumexp(a, {1}, true)).softmax(1);
      };
      EXPECT_TRUE(at::equal(formula(x.to(device_), w.to(device_)).cpu(), formula(x, w)));
    }
    const auto places = at::TensorOptions().device(device_).dtype(at::kLong);
    EXPECT_EQ(at::arange(10, places).sum().item<std::int64_t>(), 45);
    const Tensor x = at::randn({6, 2});
    EXPECT_TRUE(
        at::equal(x.to(device_).index_select(0, at::arange(2, places)).cpu(), x.narrow(0, 0, 2)));
  }
}

TEST_F(StrictDeviceDeathTest, TheHostCannotReadItsMemory) {
  const Tensor x = ones();
  EXPECT_EXIT(std::printf("%f", double{*x.const_data_ptr<float>()}),
              ::testing::ExitedWithCode(kTouched), "the host touches memory of the device");
}

TEST_F(StrictDeviceDeathTest, TheHostCannotWriteItsMemory) {
  const Tensor x = ones();
  EXPECT_EXIT(*x.mutable_data_ptr<float>() = 2, ::testing::ExitedWithCode(kTouched),
              "the host touches memory of the device");
}

TEST_F(StrictDevice, TheSystemCannotReadItsMemory) {
  const Tensor x = ones();
  std::array<int, 2> pipe_ends{};
  ASSERT_EQ(::pipe(pipe_ends.data()), 0);
  EXPECT_EQ(::write(pipe_ends[1], x.const_data_ptr(), x.nbytes()), -1);
  EXPECT_EQ(errno, EFAULT);
  for (const int end : pipe_ends) ::close(end);
}

TEST_F(StrictDeviceDeathTest, APinnedCopyCannotBeReadBeforeTheWait) {
  const Tensor x = at::ones({1024}, device_);
  Tensor host = pinned(0);
  host.copy_(x, /*non_blocking=*/true);
  EXPECT_EXIT(std::printf("%f", double{*host.const_data_ptr<float>()}),
              ::testing::ExitedWithCode(kTouched), "pinned memory before it has waited");
}

// Copies like runtime::Staging::to_host(), but does not wait.
TEST_F(StrictDeviceDeathTest, AStagingThatDoesNotWaitIsFound) {
  const runtime::Staging staging{.device = device_};
  const Tensor x = ones();
  const Tensor host =
      staging.host_buffer(x.sizes(), x.scalar_type()).copy_(x, /*non_blocking=*/true);
  EXPECT_EXIT(std::printf("%f", host.sum().item<double>()), ::testing::ExitedWithCode(kTouched),
              "pinned memory before it has waited");
  EXPECT_EQ(staging.to_host(x).sum().item<double>(), 12);
}

TEST_F(StrictDeviceDeathTest, PinnedMemoryOnItsWayToTheDeviceCannotBeWritten) {
  Tensor host = pinned(1);
  const Tensor x = host.to(device_, /*non_blocking=*/true);
  EXPECT_EQ(host[0].item<float>(), 1);  // it can be read
  EXPECT_EXIT(host.fill_(2), ::testing::ExitedWithCode(kTouched),
              "pinned memory before it has waited");
  VirtualGuardImpl(at::kPrivateUse1).synchronizeDevice(0);
  host.fill_(2);
  EXPECT_EQ(x.sum().item<float>(), 1024);
}

TEST_F(StrictDevice, AnOperatorOfTensorsInTwoPlacesIsRefused) {
  const Tensor x = ones();
  expect_refused([&] { x.add(at::ones({4, 3})); }, {"aten::add.Tensor", "[4, 3]", "cpu"});
  expect_refused(
      [&] {
        x.add(at::ones({4, 3}, at::Device(at::kPrivateUse1, 1)));
      },
      {"aten::add.Tensor", "two devices"});
  EXPECT_EQ(x.add(at::scalar_tensor(2)).sum().item<double>(), 36);  // as CUDA has it
}

TEST_F(StrictDevice, WaitsAreRefusedByNameWhereNoneIsAllowed) {
  const Tensor x = ones();
  const Tensor mask = x > 0;
  const Tensor pageable = at::ones({4, 3});
  c10::Event event(at::kPrivateUse1);
  event.record(VirtualGuardImpl(at::kPrivateUse1).getStream(device_));
  Tensor host = pinned(0);
  const Tensor to_copy = at::ones({1024}, device_);
  take_waits();
  {
    const NoWait none;
    expect_refused([&] { x.sum().item(); }, {"_local_scalar_dense", "no wait is allowed"});
    expect_refused([&] { x.nonzero(); }, {"nonzero", "no wait is allowed"});
    expect_refused([&] { x.index({mask}); }, {"index", "no wait is allowed"});
    expect_refused([&] { at::equal(x, x); }, {"equal", "no wait is allowed"});
    expect_refused([&] { host.copy_(to_copy); }, {"copy_", "no wait is allowed"});
    expect_refused([&] { pageable.to(device_, /*non_blocking=*/true); }, {"copy_"});
    expect_refused([&] { x.cpu(); }, {"copy_", "no wait is allowed"});
    expect_refused([&] { event.synchronize(); }, {"synchronize event", "no wait is allowed"});
    host.copy_(to_copy, /*non_blocking=*/true);
    x.add(x).mul_(2);
  }
  EXPECT_TRUE(take_waits().empty());
  EXPECT_EQ(x.sum().item<double>(), 12);
  EXPECT_EQ(take_waits(), (std::map<std::string, std::int64_t>{{"aten::_local_scalar_dense", 1}}));
}

// Work in a stream of its own: returns the stream that was current before.
c10::Stream in_other_stream(const std::function<void()>& work) {
  const VirtualGuardImpl guard(at::kPrivateUse1);
  const c10::Stream other = guard.getNewStream(at::Device(at::kPrivateUse1, 0));
  const c10::Stream before = guard.exchangeStream(other);
  try {
    work();
  } catch (...) {
    guard.exchangeStream(before);
    throw;
  }
  guard.exchangeStream(before);
  return other;
}

TEST_F(StrictDevice, AUseThatNoEventOrdersIsRefused) {
  Tensor x = ones();
  expect_refused([&] { in_other_stream([&] { x.add(1); }); },
                 {"aten::add.Tensor of stream", "reads memory that", "writes"});
  const c10::Stream other = [&] {
    const c10::Event ready = [&] {
      c10::Event event(at::kPrivateUse1);
      event.record(VirtualGuardImpl(at::kPrivateUse1).getStream(device_));
      return event;
    }();
    return in_other_stream([&] {
      ready.block(VirtualGuardImpl(at::kPrivateUse1).getStream(device_));
      x.sum();
    });
  }();
  // The other stream may still read it.
  expect_refused([&] { x.add_(1); }, {"aten::add_", "writes memory that aten::sum", "reads"});
  c10::Event done(at::kPrivateUse1);
  done.record(other);
  done.block(VirtualGuardImpl(at::kPrivateUse1).getStream(device_));
  x.add_(1);
  EXPECT_EQ(x.sum().item<double>(), 24);
}

TEST_F(StrictDevice, AKernelOfOurOwnIsOrderedAsAnOperatorIs) {
  Tensor gate = at::ones({8, 16}, device_);
  Tensor up = at::ones({8, 16}, device_);
  ASSERT_TRUE(kernels::fused::serves(gate, {up})) << "strict_kind.cpp has its launcher";
  const double silu = 1 / (1 + std::exp(-1.0));
  EXPECT_NEAR(kernels::swiglu(gate, up).sum().item<double>(), 128 * silu, 1e-4);
  Tensor product = at::ones({8, 16}, device_);
  gate.add_(1);
  expect_refused([&] { in_other_stream([&] { product = kernels::swiglu(gate, up); }); },
                 {"swiglu_float of stream", "reads memory that aten::add_", "writes"});
  in_other_stream([&] { up.sum(); });
  expect_refused([&] { kernels::swiglu_gradient(gate, up, product); },
                 {"swiglu_gradient_float", "writes memory that aten::sum", "reads"});
}

TEST_F(StrictDevice, MemoryThatIsReusedTooEarlyIsFound) {
  const VirtualGuardImpl guard(at::kPrivateUse1);
  for (const bool named : {false, true}) {
    Tensor x = at::ones({7777}, device_);
    guard.synchronizeDevice(0);  // it is written
    const c10::Stream other = in_other_stream([&] { x.sum(); });
    if (named) guard.recordDataPtrOnStream(x.storage().data_ptr(), other);
    x.reset();
    const auto reuse = [&] { at::ones({7777}, device_); };
    if (named) {
      reuse();
    } else {
      expect_refused(reuse, {"aten::fill_", "writes memory that aten::sum", "reads"});
    }
    guard.synchronizeDevice(0);
  }
}

TEST_F(StrictDevice, MemoryThatWasNeverWrittenIsNaN) {
  for (const Mode each : {Mode::kAtOnce, Mode::kLate}) {
    set_mode(each);
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
      at::ones({33}, at::TensorOptions().device(device_).dtype(type)).add_(1);  // and is freed
      const Tensor x = at::empty({33}, at::TensorOptions().device(device_).dtype(type));
      EXPECT_TRUE(x.isnan().all().item<bool>());
    }
  }
}

TEST_F(StrictDevice, LateOperatorsRunWhenTheHostWaits) {
  set_mode(Mode::kLate);
  const VirtualGuardImpl guard(at::kPrivateUse1);
  c10::Event before(at::kPrivateUse1, c10::EventFlag::BACKEND_DEFAULT);
  c10::Event after(at::kPrivateUse1, c10::EventFlag::BACKEND_DEFAULT);
  before.record(guard.getStream(device_));
  const Tensor sum = at::ones({8, 8}, device_).mm(at::ones({8, 8}, device_)).sum();
  after.record(guard.getStream(device_));
  EXPECT_GT(queued(), 3);
  expect_refused([&] { before.elapsedTime(after); }, {"must be completed"});
  EXPECT_EQ(sum.item<double>(), 512);
  EXPECT_EQ(queued(), 0);
  EXPECT_GT(before.elapsedTime(after), 0);
  set_mode(Mode::kAtOnce);
}

TEST_F(StrictDevice, AnOperatorThatCudaLacksIsRefused) {
  expect_refused([&] { at::histogram(ones(), 4); }, {"CUDA does not have aten::histogram.bin_ct"});
}

}  // namespace
}  // namespace dynmo::strict
