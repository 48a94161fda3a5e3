// SPDX-License-Identifier: Apache-2.0
#pragma once

// Every rank must derive the same by itself; this finds the defect where it does not, before any
// rank acts on it.

#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

// Called by all ranks with the text of what they derived. kInternal, naming `what` and a rank with
// another text.
[[nodiscard]] Expected<void> agree(transport::Transport& transport, transport::Tag tag,
                                   std::string_view what, std::string_view text);

}  // namespace dynmo::runtime
