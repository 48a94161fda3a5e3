// SPDX-License-Identifier: Apache-2.0
#pragma once

// Translates an unexpected exception for the user of a command or of a rank.

#include <exception>

#include "dynmo/core/expected.h"

namespace dynmo {

// kBadInput where the machine or a path is to blame and the user can change something: too little
// memory (libtorch's allocators too), no more threads, a path that the system refuses. Else
// kInternal with the first line of the exception's own text.
[[nodiscard]] Error error_of(const std::exception& fault);

}  // namespace dynmo
