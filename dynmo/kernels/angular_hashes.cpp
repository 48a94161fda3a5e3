// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/angular_hashes.h"

#include <ATen/ATen.h>

#include "dynmo/core/check.h"
#include "dynmo/kernels/generic_selection.h"
#include "dynmo/kernels/loops.h"

namespace dynmo::kernels {
namespace {

using at::Tensor;

template <typename Element>
void hash_heads(const Tensor& x_BTHK, const Tensor& directions_HKS, Tensor& hashes_BHT) {
  using Wide = loops::Wide<Element>;
  const Tensor directions = directions_HKS.to(c10::CppTypeToScalarType<Wide>::value).contiguous();
  for (std::int64_t b = 0; b < x_BTHK.size(0); ++b) {
    for (std::int64_t h = 0; h < x_BTHK.size(2); ++h) {
      loops::highest_hash(
          x_BTHK.const_data_ptr<Element>() + b * x_BTHK.stride(0) + h * x_BTHK.stride(2),
          x_BTHK.stride(1), x_BTHK.size(1), x_BTHK.size(3),
          directions.const_data_ptr<Wide>() + h * directions.stride(0), directions.size(2),
          hashes_BHT.mutable_data_ptr<std::int32_t>() + (b * x_BTHK.size(2) + h) * x_BTHK.size(1));
    }
  }
}

}  // namespace

Tensor angular_hashes(const Tensor& x_BTHK, const Tensor& directions_HKS) {
  DYNMO_CHECK(x_BTHK.stride(3) == 1 && directions_HKS.size(2) > 0 &&
                  directions_HKS.size(0) == x_BTHK.size(2) &&
                  directions_HKS.size(1) == x_BTHK.size(3),
              "directions of {} heads of {} elements, got {} of {}", x_BTHK.size(2), x_BTHK.size(3),
              directions_HKS.size(0), directions_HKS.size(1));
  if (!x_BTHK.is_cpu()) return generic::angular_hashes(x_BTHK, directions_HKS);
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

}  // namespace dynmo::kernels
