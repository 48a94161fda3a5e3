// SPDX-License-Identifier: Apache-2.0
#pragma once

// all_gather of texts and JSON values, which may be of unequal sizes (two rounds, the first one
// exchanges the sizes), and of numbers. All ranks call them in the same order.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

// The contribution of every rank, in order of rank; contributions may be empty.
[[nodiscard]] Expected<std::vector<std::string>> gather_texts(Transport& transport, Tag tag,
                                                              std::string_view mine);

// The same of JSON values; null is nothing, and costs one round where all ranks give it. `origin`
// names the values in an error.
[[nodiscard]] Expected<std::vector<Json>> gather_json(Transport& transport, Tag tag,
                                                      const Json& mine, std::string_view origin);
// The first value that is not null, the same on all ranks; null where there is none.
[[nodiscard]] Expected<Json> first_json(Transport& transport, Tag tag, const Json& mine,
                                        std::string_view origin);

// The same of numbers, as many of every rank.
[[nodiscard]] Expected<std::vector<std::vector<double>>> gather_numbers(
    Transport& transport, Tag tag, std::span<const double> mine);

}  // namespace dynmo::transport
