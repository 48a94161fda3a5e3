// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string_view>

namespace dynmo::config {

// How much a message matters in the log of a rank, in ascending order.
enum class LogLevel { kDebug, kInfo, kWarning, kError };
inline constexpr std::array<std::string_view, 4> kLogLevelNames = {"debug", "info", "warning",
                                                                   "error"};

}  // namespace dynmo::config
