// SPDX-License-Identifier: Apache-2.0
#pragma once

// A child process that runs a program and does not outlive its parent, and code shared by all that
// start processes.

#include <csignal>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo::process {

struct ChildOptions {
  std::string program;                   // path
  std::vector<std::string> command;      // argv
  std::vector<std::string> environment;  // "NAME=value", all of it
  int output = 1;                        // becomes descriptors 1 and 2; 0 is /dev/null
  int errors = 2;
  std::vector<int> inherited = {};  // descriptors that stay open
  std::optional<int> core = {};     // pinned to this core
  pid_t group = 0;                  // process group that it joins; 0: its own
  sigset_t signals{};               // signal mask
};

// Starts the child by fork and exec. (A child forked after tensor work must exec, because it does
// not have libtorch's threads.) It is killed when the calling thread ends. Fails with kBadInput and
// the system's reason.
[[nodiscard]] Expected<pid_t> spawn(const ChildOptions& options);

// Returns the path at which the shell would find `name`, or kBadInput if there is none.
[[nodiscard]] Expected<std::string> find_program(const std::string& name);

// Returns this process's environment, overridden by `set`, as "NAME=value".
[[nodiscard]] std::vector<std::string> environment_with(
    const std::vector<std::pair<std::string, std::string>>& set);

// Returns the texts in the form that exec and posix_spawn take. These calls do not write to the
// texts, which must outlive the result.
[[nodiscard]] std::vector<char*> c_strings(const std::vector<std::string>& texts);

}  // namespace dynmo::process
