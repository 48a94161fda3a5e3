// SPDX-License-Identifier: Apache-2.0
#pragma once

// Some ranks of a group as a group of their own: one pipeline of a data-parallel job, or the ranks
// that hold the same layers in all of them. It adds no connections: messages are the group's, so
// two subsets that share a pair of ranks must use different tags, and an error ends the whole
// group.

#include <memory>
#include <vector>

#include "dynmo/transport/place.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

// `members[i]` is rank i of the subset. The group must outlive the result. Requires different ranks
// of the group, its own among them.
[[nodiscard]] std::unique_ptr<Transport> subset(Transport& group, std::vector<WorldRank> members);

}  // namespace dynmo::transport
