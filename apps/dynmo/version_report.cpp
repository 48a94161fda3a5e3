// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <sys/utsname.h>

#include <string>
#include <string_view>

#include "apps/dynmo/command.h"
#include "dynmo/core/files.h"
#include "dynmo/process/processors.h"

namespace dynmo::app {
namespace {

// Returns the text behind the first `key` at the start of a line, up to the line's end, or "".
std::string value_in(const char* path, std::string_view key) {
  const Expected<std::string> read = read_file(path, std::size_t{64} << 20);
  if (!read) return "";
  const std::string text = "\n" + *read;
  std::size_t start = text.find(fmt::format("\n{}", key));
  if (start == std::string::npos) return "";
  start = text.find_first_not_of(" \t:=\"", start + 1 + key.size());
  if (start == std::string::npos) return "";
  return text.substr(start, text.find_first_of("\"\n", start) - start);
}

Json or_null(std::string_view text) { return text.empty() ? Json() : Json(text); }

}  // namespace

Json version_report() {
  // kVersion is "0.1.0 (1410a3990d)", without the brackets if the commit is not known.
  const std::size_t bracket = kVersion.find(" (");
  const std::string_view commit = bracket == std::string_view::npos
                                      ? std::string_view()
                                      : kVersion.substr(bracket + 2, kVersion.size() - bracket - 3);
  utsname kernel = {};
  const bool known = ::uname(&kernel) == 0;
  return {{"version", kVersion.substr(0, bracket)},
          {"commit", or_null(commit)},
          {"compiler", DYNMO_COMPILER},
          {"libtorch", or_null(DYNMO_LIBTORCH)},
          {"processor", or_null(value_in("/proc/cpuinfo", "model name"))},
          {"processors", process::usable_processors().usable()},
          {"system", or_null(value_in("/etc/os-release", "PRETTY_NAME"))},
          {"kernel",
           known ? Json(fmt::format("{} {} {}", kernel.sysname, kernel.release, kernel.machine))
                 : Json()}};
}

}  // namespace dynmo::app
