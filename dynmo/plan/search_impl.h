// SPDX-License-Identifier: Apache-2.0
#pragma once

// The candidates of search() that need no search.

#include <string>
#include <vector>

#include "dynmo/plan/plan.h"
#include "dynmo/plan/search.h"

namespace dynmo::plan::internal {

struct Template {
  std::string name;  // "1f1b/optimal"
  Plan plan;
};

// Every schedule that a shape alone gives with every balancer's cut, in a fixed order; those that a
// balancer refuses (more ranks than layers, memory) are left out.
[[nodiscard]] std::vector<Template> templates(const SearchProblem& problem);

}  // namespace dynmo::plan::internal
