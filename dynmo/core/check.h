// SPDX-License-Identifier: Apache-2.0
#pragma once

// DYNMO_CHECK, for conditions that only a bug can break. It throws CheckFailure with the place. If
// the calling thread has set its rank and step, the message names them. It is never used on user
// input.

#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace dynmo {

class CheckFailure : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// Names the work of this thread, for the message of a failed check. The value -1 means unknown.
struct CheckContext {
  int rank = -1;
  long long step = -1;
};
CheckContext& check_context();  // of the calling thread

namespace internal {
[[noreturn]] void throw_check_failure(const char* condition, const char* file, int line,
                                      const std::string& message);
}  // namespace internal

}  // namespace dynmo

#define DYNMO_CHECK(condition, ...)                                          \
  do {                                                                       \
    if (!(condition)) [[unlikely]] {                                         \
      ::dynmo::internal::throw_check_failure(#condition, __FILE__, __LINE__, \
                                             ::fmt::format(__VA_ARGS__));    \
    }                                                                        \
  } while (false)
