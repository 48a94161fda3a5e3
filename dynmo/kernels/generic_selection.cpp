// SPDX-License-Identifier: Apache-2.0
// Rows are moved to their places and back by index_select alone: it adds nothing, so its order
// needs no sort. N is the number of heads of all sequences, L the length of the longest section and
// S the number of buckets.
#include "dynmo/kernels/generic_selection.h"

#include <ATen/ATen.h>

#include <tuple>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/kernels/attention_impl.h"
#include "dynmo/kernels/generic.h"
#include "dynmo/kernels/host_memory.h"

namespace dynmo::kernels::generic {
namespace {

using at::Tensor;

Tensor widened(const Tensor& x) { return x.to(accumulation_type(x.scalar_type())); }

// The first row of a section sees no key, and its last one is a key of none. So with plain causal
// attention of L - 1 queries and keys, those of rank r see keys of rank < r.
enum Shift : std::int64_t { kKeys = 0, kQueries = 1 };

Tensor rows_at(const Selection& selection, Shift shift) {
  return selection.rows_NLS.narrow(1, shift, selection.rows_NLS.size(1) - 1);
}

// Padding gets the numbers of any row.
Tensor in_sections(const Tensor& x_BTHK, const Selection& selection, Shift shift) {
  const Tensor rows_NLS = rows_at(selection, shift);
  return x_BTHK.reshape({-1, x_BTHK.size(3)})
      .index_select(0, rows_NLS.clamp_min(0).reshape({-1}))
      .view({rows_NLS.size(0), rows_NLS.size(1), rows_NLS.size(2), x_BTHK.size(3)});
}

// Rows that are no queries, or no keys, become 0.
Tensor from_sections(const Tensor& x_NLSK, at::IntArrayRef sizes_BTHK, const Selection& selection,
                     Shift shift) {
  const std::int64_t buckets = selection.rows_NLS.size(2);
  const std::int64_t in_head = selection.rows_NLS.size(1) * buckets;  // places
  const Tensor place = selection.places.remainder(in_head);
  const Tensor outside = shift == kQueries ? place.lt(buckets) : place.ge(in_head - buckets);
  const Tensor shifted = selection.places.sub(selection.places.div(in_head, "floor"), buckets)
                             .sub_(shift * buckets)
                             .clamp_(0, x_NLSK.numel() / x_NLSK.size(3) - 1);
  return x_NLSK.reshape({-1, x_NLSK.size(3)})
      .index_select(0, shifted)
      .masked_fill_(outside.unsqueeze(1), 0)
      .view(sizes_BTHK);
}

Tensor inverse_norm(const Tensor& q_BTHK) {
  return widened(q_BTHK)
      .square()
      .sum(-1, /*keepdim=*/true)
      .add_(kLeastSquare)
      .sqrt_()
      .reciprocal_();
}

struct InSections {
  InSections(const Tensor& q_BTHK, const Tensor& v_BTGK, const Selection& selection)
      : inverse_BTH1(inverse_norm(q_BTHK)),
        k_BTHK(widened(q_BTHK).mul(inverse_BTH1).to(q_BTHK.scalar_type())),
        q_NLSK(in_sections(q_BTHK, selection, kQueries)),
        k_NLSK(in_sections(k_BTHK, selection, kKeys)),
        v_NLSK(in_sections(repeated_heads(v_BTGK, q_BTHK.size(2)), selection, kKeys)) {}
  Tensor inverse_BTH1;
  Tensor k_BTHK;
  Tensor q_NLSK, k_NLSK, v_NLSK;
};

}  // namespace

// The highest of all products and their opposites is the largest product without its sign.
Tensor angular_hashes(const Tensor& x_BTHK, const Tensor& directions_HKS) {
  const Tensor wide_BTHK = widened(x_BTHK);
  const Tensor x_HNK = wide_BTHK.permute({2, 0, 1, 3}).flatten(1, 2);
  const Tensor sums_HNS = at::bmm(x_HNK, directions_HKS.to(wide_BTHK.scalar_type()));
  const Tensor closest_HN1 = sums_HNS.abs().argmax(2, /*keepdim=*/true);
  const Tensor hash_HN1 = closest_HN1.mul(2).add_(sums_HNS.gather(2, closest_HN1).lt(0));
  return hash_HN1.to(at::kInt)
      .view({x_BTHK.size(2), x_BTHK.size(0), x_BTHK.size(1)})
      .transpose(0, 1)
      .contiguous();
}

Selection select_buckets(const Tensor& bucket_BHT, std::int64_t buckets) {
  const std::int64_t heads = bucket_BHT.size(1);
  const std::int64_t tokens = bucket_BHT.size(2);
  const Tensor bucket_NT = bucket_BHT.flatten(0, 1);
  const auto [sorted_NT, order_NT] =
      at::sort(bucket_NT, /*stable=*/true, /*dim=*/1, /*descending=*/false);
  const Tensor each_NS =
      at::arange(buckets, bucket_NT.options()).expand({bucket_NT.size(0), buckets}).contiguous();
  const Tensor first_NS = at::searchsorted(sorted_NT, each_NS);
  const Tensor count_NS =
      at::searchsorted(sorted_NT, each_NS, /*out_int32=*/false, /*right=*/true).sub_(first_NS);
  const Tensor read = at::stack({count_NS.max(), count_NS.square().sum()}).to(at::kCPU);
  const std::int64_t longest = host_data<const std::int64_t>(read)[0];
  const std::int64_t squares = host_data<const std::int64_t>(read)[1];

  const auto options = order_NT.options();
  const Tensor head_N = at::arange(bucket_NT.size(0), options);
  const Tensor rank_L1 = at::arange(longest, options).unsqueeze(1);
  const Tensor index_NLS = first_NS.unsqueeze(1).add(rank_L1).clamp_max_(tokens - 1);
  // Row (b T + t) H + h.
  const Tensor origin_N =
      head_N.div(heads, "floor").mul_(tokens * heads).add_(head_N.remainder(heads));
  const Tensor rows_NLS = order_NT.gather(1, index_NLS.flatten(1))
                              .view(index_NLS.sizes())
                              .mul_(heads)
                              .add_(origin_N.view({-1, 1, 1}))
                              .masked_fill_(rank_L1.ge(count_NS.unsqueeze(1)), -1);

  const Tensor bucket_of_NT = bucket_NT.to(at::kLong);
  const Tensor rank_NT =
      std::get<1>(at::sort(order_NT, /*dim=*/1)).sub(first_NS.gather(1, bucket_of_NT));
  const Tensor places_BHT = rank_NT.add(head_N.mul(longest).unsqueeze(1))
                                .mul_(buckets)
                                .add_(bucket_of_NT)
                                .view(bucket_BHT.sizes());
  return {.queries = {},
          .query_offsets = {},
          .keys = {},
          .key_offsets = {},
          .mask = Mask::kStrict,
          .rows_NLS = rows_NLS,
          .places = places_BHT.transpose(1, 2).flatten(),
          .pairs = (squares - bucket_BHT.numel()) / 2};
}

Attention selected_attention(const Tensor& q_BTHK, const Tensor& v_BTGK,
                             const Selection& selection) {
  if (selection.rows_NLS.size(1) == 1) {
    return {.out_BTHK = at::zeros(q_BTHK.sizes(), q_BTHK.options()), .log_sum_exp = {}};
  }
  const InSections x(q_BTHK, v_BTGK, selection);
  Attention attention = generic::causal_attention(x.q_NLSK, x.k_NLSK, x.v_NLSK);
  attention.out_BTHK = from_sections(attention.out_BTHK, q_BTHK.sizes(), selection, kQueries);
  return attention;
}

AttentionGradient selected_attention_gradient(const Tensor& gradient_BTHK, const Tensor& q_BTHK,
                                              const Tensor& v_BTGK, const Attention& attention,
                                              const Selection& selection) {
  if (selection.rows_NLS.size(1) == 1) {
    return {.q_BTHK = at::zeros(q_BTHK.sizes(), q_BTHK.options()),
            .k_BTHK = {},
            .v_BTHK = at::zeros(v_BTGK.sizes(), v_BTGK.options())};
  }
  const InSections x(q_BTHK, v_BTGK, selection);
  // Padding has no gradient from behind, so it gives none.
  const Tensor padding_NLS1 = rows_at(selection, kQueries).lt(0).unsqueeze(3);
  const Tensor slope_NLSK =
      in_sections(gradient_BTHK, selection, kQueries).masked_fill_(padding_NLS1, 0);
  Attention in_place = attention;
  in_place.out_BTHK = in_sections(attention.out_BTHK, selection, kQueries);
  const AttentionGradient gradient =
      generic::causal_attention_gradient(slope_NLSK, x.q_NLSK, x.k_NLSK, x.v_NLSK, in_place);
  const at::IntArrayRef sizes = q_BTHK.sizes();
  const Tensor q_gradient = from_sections(gradient.q_BTHK, sizes, selection, kQueries);
  // The gradient through the keys: d k / d q = (1 - k k^T) / |q|.
  const Tensor k_gradient = widened(from_sections(gradient.k_BTHK, sizes, selection, kKeys));
  const Tensor k = widened(x.k_BTHK);
  const Tensor along_BTH1 = k.mul(k_gradient).sum(-1, /*keepdim=*/true);
  const Tensor through_BTHK = k_gradient.sub(k.mul(along_BTH1)).mul_(x.inverse_BTH1);
  return {.q_BTHK = widened(q_gradient).add(through_BTHK).to(q_BTHK.scalar_type()),
          .k_BTHK = {},
          .v_BTHK = summed_heads(from_sections(gradient.v_BTHK, sizes, selection, kKeys),
                                 v_BTGK.size(2))};
}

}  // namespace dynmo::kernels::generic
