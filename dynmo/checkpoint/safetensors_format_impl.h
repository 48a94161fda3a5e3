// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace dynmo::checkpoint {

inline constexpr std::string_view kMetadataKey = "__metadata__";
inline constexpr std::uint64_t kMaxHeader = 100'000'000;

}  // namespace dynmo::checkpoint
