// SPDX-License-Identifier: Apache-2.0
#pragma once

// Unicode's normal form C. The source of this header is the only file that knows utf8proc.

#include <string>
#include <string_view>

namespace dynmo::data {

// Returns the normal form C of `text`, which is valid UTF-8. `room` holds it if it differs.
[[nodiscard]] std::string_view normal_form_c(std::string_view text, std::string& room);

}  // namespace dynmo::data
