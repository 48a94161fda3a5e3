// SPDX-License-Identifier: Apache-2.0
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

#include "apps/dynmo/command.h"
#include "apps/dynmo/libtorch.h"
#include "dynmo/core/units.h"

namespace dynmo::app {
namespace {

namespace fs = std::filesystem;

constexpr const char* kProgram = "dynmo-runtime";

// Finds `dynmo-runtime`: in the folder of `dynmo` in a build, in libexec once installed.
Expected<fs::path> find_runtime(const char* command) {
  std::error_code fault;
  const fs::path here = fs::read_symlink("/proc/self/exe", fault).parent_path();
  const fs::path installed = (here / DYNMO_RUNTIME_FOLDER).lexically_normal();
  for (const fs::path& folder : {here, installed}) {
    if (::access((folder / kProgram).c_str(), X_OK) == 0) return folder / kProgram;
  }
  return make_error(ErrorCode::kBadInput,
                    "dynmo {} needs {}, which is neither in '{}' nor in '{}': install DynMo as a "
                    "whole, built with its runtime (cmake -DDYNMO_RUNTIME=ON)",
                    command, kProgram, here.string(), installed.string());
}

// Refuses a limit of the address space that is too low. With too little, loading libtorch ends the
// process before main, without a message.
Expected<void> check_address_space(const char* command) {
  constexpr rlim_t kMinBytes = rlim_t{768} << 20;  // of a rank with a small model: 700 MiB
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur >= kMinBytes) return {};
  return make_error(ErrorCode::kBadInput,
                    "dynmo {}: memory is limited to {} of addresses (ulimit -v), wanted {} or more "
                    "to load libtorch: raise that limit",
                    command, format_bytes(Bytes{static_cast<std::int64_t>(limit.rlim_cur)}),
                    format_bytes(Bytes{static_cast<std::int64_t>(kMinBytes)}));
}

Expected<int> become_runtime(const char* command, char** argv) {
  DYNMO_ASSIGN(const fs::path program, find_runtime(command));
  DYNMO_TRY(check_address_space(command));
  DYNMO_ASSIGN(const std::string libraries, library_path_of(command, program));
  if (!libraries.empty()) ::setenv("LD_LIBRARY_PATH", libraries.c_str(), 1);
  ::execv(program.c_str(), argv);
  return make_error(ErrorCode::kBadInput, "dynmo {}: cannot start '{}': {}", command,
                    program.string(), std::strerror(errno));
}

}  // namespace

void add_runtime_commands(CLI::App& app, char** argv, Command& chosen) {
  for (const RuntimeCommand& each : kRuntimeCommands) {
    CLI::App* command = app.add_subcommand(each.name, each.summary);
    command->prefix_command();  // passes all further arguments on,
    command->set_help_flag();   // also --help
    command->callback([name = each.name, argv, &chosen] {
      chosen = [name, argv] { return become_runtime(name, argv); };
    });
  }
}

}  // namespace dynmo::app
