// SPDX-License-Identifier: Apache-2.0
// The kernels of devices: run on the CPU against its loops, and compiled for three devices. What
// they do on a device that only queues is in tests/strict, and on a GPU in tests/gpu.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "dynmo/core/files.h"
#include "dynmo/kernels/device/launcher.h"
#include "dynmo/kernels/device/nvrtc.h"
#include "dynmo/kernels/fused.h"
#include "dynmo/kernels/generic.h"
#include "dynmo/kernels/operations.h"
#include "dynmo/model/adamw.h"
#include "tests/model/helpers.h"
#include "tests/support/kernels_on_host.h"
#include "tests/support/temp_folder.h"

namespace dynmo::kernels {
namespace {

using model::testing::random_tensor;
using model::testing::same_bits;

// In units of the largest expected element.
double distance_of(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.sizes(), expected.sizes());
  const at::Tensor exact = expected.to(at::kDouble);
  return (actual.to(at::kDouble) - exact).abs().max().item<double>() /
         (exact.abs().max().item<double>() + 1e-30);
}

class DeviceKernels : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override { testing::set_launcher_of_host(); }
  static at::Tensor random(at::IntArrayRef shape, std::uint64_t key) {
    return random_tensor(shape, key, GetParam());
  }
  // The loops may fuse a product with a sum, and the kernels do not. A sum before a rounding that
  // differs in its last bit may round to the next number.
  static double tolerance() { return GetParam() == at::kBFloat16 ? 1.0 / 128 : 1e-6; }
};

// Widths with whole packs of 16 bytes, and with a rest.
constexpr std::int64_t kWidths[] = {64, 33, 3};

TEST_P(DeviceKernels, GatedProductAndItsGradientAreThoseOfTheLoops) {
  for (const std::int64_t width : kWidths) {
    const at::Tensor gate = random({7, width}, 1).mul(8);
    const at::Tensor up = random({7, width}, 2);
    ASSERT_TRUE(fused::serves(gate, {up}));
    EXPECT_LT(distance_of(fused::swiglu(gate, up), swiglu(gate, up)), tolerance()) << width;
    std::array<at::Tensor, 3> given = {gate.clone(), up.clone(), random({7, width}, 3)};
    std::array<at::Tensor, 3> expected = {gate.clone(), up.clone(), given[2].clone()};
    fused::swiglu_gradient(given[0], given[1], given[2]);
    swiglu_gradient(expected[0], expected[1], expected[2]);
    for (std::size_t i = 0; i < given.size(); ++i) {
      EXPECT_LT(distance_of(given[i], expected[i]), tolerance()) << width << ", tensor " << i;
    }
  }
}

TEST_P(DeviceKernels, RotationIsThatOfTheLoopsAndUndoesItself) {
  for (const std::int64_t half : {std::int64_t{8}, std::int64_t{3}}) {
    std::vector<double> frequencies;
    for (std::int64_t k = 0; k < half; ++k) {
      frequencies.push_back(std::pow(10.0, -static_cast<double>(k)));
    }
    const RotaryTable table = rotary_table(20, frequencies);
    const at::Tensor x = random({2, 5, 3, 2 * half}, 4);
    at::Tensor expected = x.clone();
    apply_rope(expected, table, Rope::kForward, /*first=*/7);
    at::Tensor given = x.clone();
    const RotaryTable::Angles angles = table.of(x);
    const at::Tensor cosine = angles.cosine.narrow(0, 7, 5).clone();
    const at::Tensor sine = angles.sine.narrow(0, 7, 5).clone();
    fused::apply_rope(given, cosine, sine, Rope::kForward);
    EXPECT_LT(distance_of(given, expected), tolerance()) << half;
    EXPECT_GT(distance_of(given, x), 0.1) << half;
    fused::apply_rope(given, cosine, sine, Rope::kBack);
    EXPECT_LT(distance_of(given, x), 2 * tolerance()) << half;
  }
}

TEST_P(DeviceKernels, NormGradientIsThatOfTheLoops) {
  for (const std::int64_t width : {std::int64_t{2048}, std::int64_t{45}}) {
    const at::Tensor x = random({70, width}, 1);
    const at::Tensor weight = random({width}, 2);
    const at::Tensor gradient = random({70, width}, 3);
    const at::Tensor inverse = rms_norm(x, weight, 1e-5).inverse_N1;
    for (const at::Tensor& residual : {at::Tensor(), random({70, width}, 4)}) {
      const NormGradient given =
          fused::norm_gradient(gradient, x, inverse, weight, InputGradient::kWanted, residual);
      const NormGradient expected =
          norm_gradient(gradient, x, inverse, weight, InputGradient::kWanted, residual);
      EXPECT_LT(distance_of(given.x_ND, expected.x_ND), tolerance()) << width;
      EXPECT_EQ(given.weight_D.scalar_type(), at::kFloat);
      EXPECT_LT(distance_of(given.weight_D, expected.weight_D), 1e-6) << width;
    }
    const NormGradient of_weight =
        fused::norm_gradient(gradient, x, inverse, weight, InputGradient::kNotWanted, {});
    EXPECT_FALSE(of_weight.x_ND.defined());
  }
}

TEST_P(DeviceKernels, LossProbabilitiesAndGradientAreThoseOfTheLoops) {
  for (const std::int64_t width : {std::int64_t{2048}, std::int64_t{1000}, std::int64_t{5}}) {
    const at::Tensor scores = random({6, width}, 5).mul(6);
    const at::Tensor targets = at::arange(6, at::kLong).mul(7).remainder(width);
    for (const std::int64_t tokens : {std::int64_t{0}, std::int64_t{11}}) {
      at::Tensor given = scores.clone();
      at::Tensor expected = scores.clone();
      const at::Tensor loss = fused::cross_entropy(given, targets, tokens);
      EXPECT_EQ(loss.scalar_type(), at::kFloat);
      EXPECT_NEAR(loss.item<double>(), cross_entropy(expected, targets, tokens).item<double>(),
                  1e-5)
          << width;
      EXPECT_LT(distance_of(given, expected), tolerance()) << width;
      fused::cross_entropy_gradient(given, targets, 0.5, tokens);
      cross_entropy_gradient(expected, targets, 0.5, tokens);
      EXPECT_LT(distance_of(given, expected), tolerance()) << width;
    }
  }
}

TEST_P(DeviceKernels, ScoresFarApartLoseNothing) {
  // The highest is met late, and the others vanish beside it.
  at::Tensor scores = at::full({1, 600}, -300.0, at::dtype(GetParam()));
  scores[0][599] = 200.0;
  const at::Tensor loss = fused::cross_entropy(scores, at::full({1}, 599, at::kLong), 0);
  EXPECT_NEAR(loss.item<double>(), 0, 1e-6);
  EXPECT_EQ(scores[0][599].item<double>(), 1);
  EXPECT_LT(scores[0][0].item<double>(), 1e-30);
}

TEST_P(DeviceKernels, ATargetOutsideTheVocabularyIsNotANumber) {
  for (const std::int64_t target : {std::int64_t{-1}, std::int64_t{9}}) {
    at::Tensor scores = random({2, 9}, 6);
    const at::Tensor loss =
        fused::cross_entropy(scores, at::full({2}, target, at::kLong), /*tokens=*/0);
    EXPECT_TRUE(std::isnan(loss.item<double>())) << target;
  }
}

TEST_P(DeviceKernels, WhatTheyDoNotServeIsLeftToOthers) {
  const at::Tensor x = random({8, 16}, 7);
  EXPECT_TRUE(fused::serves(x, {x, at::Tensor()}));
  EXPECT_FALSE(fused::serves(x.t())) << "not contiguous";
  EXPECT_FALSE(fused::serves(x.flatten().narrow(0, 1, 64))) << "begins between two packs";
  EXPECT_FALSE(fused::serves(x, {x.t()}));
  EXPECT_FALSE(fused::serves(x.to(at::kDouble)));
  EXPECT_FALSE(fused::serves(x.to(at::kHalf)));
  EXPECT_FALSE(fused::serves(x.to(at::kMeta))) << device::why_no_kernels(at::kMeta);
  device::use_kernels(false);
  EXPECT_FALSE(fused::serves(x));
  EXPECT_EQ(device::why_no_kernels(at::kCPU), "run.fused_kernels = false");
  device::use_kernels(true);
  EXPECT_TRUE(fused::serves(x));
}

INSTANTIATE_TEST_SUITE_P(Types, DeviceKernels, ::testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& type) { return at::toString(type.param); });

TEST(DeviceMask, HasTheBitsOfTheCpu) {
  testing::set_launcher_of_host();
  for (const std::int64_t count : {1, 4, 4099}) {
    const at::Tensor like = at::zeros({count});
    for (const std::uint64_t key : {std::uint64_t{3}, std::uint64_t{0xFEDCBA9876543210}}) {
      EXPECT_TRUE(at::equal(fused::keep_mask(like, key, 0x40000000U),
                            generic::keep_mask(like, key, 0x40000000U)))
          << count << " elements, key " << key;
    }
  }
}

TEST(DeviceAdamW, HasTheBitsOfTheCpu) {
  testing::set_launcher_of_host();
  for (const std::int64_t count : {64, 67}) {
    model::LayerState state;
    model::Parameter& parameter = state.parameters.emplace_back();
    parameter.value = random_tensor({count}, 1, at::kFloat);
    parameter.gradient = random_tensor({count}, 2, at::kFloat);
    parameter.first_moment = random_tensor({count}, 3, at::kFloat).mul(0.1);
    parameter.second_moment = random_tensor({count}, 4, at::kFloat).square();
    parameter.compute_copy = parameter.value.to(at::kBFloat16);
    parameter.weight_decay = true;
    const at::Tensor value = parameter.value.clone();
    const at::Tensor gradient = parameter.gradient.clone();
    const at::Tensor first = parameter.first_moment.clone();
    const at::Tensor second = parameter.second_moment.clone();
    const at::Tensor copy = at::empty_like(parameter.compute_copy);
    const model::AdamWOptions options{.learning_rate = 0.01};
    const double scale = 0.7;
    model::update(state, options, scale);  // its first step
    const auto rounded = [](double x) { return static_cast<float>(x); };
    fused::update(value, gradient, first, second, copy,
                  {.gradient = rounded(scale),
                   .first = rounded(1 - options.beta1),
                   .second = rounded(1 - options.beta2),
                   .second_kept = rounded(options.beta2),
                   .rate = rounded(-options.learning_rate / (1 - options.beta1)),
                   .deviation = rounded(std::sqrt(1 - options.beta2)),
                   .epsilon = rounded(options.epsilon),
                   .kept = rounded(1 - options.learning_rate * options.weight_decay)});
    EXPECT_TRUE(same_bits(value, parameter.value)) << count;
    EXPECT_TRUE(same_bits(gradient, at::zeros({count}))) << count;
    EXPECT_TRUE(same_bits(first, parameter.first_moment)) << count;
    EXPECT_TRUE(same_bits(second, parameter.second_moment)) << count;
    EXPECT_TRUE(same_bits(copy, parameter.compute_copy)) << count;
  }
}

// NVRTC needs no device.
class Nvrtc : public ::testing::Test {
 protected:
  void SetUp() override {
    if (library_.empty()) GTEST_SKIP() << "no NVRTC here: `scripts/setup torch` installs it";
  }
  std::filesystem::path library_ = DYNMO_TEST_NVRTC;
  TempFolder folder_;
};

TEST_F(Nvrtc, CompilesAllKernelsForThreeDevices) {
  for (const char* architecture : {"sm_80", "sm_90", "sm_100"}) {
    const auto cubin = device::compile_kernels(library_, architecture);
    ASSERT_TRUE(cubin.has_value()) << cubin.error().message;
    EXPECT_TRUE(
        cubin->starts_with("\x7f"
                           "ELF"))
        << architecture;
    for (const char* kernel :
         {"swiglu_float", "swiglu_bf16", "swiglu_gradient_float", "swiglu_gradient_bf16",
          "rotate_float", "rotate_bf16", "norm_gradient_float", "norm_gradient_bf16",
          "norm_weight_gradient_float", "norm_weight_gradient_bf16", "cross_entropy_float",
          "cross_entropy_bf16", "cross_entropy_gradient_float", "cross_entropy_gradient_bf16",
          "keep_mask", "adamw"}) {
      EXPECT_NE(cubin->find(std::string(".text.") + kernel), std::string::npos)
          << architecture << " " << kernel;
    }
  }
}

TEST_F(Nvrtc, ADeviceThatItDoesNotKnowIsRefused) {
  const auto cubin = device::compile_kernels(library_, "sm_1");
  ASSERT_FALSE(cubin.has_value());
  EXPECT_TRUE(cubin.error().message.starts_with("NVRTC for sm_1: ")) << cubin.error().message;
}

TEST_F(Nvrtc, ARefusalWeighsMoreThanALibraryThatIsMissing) {
  const auto refused =
      device::kept_kernels({"libnothing.so.1", library_, "libnothing.so.2"}, "sm_1", "/nowhere");
  ASSERT_FALSE(refused.has_value());
  EXPECT_TRUE(refused.error().message.starts_with("NVRTC for sm_1: ")) << refused.error().message;
}

TEST_F(Nvrtc, KernelsAreKeptAndFoundAgain) {
  const std::filesystem::path cache = folder_.path() / "kernels";
  const auto first = device::kept_kernels({"libnothing.so.1", library_}, "sm_90", cache);
  ASSERT_TRUE(first.has_value()) << first.error().message;
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(cache)) files.push_back(entry);
  ASSERT_EQ(files.size(), 1U);
  EXPECT_EQ(*read_file(files[0]), *first);
  std::ofstream(files[0], std::ios::trunc) << "another program";
  EXPECT_EQ(*device::kept_kernels({library_}, "sm_90", cache), "another program");
  // A file stands where the folder would be.
  const auto unkept = device::kept_kernels({library_}, "sm_90", files[0]);
  ASSERT_TRUE(unkept.has_value());
  EXPECT_EQ(*unkept, *first);
}

TEST(NoNvrtc, IsOneLine) {
  const auto missing =
      device::kept_kernels({"libnothing.so.1", "/nowhere/libnvrtc.so.13"}, "sm_90", "/nowhere");
  ASSERT_FALSE(missing.has_value());
  EXPECT_NE(missing.error().message.find("/nowhere/libnvrtc.so.13"), std::string::npos)
      << missing.error().message;
  EXPECT_FALSE(device::kept_kernels({}, "sm_90", "/nowhere").has_value());
  const auto places = device::nvrtc_libraries("/site/torch/lib");
  EXPECT_EQ(places.front(), "/site/nvidia/cu13/lib/libnvrtc.so.13");
  EXPECT_EQ(places[1], "/site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
}

TEST(NoKernels, ACudaDeviceWithoutADriverSaysSo) {
  const std::string why = device::why_no_kernels(at::Device(at::kCUDA, 0));
  if (why.empty()) GTEST_SKIP() << "there is a CUDA device here";
  EXPECT_EQ(why, "no CUDA driver");
  EXPECT_THROW(device::launch({.kernel = "adamw", .device = at::Device(at::kCUDA, 0)}),
               CheckFailure);
}

}  // namespace
}  // namespace dynmo::kernels
