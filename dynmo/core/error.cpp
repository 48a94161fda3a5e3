// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <new>
#include <stdexcept>
#include <system_error>

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

namespace {

constexpr std::string_view kMoreMemory =
    "allow more memory (ulimit -v, the container's limit), or give a smaller model, micro-batch or "
    "file";

// Returns whether the text of an exception says that memory is missing. Libtorch's allocators throw
// its general exception, so there is only the text.
bool tells_of_memory(std::string_view text) {
  for (const std::string_view sign :
       {"can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory"}) {
    if (text.find(sign) != std::string_view::npos) return true;
  }
  return false;
}

}  // namespace

Error error_of(const std::exception& fault) {
  std::string text = fault.what();
  text = text.substr(0, text.find('\n'));
  if (dynamic_cast<const std::bad_alloc*>(&fault) != nullptr ||
      dynamic_cast<const std::length_error*>(&fault) != nullptr) {
    return make_error(ErrorCode::kBadInput, "out of memory: {}", kMoreMemory);
  }
  if (tells_of_memory(text)) {
    return make_error(ErrorCode::kBadInput, "out of memory ({}): {}", text, kMoreMemory);
  }
  if (dynamic_cast<const std::filesystem::filesystem_error*>(&fault) != nullptr) {
    return make_error(ErrorCode::kBadInput, "{}", text);
  }
  const auto* system = dynamic_cast<const std::system_error*>(&fault);
  if (system != nullptr && system->code() == std::errc::resource_unavailable_try_again) {
    return make_error(
        ErrorCode::kBadInput,
        "cannot start a thread ({}): allow more memory (ulimit -v, the container's limit) or "
        "more processes (ulimit -u)",
        text);
  }
  return make_error(ErrorCode::kInternal, "{}", text);
}

}  // namespace dynmo
