// SPDX-License-Identifier: Apache-2.0
#pragma once

// The interface between subcommands and main. Each `add_..._command(app, chosen)` adds its options
// to `app`. Its callback sets `chosen` while CLI11 parses, and main runs it afterwards. Nothing is
// done before all flags are read. Only main converts errors into messages and exit codes.

#include <CLI/App.hpp>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo {
extern const std::string_view kVersion;  // with the commit (cmake/write_version.cmake)
}

namespace dynmo::app {

// Runs a command whose flags are parsed. Returns its exit code (listed in core/expected.h), or the
// error that main prints.
using Command = std::function<Expected<int>()>;

// Makes main call `run(*flags)` after `command` is parsed.
template <typename Flags, typename Run>
void run_when_parsed(CLI::App* command, Command& chosen, std::shared_ptr<Flags> flags, Run run) {
  command->callback([flags, run, &chosen] { chosen = [flags, run] { return run(*flags); }; });
}

// A flag and its condition.
struct FlagUse {
  std::string_view flag;
  bool given = false;
  bool acts = false;
  std::string_view wanted;  // "--join RUN"
};

// Returns kBadInput for the first flag that is given and has no effect beside the others.
[[nodiscard]] Expected<void> check_flags(std::initializer_list<FlagUse> flags);

// A file that a command reads or writes, and the flag that names it. An empty path is none.
struct UsedFile {
  std::string_view flag;
  std::string path;
};

// Returns kBadInput if two of the files are one, so that no input is overwritten.
[[nodiscard]] Expected<void> check_one_use(const std::vector<UsedFile>& files);

// Checks options of unsigned numbers, because CLI11 reads -1 as the largest one.
inline std::string not_negative(const std::string& text) {
  return text.starts_with('-') ? text + " is below 0, wanted a whole number of at least 0" : "";
}

}  // namespace dynmo::app
