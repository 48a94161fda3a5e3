// SPDX-License-Identifier: Apache-2.0
#pragma once

// Some ranks of a group as a group of their own. Examples are one pipeline of a data-parallel job,
// and the ranks that hold the same layers in all pipelines.
//
// A subset adds no connections: its messages are the group's. So two subsets that share a pair of
// ranks must use different tags, and an error ends the whole group.

#include <memory>
#include <vector>

#include "dynmo/transport/place.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

// Makes a subset in which `members[i]` is rank i. The group must outlive the result. Requires
// different ranks of the group, including the caller's.
[[nodiscard]] std::unique_ptr<Transport> subset(Transport& group, std::vector<WorldRank> members);

}  // namespace dynmo::transport
