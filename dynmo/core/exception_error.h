// SPDX-License-Identifier: Apache-2.0
#pragma once

// Translates an unexpected exception for the user of a command or of a rank.

#include <exception>

#include "dynmo/core/expected.h"

namespace dynmo {

// Returns the error for an exception. The code is kBadInput if the user can change something. That
// is too little memory (also of libtorch's allocators), no more threads, or a path that the system
// refuses. Else it is kInternal with the first line of the exception's text.
[[nodiscard]] Error error_of(const std::exception& fault);

}  // namespace dynmo
