// SPDX-License-Identifier: Apache-2.0
#pragma once

// all_gather for contributions of unequal sizes: two rounds, the first one exchanges the sizes.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

// What every rank gave, by rank; contributions may be empty. All ranks call it in the same order.
[[nodiscard]] Expected<std::vector<std::string>> gather_texts(Transport& transport, Tag tag,
                                                              std::string_view mine);

}  // namespace dynmo::transport
