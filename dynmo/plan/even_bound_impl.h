// SPDX-License-Identifier: Apache-2.0
#pragma once

// Bounds of each rank's first layer in the most even cut, found without trying cuts. This makes the
// tie rule of balance.h fast if the bottleneck leaves much freedom.

#include <vector>

#include "dynmo/plan/chain_impl.h"

namespace dynmo::plan::internal {

// Starts of a rank: low, ..., high.
struct Window {
  int low = 0;
  int high = 0;
};

// A lower bound on sums of squared times, by layers. Let a rank of capacity c = 1 / slowness^2 have
// load l. For any price p >= 0: l^2 / c >= 2 p l - p^2 c. A layer w > p c alone already costs w^2 /
// c. So l^2 / c >= sum of value(w) over its layers - p^2 c, with
//
//   value(w) = 2 p w if w <= p c, else w^2 / c + p^2 c
//
// (Two such layers: 2 w w' >= 2 p^2 c^2. Beside one, the rest counts 2 w rest >= 2 p c rest.) The
// value falls with c, so that of the fastest rank is valid for all. It grows with p.
class EvenBound {
 public:
  // Keeps a reference to `chain`.
  explicit EvenBound(const Chain& chain);

  // Returns, for each rank, the starts near those of the best cut of divisible layers: at most a
  // rank's load away.
  [[nodiscard]] std::vector<Window> near_divisible() const;

  // Returns, for each rank, the starts that a cut can have if its sum of squared times is at most
  // `squares`. If `squares` is 0, returns only that of rank 0, because all other starts may be
  // needed.
  [[nodiscard]] std::vector<Window> within(Wide squares) const;

 private:
  [[nodiscard]] double work(int first, int end) const {
    return static_cast<double>(chain_.work[static_cast<std::size_t>(end)] -
                               chain_.work[static_cast<std::size_t>(first)]);
  }
  // Returns prefix sums of value() at this price.
  [[nodiscard]] std::vector<double> values(double price) const;

  const Chain& chain_;
  std::vector<double> capacity_;  // of all ranks before
  double fastest_ = 0;            // largest capacity of a rank
  double price_ = 0;
  std::vector<double> values_;  // at that price
};

}  // namespace dynmo::plan::internal
