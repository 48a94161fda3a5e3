// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/attention_pattern.h"

#include <ATen/ATen.h>

#include <optional>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/model/kernels_impl.h"

namespace dynmo::model {
namespace {

using at::Tensor;

const std::int64_t* numbers(const Tensor& x) { return x.const_data_ptr<std::int64_t>(); }

RaggedRows ragged_rows(const Tensor& q_BTHK, const Tensor& chosen, const Tensor& offsets) {
  const std::int64_t tokens = q_BTHK.size(1);
  const std::int64_t heads = q_BTHK.size(2);
  RaggedRows rows{.offsets = {numbers(offsets), numbers(offsets) + offsets.numel()},
                  .positions = {}};
  rows.positions.reserve(static_cast<std::size_t>(chosen.numel()));
  for (std::int64_t i = 0; i < chosen.numel(); ++i) {
    rows.positions.push_back(static_cast<std::int32_t>(numbers(chosen)[i] / heads % tokens));
  }
  return rows;
}

Ragged ragged_of(const Tensor& q_BTHK, const Selection& selection) {
  Ragged ragged{.queries = ragged_rows(q_BTHK, selection.queries, selection.query_offsets),
                .keys = {},
                .mask = selection.mask};
  ragged.keys = selection.keys.is_same(selection.queries)
                    ? ragged.queries
                    : ragged_rows(q_BTHK, selection.keys, selection.key_offsets);
  return ragged;
}

// The same rows where `heads` heads of queries share those of x.
Tensor shared_rows(const Tensor& rows, std::int64_t heads, const Tensor& x_BTGK) {
  if (x_BTGK.size(2) == heads) return rows;
  const std::int64_t group = heads / x_BTGK.size(2);
  return rows.div(heads, "floor")
      .mul_(x_BTGK.size(2))
      .add_(rows.remainder(heads).div_(group, "floor"));
}

// [N, 1, K]
Tensor chosen(const Tensor& x_BTGK, const Tensor& rows, std::int64_t heads) {
  return x_BTGK.reshape({-1, x_BTGK.size(3)})
      .index_select(0, shared_rows(rows, heads, x_BTGK))
      .unsqueeze(1);
}

// Puts rows [N, 1, K] to their places among those of `like`; the others are 0.
Tensor put_back(const Tensor& rows_N1K, const Tensor& rows, const Tensor& like_BTHK) {
  return at::zeros({like_BTHK.numel() / like_BTHK.size(3), like_BTHK.size(3)}, like_BTHK.options())
      .index_copy_(0, rows, rows_N1K.squeeze(1))
      .view(like_BTHK.sizes());
}

// From a gradient by query heads to one by the heads of x.
Tensor summed(const Tensor& gradient_BTHK, const Tensor& x_BTGK) {
  if (gradient_BTHK.size(2) == x_BTGK.size(2)) return gradient_BTHK;
  return gradient_BTHK.view({x_BTGK.size(0), x_BTGK.size(1), x_BTGK.size(2), -1, x_BTGK.size(3)})
      .sum(3);
}

// Keys of norm 1 made of queries: x / |x|, but for what keeps 0 at 0.
struct SharedKeys {
  explicit SharedKeys(const Tensor& q_N1K) {
    constexpr double kLeast = 1e-12;
    const Tensor wide = q_N1K.to(statistics_type(q_N1K.scalar_type()));
    inverse_N11 = wide.square().sum({-1}, true).add_(kLeast).rsqrt_();
    keys_N1K = (wide * inverse_N11).to(q_N1K.scalar_type());
  }
  // d k / d q = (1 - k k^T) / |q|.
  [[nodiscard]] Tensor through(const Tensor& k_gradient_N1K) const {
    const Tensor wide = keys_N1K.to(inverse_N11.scalar_type());
    const Tensor gradient = k_gradient_N1K.to(inverse_N11.scalar_type());
    const Tensor along = (wide * gradient).sum({-1}, true);
    return ((gradient - wide * along) * inverse_N11).to(k_gradient_N1K.scalar_type());
  }
  Tensor inverse_N11;
  Tensor keys_N1K;
};

template <typename Element>
void hash_heads(const Tensor& x_BTHK, const Tensor& directions_HKS, Tensor& hashes_BHT) {
  using Wide = kernels::Wide<Element>;
  const Tensor directions = directions_HKS.to(c10::CppTypeToScalarType<Wide>::value).contiguous();
  for (std::int64_t b = 0; b < x_BTHK.size(0); ++b) {
    for (std::int64_t h = 0; h < x_BTHK.size(2); ++h) {
      kernels::highest_hash(
          x_BTHK.const_data_ptr<Element>() + b * x_BTHK.stride(0) + h * x_BTHK.stride(2),
          x_BTHK.stride(1), x_BTHK.size(1), x_BTHK.size(3),
          directions.const_data_ptr<Wide>() + h * directions.stride(0), directions.size(2),
          hashes_BHT.mutable_data_ptr<std::int32_t>() + (b * x_BTHK.size(2) + h) * x_BTHK.size(1));
    }
  }
}

}  // namespace

std::vector<std::string> pattern_figures() { return {"pairs", "causal_pairs"}; }

std::vector<double> pattern_figures_of(const Tensor& q_BTHK, const Selection& selection) {
  const std::int64_t tokens = q_BTHK.size(1);
  return {static_cast<double>(pairs_of(ragged_of(q_BTHK, selection))),
          static_cast<double>(q_BTHK.size(0) * q_BTHK.size(2) * (tokens * (tokens + 1) / 2))};
}

Attention selected_attention(const Tensor& q_BTHK, const Tensor& k_BTGK, const Tensor& v_BTGK,
                             const Selection& selection) {
  const std::int64_t heads = q_BTHK.size(2);
  const Tensor keys_N1K = k_BTGK.defined()
                              ? chosen(k_BTGK, selection.keys, heads)
                              : SharedKeys(chosen(q_BTHK, selection.keys, heads)).keys_N1K;
  RaggedAttention attention =
      ragged_attention(chosen(q_BTHK, selection.queries, heads), keys_N1K,
                       chosen(v_BTGK, selection.keys, heads), ragged_of(q_BTHK, selection));
  return {.out_BTHK = put_back(attention.out_NHK, selection.queries, q_BTHK),
          .log_sum_exp = std::move(attention.log_sum_exp)};
}

AttentionGradient selected_attention_gradient(const Tensor& gradient_BTHK, const Tensor& q_BTHK,
                                              const Tensor& k_BTGK, const Tensor& v_BTGK,
                                              const Attention& attention,
                                              const Selection& selection) {
  const std::int64_t heads = q_BTHK.size(2);
  const auto queries = [&](const Tensor& x_BTHK) {
    return chosen(x_BTHK, selection.queries, heads);
  };
  std::optional<SharedKeys> shared;
  if (!k_BTGK.defined()) shared.emplace(chosen(q_BTHK, selection.keys, heads));
  RaggedGradient gradient = ragged_attention_gradient(
      queries(gradient_BTHK), queries(q_BTHK),
      shared ? shared->keys_N1K : chosen(k_BTGK, selection.keys, heads),
      chosen(v_BTGK, selection.keys, heads),
      {.out_NHK = queries(attention.out_BTHK), .log_sum_exp = attention.log_sum_exp},
      ragged_of(q_BTHK, selection));
  AttentionGradient result{
      .q_BTHK = put_back(gradient.q_NHK, selection.queries, q_BTHK),
      .k_BTHK = {},
      .v_BTHK = summed(put_back(gradient.v_MGK, selection.keys, q_BTHK), v_BTGK)};
  if (shared) {
    result.q_BTHK.add_(put_back(shared->through(gradient.k_MGK), selection.keys, q_BTHK));
  } else {
    result.k_BTHK = summed(put_back(gradient.k_MGK, selection.keys, q_BTHK), k_BTGK);
  }
  return result;
}

Tensor angular_hashes(const Tensor& x_BTHK, const Tensor& directions_HKS) {
  DYNMO_CHECK(x_BTHK.is_cpu() && x_BTHK.stride(3) == 1 && directions_HKS.size(2) > 0 &&
                  directions_HKS.size(0) == x_BTHK.size(2) &&
                  directions_HKS.size(1) == x_BTHK.size(3),
              "directions of {} heads of {} elements, got {} of {}", x_BTHK.size(2), x_BTHK.size(3),
              directions_HKS.size(0), directions_HKS.size(1));
  Tensor hashes_BHT = at::empty({x_BTHK.size(0), x_BTHK.size(2), x_BTHK.size(1)}, at::kInt);
  switch (x_BTHK.scalar_type()) {
    case at::kFloat:
      hash_heads<float>(x_BTHK, directions_HKS, hashes_BHT);
      break;
    case at::kDouble:
      hash_heads<double>(x_BTHK, directions_HKS, hashes_BHT);
      break;
    default:
      hash_heads<c10::BFloat16>(x_BTHK, directions_HKS, hashes_BHT);
  }
  return hashes_BHT;
}

}  // namespace dynmo::model
