// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "dynmo/kernels/host_memory.h"
#include "dynmo/kernels/loops.h"
#include "dynmo/kernels/operations.h"
#include "dynmo/model/expert_rows_impl.h"

#if defined(__GNUC__) && !defined(__clang__) && !defined(_OPENMP)
#error "one thread only: make this file one of dynmo_parallel in CMakeLists.txt"
#endif

namespace dynmo::model {
namespace {

constexpr std::int64_t kTokensAtOnce = 64;  // in one task of a thread

// Returns the address of the row of each place.
template <typename Element>
std::vector<Element*> row_starts(const std::vector<at::Tensor>& rows, const Routing& routing,
                                 std::int64_t width) {
  std::vector<Element*> starts;
  starts.reserve(static_cast<std::size_t>(routing.offsets.back()));
  for (std::size_t e = 0; e < rows.size(); ++e) {
    const std::int64_t count = routing.offsets[e + 1] - routing.offsets[e];
    for (std::int64_t i = 0; i < count; ++i) {
      starts.push_back(kernels::host_data<Element>(rows[e]) + i * width);
    }
  }
  return starts;
}

template <typename Element>
void add_up(const std::vector<at::Tensor>& rows, const Routing& routing, Gates gates,
            at::Tensor& sums_ND) {
  using Sum = kernels::loops::Wide<Element>;
  const std::int64_t width = sums_ND.size(1);
  const std::int64_t slots = routing.places_NK.size(1);
  const std::vector<Element*> starts = row_starts<Element>(rows, routing, width);
  const auto* place = kernels::host_data<const std::int32_t>(routing.places_NK);
  const auto* gate = kernels::host_data<const Sum>(routing.gates_NK);
  auto* to = kernels::host_data<Element>(sums_ND);
  at::parallel_for(0, sums_ND.size(0), kTokensAtOnce, [&](std::int64_t begin, std::int64_t end) {
    std::vector<Sum> sum(static_cast<std::size_t>(width));
    for (std::int64_t n = begin; n < end; ++n) {
      std::fill(sum.begin(), sum.end(), Sum{0});
      for (std::int64_t k = n * slots; k < (n + 1) * slots; ++k) {
        if (place[k] < 0) continue;
        const Element* row = starts[static_cast<std::size_t>(place[k])];
        const Sum factor = gates == Gates::kYes ? gate[k] : Sum{1};
        for (std::int64_t d = 0; d < width; ++d) {
          sum[static_cast<std::size_t>(d)] += factor * static_cast<Sum>(row[d]);
        }
      }
      std::transform(sum.begin(), sum.end(), to + n * width,
                     [](Sum s) { return static_cast<Element>(s); });
    }
  });
}

template <typename Element>
void split(std::vector<at::Tensor>& rows, const Routing& routing, const at::Tensor& gradient_ND,
           at::Tensor& gates_NK) {
  using Sum = kernels::loops::Wide<Element>;
  constexpr std::int64_t kLanes = 16;  // running sums of a row, so that it is read in vectors
  const std::int64_t width = gradient_ND.size(1);
  const std::int64_t slots = routing.places_NK.size(1);
  const std::vector<Element*> starts = row_starts<Element>(rows, routing, width);
  const auto* place = kernels::host_data<const std::int32_t>(routing.places_NK);
  const auto* gate = kernels::host_data<const Sum>(routing.gates_NK);
  const auto* from = kernels::host_data<const Element>(gradient_ND);
  auto* slope = kernels::host_data<Sum>(gates_NK);
  at::parallel_for(0, gradient_ND.size(0), kTokensAtOnce,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t k = begin * slots; k < end * slots; ++k) {
                       if (place[k] < 0) continue;
                       const Element* __restrict dy = from + k / slots * width;
                       Element* __restrict row = starts[static_cast<std::size_t>(place[k])];
                       const Sum factor = gate[k];
                       Sum lanes[kLanes] = {};
                       std::int64_t d = 0;
                       for (; d + kLanes <= width; d += kLanes) {
                         for (std::int64_t lane = 0; lane < kLanes; ++lane) {
                           const Sum y = static_cast<Sum>(row[d + lane]);
                           const Sum slope_of_y = static_cast<Sum>(dy[d + lane]);
                           lanes[lane] += y * slope_of_y;
                           row[d + lane] = static_cast<Element>(factor * slope_of_y);
                         }
                       }
                       for (; d < width; ++d) {
                         lanes[0] += static_cast<Sum>(row[d]) * static_cast<Sum>(dy[d]);
                         row[d] = static_cast<Element>(factor * static_cast<Sum>(dy[d]));
                       }
                       Sum sum = 0;
                       for (const Sum lane : lanes) sum += lane;
                       slope[k] = sum;
                     }
                   });
}

at::Tensor in_wide(const at::Tensor& x) {
  return x.to(kernels::accumulation_type(x.scalar_type()));
}

// Returns the sum of each token's rows. Adds slot after slot, so that the order of additions is the
// CPU's.
at::Tensor sums_on_device(const at::Tensor& rows_AD, const Routing& routing,
                          const at::Tensor& like_ND, Gates gates) {
  const at::ScalarType wide = kernels::accumulation_type(like_ND.scalar_type());
  at::Tensor sums_ND = at::zeros(like_ND.sizes(), like_ND.options().dtype(wide));
  if (like_ND.size(0) == 0) return sums_ND.to(like_ND.scalar_type());
  const at::Tensor wide_AD = in_wide(rows_AD);
  at::Tensor factors_NK = routing.places_NK.ge(0).to(wide);
  if (gates == Gates::kYes) factors_NK = factors_NK.mul_(routing.gates_NK);
  // Dropped slots (-1) read the row of place 0, times 0. It exists, because an expert takes at
  // least one token.
  const at::Tensor places_NK = routing.places_NK.clamp_min(0);
  for (std::int64_t k = 0; k < places_NK.size(1); ++k) {
    sums_ND.addcmul_(wide_AD.index_select(0, places_NK.select(1, k)), factors_NK.narrow(1, k, 1));
  }
  return sums_ND.to(like_ND.scalar_type());
}

// Replaces the rows by their gradients.
void split_on_device(at::Tensor& rows_AD, const Routing& routing, const at::Tensor& gradient_ND,
                     at::Tensor& gates_NK) {
  if (gradient_ND.size(0) == 0) return;
  const at::Tensor wide_AD = in_wide(rows_AD);
  const at::Tensor dy_AD = gradient_ND.index_select(0, routing.tokens_A).to(wide_AD.scalar_type());
  const at::Tensor slope_A = wide_AD.mul(dy_AD).sum(1);
  gates_NK = slope_A.index_select(0, routing.places_NK.clamp_min(0).flatten())
                 .view(gates_NK.sizes())
                 .masked_fill_(routing.places_NK.lt(0), 0)
                 .to(gates_NK.scalar_type());
  const at::Tensor gate_A1 =
      routing.gates_NK.reshape({-1}).index_select(0, routing.entries_A).unsqueeze(1);
  rows_AD = dy_AD.mul(gate_A1).to(gradient_ND.scalar_type());
}

// Calls function with an element of the tensor's type.
template <typename Function>
void by_type(const at::Tensor& x, Function function) {
  if (x.scalar_type() == at::kDouble) return function(double{});
  if (x.scalar_type() == at::kBFloat16) return function(c10::BFloat16{});
  function(float{});
}

}  // namespace

at::Tensor expert_rows(const at::Tensor& x_ND, const Routing& routing) {
  return at::index_select(x_ND, 0, routing.tokens_A);
}

at::Tensor summed_by_token(const std::vector<at::Tensor>& rows, const Routing& routing,
                           const at::Tensor& like_ND, Gates gates) {
  if (!like_ND.is_cpu()) return sums_on_device(rows.front(), routing, like_ND, gates);
  at::Tensor sums_ND = at::empty(like_ND.sizes(), like_ND.options());
  by_type(like_ND,
          [&]<typename Element>(Element) { add_up<Element>(rows, routing, gates, sums_ND); });
  return sums_ND;
}

at::Tensor through_gates(std::vector<at::Tensor>& rows, const Routing& routing,
                         const at::Tensor& gradient_ND) {
  at::Tensor gates_NK = at::zeros(routing.gates_NK.sizes(), routing.gates_NK.options());
  if (!gradient_ND.is_cpu()) {
    split_on_device(rows.front(), routing, gradient_ND, gates_NK);
    return gates_NK;
  }
  const at::Tensor gradient = gradient_ND.contiguous();
  by_type(gradient,
          [&]<typename Element>(Element) { split<Element>(rows, routing, gradient, gates_NK); });
  return gates_NK;
}

}  // namespace dynmo::model
