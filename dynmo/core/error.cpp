// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "dynmo/core/check.h"
#include "dynmo/core/expected.h"

namespace dynmo {

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::kBadInput:
      return 2;
    case ErrorCode::kInfeasible:
      return 3;
    case ErrorCode::kNoCheckpoint:
      return 4;
    case ErrorCode::kPeerLost:
      return 5;
    case ErrorCode::kInterrupted:
      return 130;
    case ErrorCode::kInternal:
      return 1;
  }
  return 1;
}

CheckContext& check_context() {
  thread_local CheckContext context;
  return context;
}

namespace internal {

std::string one_line(std::string text) {
  std::replace_if(
      text.begin(), text.end(),
      [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }, ' ');
  return text;
}

void throw_check_failure(const char* condition, const char* file, int line,
                         const std::string& message) {
  const CheckContext context = check_context();
  std::string where = fmt::format("{}:{}", file, line);
  if (context.rank >= 0) where += fmt::format(", rank {}", context.rank);
  if (context.step >= 0) where += fmt::format(", step {}", context.step);
  throw CheckFailure(fmt::format("{} [{} is false; {}]", message, condition, where));
}

void throw_bad_access(const Error* error) {
  throw CheckFailure(error == nullptr
                         ? std::string("error() of an Expected that has a value")
                         : "value() of an Expected that has an error: " + error->message);
}

}  // namespace internal
}  // namespace dynmo
