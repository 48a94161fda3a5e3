// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks that every rank derived the same value by itself. It finds a defect before any rank acts
// on it.

#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

// Compares the text of what each rank derived. All ranks call it. Returns kInternal, with `what`
// and a rank whose text differs.
[[nodiscard]] Expected<void> agree(transport::Transport& transport, transport::Tag tag,
                                   std::string_view what, std::string_view text);

}  // namespace dynmo::runtime
