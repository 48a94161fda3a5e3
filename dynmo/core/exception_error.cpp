// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/exception_error.h"

#include <filesystem>
#include <new>
#include <stdexcept>
#include <system_error>

namespace dynmo {
namespace {

constexpr std::string_view kMoreMemory =
    "allow more memory (ulimit -v, the container's limit), or give a smaller model, micro-batch or "
    "file";

// libtorch's allocators throw its general exception; only the text says that memory is missing.
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
