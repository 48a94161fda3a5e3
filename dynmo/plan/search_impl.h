// SPDX-License-Identifier: Apache-2.0
#pragma once

// The candidates of search() that need no search.

#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/search.h"

namespace dynmo::plan::internal {

struct Template {
  std::string name;  // "1f1b/optimal"
  Plan plan;
  bool plain = false;  // cut without recomputation
};

// Every schedule that follows from a shape alone, with every balancer's cuts, in a fixed order.
// Those that a balancer refuses (more ranks than layers, memory) are in `refusals`.
struct Templates {
  std::vector<Template> made;
  std::vector<Error> refusals;
};
[[nodiscard]] Templates templates(const SearchProblem& problem, const SearchOptions& options);

}  // namespace dynmo::plan::internal
