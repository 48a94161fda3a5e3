// SPDX-License-Identifier: Apache-2.0
// Moves rows to their places and back by index_select alone. It adds nothing, so it is
// deterministic without a sort. N heads of all sequences, L rows of the longest section, S buckets,
// Z = N S sections, M = B T H rows.
#include "dynmo/kernels/generic_selection.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/kernels/attention_impl.h"
#include "dynmo/kernels/generic.h"

namespace dynmo::kernels::generic {
namespace {

using at::Tensor;

// Keys are the rows of a section without the last one, which no query sees. Queries are the rows
// without the first one, which sees no key. So in plain causal attention of L - 1 queries and keys
// a row sees the rows before it, but not itself.
enum Shift : std::int64_t { kKeys = 0, kQueries = 1 };

Tensor rows_at(const Selection& selection, Shift shift) {
  return selection.rows_NLS.narrow(1, shift, selection.rows_NLS.size(1) - 1);
}

// Returns the rows by section. Padding, and places behind all sections, hold arbitrary rows. If
// packed, L is M, and N and S are 1.
Tensor in_sections(const Tensor& x_BTHK, const Selection& selection, Shift shift) {
  const Tensor x_MK = x_BTHK.reshape({-1, x_BTHK.size(3)});
  if (selection.packed()) {
    return x_MK.index_select(0, selection.packed_rows_2M.select(0, shift))
        .view({1, -1, 1, x_MK.size(1)});
  }
  const Tensor rows_NLS = rows_at(selection, shift);
  return x_MK.index_select(0, rows_NLS.clamp_min(0).reshape({-1}))
      .view({rows_NLS.size(0), rows_NLS.size(1), rows_NLS.size(2), x_MK.size(1)});
}

// Moves rows back from their sections. Rows that are no queries, or no keys, become 0.
Tensor from_sections(const Tensor& x_NLSK, at::IntArrayRef sizes_BTHK, const Selection& selection,
                     Shift shift) {
  const Tensor x_PK = x_NLSK.reshape({-1, x_NLSK.size(3)});
  Tensor place;
  Tensor outside;
  if (selection.packed()) {
    place = selection.packed_places_2M.select(0, shift);
    outside = place.lt(0);
  } else {
    const std::int64_t buckets = selection.rows_NLS.size(2);
    const std::int64_t in_head = selection.rows_NLS.size(1) * buckets;  // places
    const Tensor in_own = selection.places.remainder(in_head);
    outside = shift == kQueries ? in_own.lt(buckets) : in_own.ge(in_head - buckets);
    place =
        selection.places.sub(selection.places.div(in_head, "floor"), buckets).sub_(shift * buckets);
  }
  return x_PK.index_select(0, place.clamp(0, x_PK.size(0) - 1))
      .masked_fill_(outside.unsqueeze(1), 0)
      .view(sizes_BTHK);
}

Tensor inverse_norm(const Tensor& q_BTHK) {
  return wide(q_BTHK).square().sum(-1, /*keepdim=*/true).add_(kLeastSquare).sqrt_().reciprocal_();
}

struct InSections {
  InSections(const Tensor& q_BTHK, const Tensor& v_BTGK, const Selection& selection)
      : inverse_BTH1(inverse_norm(q_BTHK)),
        k_BTHK(wide(q_BTHK).mul(inverse_BTH1).to(q_BTHK.scalar_type())),
        q_NLSK(in_sections(q_BTHK, selection, kQueries)),
        k_NLSK(in_sections(k_BTHK, selection, kKeys)),
        v_NLSK(in_sections(repeated_heads(v_BTGK, q_BTHK.size(2)), selection, kKeys)) {}
  Tensor inverse_BTH1;
  Tensor k_BTHK;
  Tensor q_NLSK, k_NLSK, v_NLSK;
};

Fused fused_sections(const Tensor& q_BTHK) {
  if (!has_kernel("aten::_flash_attention_forward", q_BTHK)) return Fused::kNone;
  const Tensor q_BHTK = q_BTHK.transpose(1, 2);
  const Fused chosen = fused_choice(q_BHTK, q_BHTK, q_BHTK);
  // cuDNN's operation is for whole sequences. Flash takes the same types.
  return chosen == Fused::kCudnn ? Fused::kFlash : chosen;
}

// Offsets of the sections, and the maximum number of rows of one.
struct Packing {
  explicit Packing(const Selection& selection, std::int64_t tokens)
      : offsets(selection.packed_offsets), longest(std::max<std::int64_t>(tokens - 1, 1)) {}
  Tensor offsets;
  std::int64_t longest;
};

constexpr std::int64_t kCausal = 1;  // sdp::CustomMaskType::CausalFromTopLeft

// Computes attention to the keys of each query's own section, for [1, M, 1, K].
Attention packed_attention(const InSections& x, const Packing& packing, Fused fused) {
  const auto& [offsets, longest] = packing;
  if (fused == Fused::kFlash) {
    const auto result = at::_flash_attention_forward(
        x.q_NLSK.squeeze(0), x.k_NLSK.squeeze(0), x.v_NLSK.squeeze(0), offsets, offsets, longest,
        longest, /*dropout_p=*/0.0, /*is_causal=*/true, /*return_debug_mask=*/false);
    return {.out_BTHK = std::get<0>(result).unsqueeze(0),
            .log_sum_exp = std::get<1>(result),
            .draws = {std::get<2>(result), std::get<3>(result)}};
  }
  const auto result = at::_efficient_attention_forward(
      x.q_NLSK, x.k_NLSK, x.v_NLSK, /*bias=*/{}, offsets, offsets, longest, longest,
      /*dropout_p=*/0.0, kCausal, /*compute_log_sumexp=*/true);
  return {.out_BTHK = std::get<0>(result),
          .log_sum_exp = std::get<1>(result),
          .draws = {std::get<2>(result), std::get<3>(result)}};
}

AttentionGradient packed_gradient(const Tensor& slope_NLSK, const InSections& x,
                                  const Attention& attention, const Packing& packing, Fused fused) {
  const auto& [offsets, longest] = packing;
  if (fused == Fused::kFlash) {
    const auto [q, k, v] = at::_flash_attention_backward(
        slope_NLSK.squeeze(0), x.q_NLSK.squeeze(0), x.k_NLSK.squeeze(0), x.v_NLSK.squeeze(0),
        attention.out_BTHK.squeeze(0), attention.log_sum_exp, offsets, offsets, longest, longest,
        /*dropout_p=*/0.0, /*is_causal=*/true, attention.draws[0], attention.draws[1]);
    return {q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)};
  }
  const auto result = at::_efficient_attention_backward(
      slope_NLSK, x.q_NLSK, x.k_NLSK, x.v_NLSK, /*bias=*/{}, attention.out_BTHK, offsets, offsets,
      longest, longest, attention.log_sum_exp, /*dropout_p=*/0.0, attention.draws[0],
      attention.draws[1], kCausal, /*bias_requires_grad=*/false);
  return {std::get<0>(result), std::get<1>(result), std::get<2>(result)};
}

// The tokens of each head by bucket, then by time.
struct SortedBuckets {
  SortedBuckets(const Tensor& bucket_BHT, std::int64_t buckets)
      : bucket_NT(bucket_BHT.flatten(0, 1)), heads(bucket_BHT.size(1)) {
    const auto [sorted_NT, order] =
        at::sort(bucket_NT, /*stable=*/true, /*dim=*/1, /*descending=*/false);
    order_NT = order;
    const Tensor each_NS =
        at::arange(buckets, bucket_NT.options()).expand({bucket_NT.size(0), buckets}).contiguous();
    first_NS = at::searchsorted(sorted_NT, each_NS);
    count_NS =
        at::searchsorted(sorted_NT, each_NS, /*out_int32=*/false, /*right=*/true).sub_(first_NS);
    bucket_NT = bucket_NT.to(at::kLong);
    head_N1 = at::arange(bucket_NT.size(0), order_NT.options()).unsqueeze(1);
  }
  // Returns the row of each head's first token, (b T + 0) H + h.
  [[nodiscard]] Tensor origin_N1() const {
    return head_N1.div(heads, "floor")
        .mul_(bucket_NT.size(1) * heads)
        .add_(head_N1.remainder(heads));
  }
  // Returns the rank of each token in its section.
  [[nodiscard]] Tensor rank_NT() const {
    return std::get<1>(at::sort(order_NT, /*dim=*/1)).sub_(first_NS.gather(1, bucket_NT));
  }
  // Returns the number of pairs of a query and an earlier key.
  [[nodiscard]] Tensor pairs() const {
    return count_NS.square().sum().sub_(bucket_NT.numel()).div_(2, "floor");
  }
  // Returns numbers by head and token in the order of rows.
  [[nodiscard]] Tensor by_row(const Tensor& x_NT) const {
    return x_NT.view({-1, heads, x_NT.size(1)}).transpose(1, 2).flatten();
  }
  Tensor bucket_NT;
  std::int64_t heads;
  Tensor order_NT;  // tokens
  Tensor first_NS;  // places in the order
  Tensor count_NS;
  Tensor head_N1;
};

}  // namespace

// The maximum of all products and their negatives is the largest absolute product.
Tensor angular_hashes(const Tensor& x_BTHK, const Tensor& directions_HKS) {
  const Tensor wide_BTHK = wide(x_BTHK);
  const Tensor x_HNK = wide_BTHK.permute({2, 0, 1, 3}).flatten(1, 2);
  const Tensor sums_HNS = at::bmm(x_HNK, directions_HKS.to(wide_BTHK.scalar_type()));
  const Tensor closest_HN1 = sums_HNS.abs().argmax(2, /*keepdim=*/true);
  const Tensor hash_HN1 = closest_HN1.mul(2).add_(sums_HNS.gather(2, closest_HN1).lt(0));
  return hash_HN1.to(at::kInt)
      .view({x_BTHK.size(2), x_BTHK.size(0), x_BTHK.size(1)})
      .transpose(0, 1)
      .contiguous();
}

bool can_pack(const Tensor& q_BTHK, std::int64_t buckets) {
  constexpr std::int64_t kMostSections = 65535;  // limit of a dimension of CUDA's grids
  return q_BTHK.size(0) * q_BTHK.size(2) * buckets <= kMostSections &&
         fused_sections(q_BTHK) != Fused::kNone;
}

Selection pack_buckets(const Tensor& bucket_BHT, std::int64_t buckets) {
  const SortedBuckets sorted(bucket_BHT, buckets);
  const std::int64_t tokens = bucket_BHT.size(2);
  const std::int64_t rows = bucket_BHT.numel();
  const std::int64_t sections = sorted.first_NS.numel();
  const Tensor first_Z = sorted.first_NS.add(sorted.head_N1, tokens).flatten();
  const Tensor places_Z = sorted.count_NS.sub(1).clamp_min_(0).flatten();
  const Tensor end_Z = places_Z.cumsum(0);
  const Tensor begin_Z = end_Z.sub(places_Z);

  const Tensor place_M = at::arange(rows, first_Z.options());
  const Tensor section_M = at::searchsorted(end_Z, place_M, /*out_int32=*/false, /*right=*/true)
                               .clamp_max_(sections - 1);
  const Tensor key_M =
      place_M.sub(begin_Z.index_select(0, section_M)).add_(first_Z.index_select(0, section_M));
  const Tensor row_M = sorted.order_NT.mul(sorted.heads).add_(sorted.origin_N1()).flatten();
  const auto row_of = [&](const Tensor& index_M) {
    return row_M.index_select(0, index_M.clamp_max(rows - 1));
  };

  const Tensor section_NT = sorted.bucket_NT.add(sorted.head_N1, buckets);
  const auto of_section = [&](const Tensor& x_Z) {
    return x_Z.index_select(0, section_NT.flatten()).view(section_NT.sizes());
  };
  const Tensor rank_NT = sorted.rank_NT();
  const Tensor place_NT = of_section(begin_Z).add_(rank_NT);
  const Tensor key_NT = place_NT.masked_fill(rank_NT.ge(of_section(places_Z)), -1);
  const Tensor query_NT = place_NT.sub(1).masked_fill_(rank_NT.eq(0), -1);
  return {.queries = {},
          .query_offsets = {},
          .keys = {},
          .key_offsets = {},
          .mask = Mask::kStrict,
          .pairs = sorted.pairs(),
          .packed_rows_2M = at::stack({row_of(key_M), row_of(key_M.add(1))}),
          .packed_places_2M = at::stack({sorted.by_row(key_NT), sorted.by_row(query_NT)}),
          .packed_offsets = at::cat({at::zeros({1}, end_Z.options()), end_Z}).to(at::kInt)};
}

Selection select_buckets(const Tensor& bucket_BHT, std::int64_t buckets) {
  const SortedBuckets sorted(bucket_BHT, buckets);
  const std::int64_t tokens = bucket_BHT.size(2);
  const auto longest = sorted.count_NS.max().item<std::int64_t>();
  const Tensor rank_L1 = at::arange(longest, sorted.order_NT.options()).unsqueeze(1);
  const Tensor index_NLS = sorted.first_NS.unsqueeze(1).add(rank_L1).clamp_max_(tokens - 1);
  const Tensor rows_NLS = sorted.order_NT.gather(1, index_NLS.flatten(1))
                              .view(index_NLS.sizes())
                              .mul_(sorted.heads)
                              .add_(sorted.origin_N1().unsqueeze(2))
                              .masked_fill_(rank_L1.ge(sorted.count_NS.unsqueeze(1)), -1);
  const Tensor places_NT =
      sorted.rank_NT().add_(sorted.head_N1, longest).mul_(buckets).add_(sorted.bucket_NT);
  return {.queries = {},
          .query_offsets = {},
          .keys = {},
          .key_offsets = {},
          .mask = Mask::kStrict,
          .pairs = sorted.pairs(),
          .rows_NLS = rows_NLS,
          .places = sorted.by_row(places_NT)};
}

Attention selected_attention(const Tensor& q_BTHK, const Tensor& v_BTGK,
                             const Selection& selection) {
  if (selection.padded() && selection.rows_NLS.size(1) == 1) {
    return {.out_BTHK = at::zeros(q_BTHK.sizes(), q_BTHK.options()), .log_sum_exp = {}};
  }
  const InSections x(q_BTHK, v_BTGK, selection);
  Attention attention =
      selection.packed()
          ? packed_attention(x, Packing(selection, q_BTHK.size(1)), fused_sections(q_BTHK))
          : generic::causal_attention(x.q_NLSK, x.k_NLSK, x.v_NLSK);
  attention.out_BTHK = from_sections(attention.out_BTHK, q_BTHK.sizes(), selection, kQueries);
  return attention;
}

AttentionGradient selected_attention_gradient(const Tensor& gradient_BTHK, const Tensor& q_BTHK,
                                              const Tensor& v_BTGK, const Attention& attention,
                                              const Selection& selection) {
  if (selection.padded() && selection.rows_NLS.size(1) == 1) {
    return {.q_BTHK = at::zeros(q_BTHK.sizes(), q_BTHK.options()),
            .k_BTHK = {},
            .v_BTHK = at::zeros(v_BTGK.sizes(), v_BTGK.options())};
  }
  const InSections x(q_BTHK, v_BTGK, selection);
  Tensor slope_NLSK = in_sections(gradient_BTHK, selection, kQueries);
  // Padding receives no gradient, so it contributes none.
  if (selection.padded()) {
    slope_NLSK.masked_fill_(rows_at(selection, kQueries).lt(0).unsqueeze(3), 0);
  }
  Attention in_place = attention;
  in_place.out_BTHK = in_sections(attention.out_BTHK, selection, kQueries);
  const AttentionGradient gradient =
      selection.packed()
          ? packed_gradient(slope_NLSK, x, in_place, Packing(selection, q_BTHK.size(1)),
                            fused_sections(q_BTHK))
          : generic::causal_attention_gradient(slope_NLSK, x.q_NLSK, x.k_NLSK, x.v_NLSK, in_place);
  const at::IntArrayRef sizes = q_BTHK.sizes();
  const Tensor q_gradient = from_sections(gradient.q_BTHK, sizes, selection, kQueries);
  // The gradient through the keys: d k / d q = (1 - k k^T) / |q|.
  const Tensor k_gradient = wide(from_sections(gradient.k_BTHK, sizes, selection, kKeys));
  const Tensor k = wide(x.k_BTHK);
  const Tensor along_BTH1 = k.mul(k_gradient).sum(-1, /*keepdim=*/true);
  const Tensor through_BTHK = k_gradient.sub(k.mul(along_BTH1)).mul_(x.inverse_BTH1);
  return {.q_BTHK = wide(q_gradient).add(through_BTHK).to(q_BTHK.scalar_type()),
          .k_BTHK = {},
          .v_BTHK = summed_heads(from_sections(gradient.v_BTHK, sizes, selection, kKeys),
                                 v_BTGK.size(2))};
}

}  // namespace dynmo::kernels::generic
