// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/tensor_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace dynmo::kernels {
namespace {

using Shapes = std::vector<std::vector<std::int64_t>>;

constexpr std::int64_t kMiBOfFloats = std::int64_t{1} << 18;

std::uintptr_t place(const at::Tensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
}

// Below and above the size from which a run has pages of its own.
const std::vector<Shapes> kCases = {{{4, 8}, {3}, {}, {16}, {5, 7}},
                                    {{kMiBOfFloats}, {3}, {2, kMiBOfFloats}, {16}, {0}, {1200, 7}}};

TEST(StateMemory, TensorsLieBehindOneAnotherAndHoldWhatIsWritten) {
  for (const Shapes& shapes : kCases) {
    const std::vector<at::Tensor> tensors = allocate_together(shapes);
    ASSERT_EQ(tensors.size(), shapes.size());
    std::uintptr_t next = place(tensors[0]);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_EQ(tensors[i].sizes(), at::IntArrayRef(shapes[i]));
      EXPECT_TRUE(tensors[i].is_contiguous());
      EXPECT_EQ(place(tensors[i]) % 64, 0U);
      tensors[i].fill_(static_cast<double>(i + 1));
      back_memory(tensors[i]);
      if (tensors[i].numel() == 0) continue;  // is nowhere
      EXPECT_EQ(place(tensors[i]), next);
      next += (tensors[i].nbytes() + 63) / 64 * 64;
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_TRUE(at::equal(tensors[i], at::full_like(tensors[i], static_cast<double>(i + 1))));
    }
  }
}

TEST(StateMemory, TheLastOnesAreZeroAlsoInMemoryThatWasUsed) {
  for (const Shapes& shapes : kCases) {
    for (int round = 0; round < 3; ++round) {
      const std::vector<at::Tensor> tensors = allocate_together(shapes, 2);
      for (std::size_t i = tensors.size() - 2; i < tensors.size(); ++i) {
        EXPECT_EQ(tensors[i].count_nonzero().item<int>(), 0);
      }
      for (const at::Tensor& tensor : tensors) tensor.fill_(1);
    }
  }
}

TEST(StateMemory, ATensorThatGoesLeavesTheOthers) {
  for (const Shapes& shapes : kCases) {
    for (std::size_t first = 0; first < shapes.size(); ++first) {
      std::vector<at::Tensor> tensors = allocate_together(shapes);
      for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].fill_(static_cast<double>(i + 1));
      std::thread([gone = std::move(tensors[first])]() mutable { gone.reset(); }).join();
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        if (i == first) continue;
        EXPECT_TRUE(at::equal(tensors[i], at::full_like(tensors[i], static_cast<double>(i + 1))));
      }
    }
  }
}

TEST(StateMemory, ALargeTensorGivesItsPagesBackBeforeTheOthersGo) {
  std::vector<at::Tensor> tensors = allocate_together({{16}, {6, kMiBOfFloats}, {16}});
  tensors[1].fill_(1);
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  auto* const middle =
      reinterpret_cast<std::byte*>((place(tensors[1]) + 3 * 4 * kMiBOfFloats) / page * page);
  unsigned char resident = 0;
  ASSERT_EQ(mincore(middle, page, &resident), 0);
  EXPECT_EQ(resident & 1, 1);
  tensors[1].reset();
  ASSERT_EQ(mincore(middle, page, &resident), 0) << "the others are still there";
  EXPECT_EQ(resident & 1, 0);
}

}  // namespace
}  // namespace dynmo::kernels
