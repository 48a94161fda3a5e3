// SPDX-License-Identifier: Apache-2.0
#pragma once

// all_gather of texts, JSON values and numbers. Texts and JSON values may differ in size and take
// two rounds: the first exchanges the sizes. All ranks call these functions in the same order.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

// Returns the contribution of every rank, in order of rank. Contributions may be empty. Fails with
// kPeerLost.
[[nodiscard]] Expected<std::vector<std::string>> gather_texts(Transport& transport, Tag tag,
                                                              std::string_view mine);

// Like gather_texts(), for JSON values. null means that a rank has no value. If all ranks give
// null, the call takes one round. `origin` names the values in an error.
[[nodiscard]] Expected<std::vector<Json>> gather_json(Transport& transport, Tag tag,
                                                      const Json& mine, std::string_view origin);
// Returns the first value that is not null, the same on all ranks, or null if there is none. Fails
// like gather_json().
[[nodiscard]] Expected<Json> first_json(Transport& transport, Tag tag, const Json& mine,
                                        std::string_view origin);

// Like gather_texts(), for numbers, in one round. Every rank gives the same count.
[[nodiscard]] Expected<std::vector<std::vector<double>>> gather_numbers(
    Transport& transport, Tag tag, std::span<const double> mine);

// Checks that every rank derived the same text by itself, in one round of digests. It finds a
// defect before any rank acts on it. Returns kInternal, with `what` and a rank whose text differs.
[[nodiscard]] Expected<void> agree(Transport& transport, Tag tag, std::string_view what,
                                   std::string_view text);

}  // namespace dynmo::transport
