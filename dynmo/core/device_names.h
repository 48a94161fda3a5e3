// SPDX-License-Identifier: Apache-2.0
#pragma once

// The values of run.device that name a device, which has memory and streams of its own. Checks of a
// config need no more than the name. c10d/device_kinds.h says how one is opened.

#include <string_view>
#include <vector>

namespace dynmo {

// Returns the names, "cuda" first. Any thread may call it.
[[nodiscard]] std::vector<std::string_view> device_names();
[[nodiscard]] bool is_device_name(std::string_view name);

// Adds a name that lives as long as the program. Only c10d::add_device_kind() calls it.
void add_device_name(std::string_view name);

}  // namespace dynmo
