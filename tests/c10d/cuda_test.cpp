// SPDX-License-Identifier: Apache-2.0
// What a machine without CUDA says to who asks for it.
#include "dynmo/c10d/cuda.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "dynmo/runtime/device_clock.h"

namespace dynmo::c10d {
namespace {

class Folder : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / fmt::format("dynmo-cuda-{}", ::getpid());
};

TEST_F(Folder, WithoutTheLibraryIsAPyTorchForTheCpu) {
  const auto found = load_cuda(folder_);
  ASSERT_FALSE(found.has_value());
  EXPECT_EQ(found.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(found.error().message,
            fmt::format("run.device = cuda: '{}/libtorch_cuda.so' does not exist, this PyTorch is "
                        "one for the CPU: build with -DDYNMO_TORCH_DIR of one for CUDA, or set "
                        "run.device = cpu",
                        folder_.string()));
}

TEST_F(Folder, WithALibraryThatCannotBeLoadedSaysWhyAndWhatToDo) {
  std::ofstream(folder_ / "libtorch_cuda.so") << std::string(100, 'x');
  const auto found = load_cuda(folder_);
  ASSERT_FALSE(found.has_value());
  EXPECT_EQ(found.error().code, ErrorCode::kBadInput);
  const std::string& text = found.error().message;
  EXPECT_NE(text.find("invalid ELF header"), std::string::npos) << text;
  EXPECT_NE(text.find("DYNMO_TORCH_DIR"), std::string::npos) << text;
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
}

TEST(Cuda, OfThisMachineIsThereOrItsAbsenceIsExplained) {
  const auto device = open_cuda(3, Determinism::kDemanded);
  if (device) {
    EXPECT_TRUE(device->is_cuda());
    return;
  }
  EXPECT_EQ(device.error().code, ErrorCode::kBadInput);
  EXPECT_TRUE(device.error().message.starts_with("run.device = cuda: ")) << device.error().message;
  EXPECT_NE(device.error().message.find("set run.device = cpu"), std::string::npos);
}

TEST(DeviceClock, OfTheCpuIsTheHostsClock) {
  runtime::DeviceClock clock(at::kCPU);
  const runtime::DeviceClock::Mark first = clock.mark();
  const runtime::DeviceClock::Mark second = clock.mark();
  clock.finish();
  const auto seconds = [](auto time) { return std::chrono::duration<double>(time).count(); };
  EXPECT_EQ(clock.seconds(first, second), seconds(second.host - first.host));
  EXPECT_GE(clock.seconds(clock.start(), first), 0);
}

}  // namespace
}  // namespace dynmo::c10d
