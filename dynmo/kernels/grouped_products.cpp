// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/grouped_products.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "dynmo/core/check.h"
#include "dynmo/kernels/device/launcher.h"
#include "dynmo/kernels/generic.h"
#include "dynmo/kernels/operations.h"

namespace dynmo::kernels {
namespace {

using at::Tensor;

// More blocks leave fewer places empty, but need more copies of matrices.
constexpr std::int64_t kBlocksOfAGroup = 2;
// Rows of a tile of matrix products, and elements in 16 bytes of bf16.
constexpr std::int64_t kMultiple = 8;

std::int64_t up_to_multiple(std::int64_t count, std::int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

Tensor into_blocks(const RowGroups& groups, const Tensor& x_RI) {
  return x_RI.index_select(0, groups.rows_P).view({-1, groups.block, x_RI.size(1)});
}
Tensor out_of_blocks(const RowGroups& groups, const Tensor& y_QCO) {
  return y_QCO.flatten(0, 1).index_select(0, groups.places_R);
}
// Returns the rows in blocks. Places without a row are 0, so that they add nothing to sums.
Tensor into_clean_blocks(const RowGroups& groups, const Tensor& x_RI) {
  return x_RI.index_select(0, groups.rows_P)
      .masked_fill_(groups.padding_P1, 0)
      .view({-1, groups.block, x_RI.size(1)});
}

}  // namespace

GroupForm group_form(const Tensor& x, std::initializer_list<std::int64_t> widths) {
  if (x.scalar_type() != at::kBFloat16) return GroupForm::kBlocks;
  if (!std::ranges::all_of(widths, [](auto width) { return width % kMultiple == 0; })) {
    return GroupForm::kBlocks;
  }
  const int capability = device::cuda_capability(x.device());
  const bool has =
      x.is_cuda() ? capability == 9 || capability == 10 : has_kernel("aten::_grouped_mm", x);
  return has ? GroupForm::kOperator : GroupForm::kBlocks;
}

std::vector<Tensor> RowGroups::tensors() const {
  return {ends_G, empty_G11, group_of_Q, rows_P, padding_P1, places_R};
}

RowGroups group_rows(const Tensor& starts, std::int64_t rows, GroupForm form) {
  DYNMO_CHECK(rows > 0 && starts.numel() > 1, "rows and groups, got {} and {}", rows,
              starts.numel() - 1);
  const std::int64_t count = starts.numel() - 1;
  const Tensor ends_G = starts.narrow(0, 1, count);
  const Tensor counts_G = starts.diff();
  RowGroups groups{.form = form, .count = count};
  if (form == GroupForm::kOperator) {
    groups.ends_G = ends_G.to(at::kInt);
    groups.empty_G11 = counts_G.eq(0).view({-1, 1, 1});
    return groups;
  }
  const std::int64_t wanted = kBlocksOfAGroup * count;
  groups.block = up_to_multiple((rows + wanted - 1) / wanted, kMultiple);
  // The last block of each group may have one row.
  const std::int64_t blocks = (rows + count * (groups.block - 1)) / groups.block;
  const auto options = starts.options();
  const Tensor blocks_G = counts_G.add(groups.block - 1).div_(groups.block, "floor");
  const Tensor block_ends_G = blocks_G.cumsum(0);
  const Tensor first_place_G = block_ends_G.sub(blocks_G).mul_(groups.block);
  const auto group_at = [&](const Tensor& ends, const Tensor& places) {
    return at::searchsorted(ends, places, /*out_int32=*/false, /*right=*/true)
        .clamp_max_(count - 1);
  };
  groups.group_of_Q = group_at(block_ends_G, at::arange(blocks, options));
  const Tensor group_of_P =
      groups.group_of_Q.unsqueeze(1).expand({blocks, groups.block}).reshape({-1});
  const Tensor in_group_P =
      at::arange(blocks * groups.block, options).sub_(first_place_G.index_select(0, group_of_P));
  groups.padding_P1 = in_group_P.ge(counts_G.index_select(0, group_of_P)).unsqueeze(1);
  groups.rows_P = starts.index_select(0, group_of_P).add_(in_group_P).clamp_(0, rows - 1);
  const Tensor row_R = at::arange(rows, options);
  const Tensor group_of_R = group_at(ends_G, row_R);
  groups.places_R = row_R.sub(starts.index_select(0, group_of_R))
                        .add_(first_place_G.index_select(0, group_of_R))
                        .clamp_max_(blocks * groups.block - 1);
  return groups;
}

Tensor grouped_times(const RowGroups& groups, const Tensor& x_RI, const Tensor& w_GOI) {
  if (groups.form == GroupForm::kOperator) {
    return at::_grouped_mm(x_RI, w_GOI.transpose(1, 2), groups.ends_G);
  }
  const Tensor w_QIO = w_GOI.index_select(0, groups.group_of_Q).transpose(1, 2);
  return out_of_blocks(groups, at::bmm(into_blocks(groups, x_RI), w_QIO));
}

Tensor grouped_times_transposed(const RowGroups& groups, const Tensor& y_RO, const Tensor& w_GOI) {
  if (groups.form == GroupForm::kOperator) return at::_grouped_mm(y_RO, w_GOI, groups.ends_G);
  const Tensor w_QOI = w_GOI.index_select(0, groups.group_of_Q);
  return out_of_blocks(groups, at::bmm(into_blocks(groups, y_RO), w_QOI));
}

Tensor grouped_gradient(const RowGroups& groups, const Tensor& dy_RO, const Tensor& x_RI) {
  if (groups.form == GroupForm::kOperator) {
    // The kernel does not define the result of a group without rows.
    return at::_grouped_mm(dy_RO.t(), x_RI, groups.ends_G).masked_fill_(groups.empty_G11, 0);
  }
  const Tensor sums_QOI =
      at::bmm(into_clean_blocks(groups, dy_RO).transpose(1, 2), into_clean_blocks(groups, x_RI));
  const at::ScalarType wide = accumulation_type(x_RI.scalar_type());
  return at::zeros({groups.count, sums_QOI.size(1), sums_QOI.size(2)},
                   sums_QOI.options().dtype(wide))
      .index_add_(0, groups.group_of_Q, sums_QOI.to(wide));
}

}  // namespace dynmo::kernels
