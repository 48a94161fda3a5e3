// SPDX-License-Identifier: Apache-2.0
#pragma once

// Converts an Error to the exception of its code: dynmo.BadInputError, dynmo.InfeasibleError or
// dynmo.DynmoError. Its text is the line of the Error.

#include <utility>

#include "dynmo/core/expected.h"

namespace dynmo::python {

// Throws the exception. Requires the GIL.
[[noreturn]] void raise(const Error& error);

template <typename T>
T value_or_raise(Expected<T> expected) {
  if (!expected) raise(expected.error());
  return std::move(expected).value();
}
inline void raise_if_error(const Expected<void>& expected) {
  if (!expected) raise(expected.error());
}

}  // namespace dynmo::python
