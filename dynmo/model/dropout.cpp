// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/dropout.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/kernels/fused.h"
#include "dynmo/kernels/generic.h"

// Compiles the same integer code for wider vectors too. The widest is chosen at load time, and all
// give the same words.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define DYNMO_VECTOR_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DYNMO_VECTOR_CLONES
#endif

namespace dynmo::model {
namespace {

namespace autograd = torch::autograd;

constexpr std::size_t kLanes = 16;  // philox blocks computed side by side
constexpr std::size_t kTile = 4 * kLanes;

// Sets kept[4 * lane + word] to whether that word of philox block first_block + lane is at least
// `threshold`. The words equal those of philox in core/rng.h, as a test checks. The layout suits
// vector instructions.
DYNMO_VECTOR_CLONES
void keep_tile(std::uint64_t key, std::uint64_t first_block, std::uint32_t threshold,
               std::uint8_t* kept) {
  std::array<std::uint64_t, kLanes> c0;
  std::array<std::uint64_t, kLanes> c1;
  std::array<std::uint64_t, kLanes> c2{};
  std::array<std::uint64_t, kLanes> c3{};
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    c0[lane] = (first_block + lane) & 0xFFFFFFFF;
    c1[lane] = (first_block + lane) >> 32;
  }
  std::uint64_t key0 = key & 0xFFFFFFFF;
  std::uint64_t key1 = key >> 32;
  for (int round = 0; round < 10; ++round) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const std::uint64_t product0 = 0xD2511F53ULL * c0[lane];
      const std::uint64_t product1 = 0xCD9E8D57ULL * c2[lane];
      c0[lane] = (product1 >> 32) ^ c1[lane] ^ key0;
      c1[lane] = product1 & 0xFFFFFFFF;
      c2[lane] = (product0 >> 32) ^ c3[lane] ^ key1;
      c3[lane] = product0 & 0xFFFFFFFF;
    }
    key0 = (key0 + 0x9E3779B9) & 0xFFFFFFFF;
    key1 = (key1 + 0xBB67AE85) & 0xFFFFFFFF;
  }
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    kept[4 * lane] = c0[lane] >= threshold;
    kept[4 * lane + 1] = c1[lane] >= threshold;
    kept[4 * lane + 2] = c2[lane] >= threshold;
    kept[4 * lane + 3] = c3[lane] >= threshold;
  }
}

at::Tensor keep_mask(const at::Tensor& like, double p, std::uint64_t key) {
  // A probability just below 1 rounds to 2^32, which has no place in the word.
  const auto threshold =
      static_cast<std::uint32_t>(std::min(std::llround(p * 0x1p32), 0xFFFFFFFFLL));
  if (!like.is_cpu()) {
    return kernels::fused::serves(like) ? kernels::fused::keep_mask(like, key, threshold)
                                        : kernels::generic::keep_mask(like, key, threshold);
  }
  at::Tensor mask = at::empty(like.sizes(), like.options().dtype(at::kBool));
  auto* out = reinterpret_cast<std::uint8_t*>(mask.data_ptr<bool>());
  const auto count = static_cast<std::size_t>(mask.numel());
  std::array<std::uint8_t, kTile> tile;
  for (std::size_t i = 0; i < count; i += kTile) {
    keep_tile(key, i / 4, threshold, tile.data());
    std::memcpy(out + i, tile.data(), std::min(kTile, count - i));
  }
  return mask;
}

// Computes masked(), with its gradient. Saves one byte for each element for the backward pass,
// where a product would save an operand of 4 or 8.
struct Masked : autograd::Function<Masked> {
  static at::Tensor forward(autograd::AutogradContext* saved, const at::Tensor& input,
                            const at::Tensor& mask, double p) {
    saved->save_for_backward({mask});
    saved->saved_data["p"] = p;
    return masked(input, mask, p);
  }
  static autograd::variable_list backward(autograd::AutogradContext* saved,
                                          const autograd::variable_list& gradients) {
    const at::Tensor mask = saved->get_saved_variables()[0];
    return {masked(gradients[0], mask, saved->saved_data["p"].toDouble()), {}, {}};
  }
};

}  // namespace

at::Tensor dropout_mask(const at::Tensor& like, double p, const LayerState& state,
                        const LayerContext& context, std::uint64_t salt) {
  DYNMO_CHECK(p >= 0 && p < 1, "a dropout probability in [0, 1), got {}", p);
  if (context.pass != Pass::kTraining || p == 0) return {};
  const std::uint64_t key = mix_key({state.random_key, static_cast<std::uint64_t>(context.step),
                                     static_cast<std::uint64_t>(context.micro_batch.value), salt});
  return keep_mask(like, p, key);
}

at::Tensor masked(const at::Tensor& x, const at::Tensor& mask, double p) {
  return mask.defined() ? at::native_dropout_backward(x, mask, 1 / (1 - p)) : x;
}

at::Tensor dropout(const at::Tensor& input, double p, const LayerState& state,
                   const LayerContext& context, std::uint64_t salt) {
  const at::Tensor mask = dropout_mask(input, p, state, context, salt);
  return mask.defined() ? Masked::apply(input, mask, p) : input;
}

}  // namespace dynmo::model
