// SPDX-License-Identifier: Apache-2.0
#pragma once

// One child process that runs a program and does not outlive its parent; and what all share that
// start processes.

#include <csignal>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo::process {

struct ChildOptions {
  std::string program;                   // a path
  std::vector<std::string> command;      // its argv
  std::vector<std::string> environment;  // "NAME=value", all of it
  int output = 1;                        // become its descriptors 1 and 2; 0 is /dev/null
  int errors = 2;
  std::vector<int> inherited = {};  // descriptors that stay open
  std::optional<int> core = {};     // pinned to
  pid_t group = 0;                  // process group that it joins; 0: its own
  sigset_t signals{};               // its signal mask
};

// Starts it by fork and exec (a child forked after tensor work must exec: libtorch's threads are
// not there). It is killed when the calling thread ends. kBadInput with the system's reason.
[[nodiscard]] Expected<pid_t> spawn(const ChildOptions& options);

// Where the shell would find `name`. kBadInput if nowhere.
[[nodiscard]] Expected<std::string> find_program(const std::string& name);

// This process's environment with `set` over it, as "NAME=value".
[[nodiscard]] std::vector<std::string> environment_with(
    const std::vector<std::pair<std::string, std::string>>& set);

// The texts as exec and posix_spawn take them, which do not write; they outlive it.
[[nodiscard]] std::vector<char*> c_strings(const std::vector<std::string>& texts);

}  // namespace dynmo::process
