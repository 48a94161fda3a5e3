// SPDX-License-Identifier: Apache-2.0
#include "apps/dynmo/libtorch.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "dynmo/core/files.h"
#include "dynmo/process/hook.h"

namespace dynmo::app {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kBuiltWith = DYNMO_LIBTORCH;      // "2.11.0"
constexpr std::string_view kBuildsWith = DYNMO_TORCH_RANGE;  // "2.11 to 2.15"
constexpr const char* kLibrary = "libtorch_cpu.so";
constexpr const char* kHere = "DYNMO_TORCH_DIR";
constexpr const char* kPath = "LD_LIBRARY_PATH";

// Prints the folder of PyTorch, which is not imported. A folder `torch` in the working directory
// does not count.
constexpr const char* kAskPython =
    "import importlib.util as u, sys\n"
    "sys.path[:] = filter(None, sys.path)\n"
    "s = u.find_spec('torch')\n"
    "print(s.submodule_search_locations[0] if s and s.submodule_search_locations else '')";

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Returns "2.11" of "2.11.0".
std::string_view series_of(std::string_view version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

// Returns "2.11.0" of the folder `torch` of an installed PyTorch, or "".
std::string version_in(const fs::path& torch) {
  const Expected<std::string> read = read_file(torch / "version.py", std::size_t{1} << 20);
  if (!read) return "";
  const std::size_t line = ("\n" + *read).find("\n__version__");
  if (line == std::string::npos) return "";
  const std::size_t start = read->find_first_of("0123456789\n", line);
  if (start == std::string::npos) return "";
  return read->substr(start, read->find_first_not_of("0123456789.", start) - start);
}

bool is_wanted(const fs::path& torch) {
  std::error_code fault;
  return series_of(version_in(torch)) == series_of(kBuiltWith) &&
         fs::exists(torch / "lib" / kLibrary, fault);
}

// Returns a description of a folder that is not used.
std::string contents_of(const fs::path& torch) {
  const std::string version = version_in(torch);
  if (version.empty()) return fmt::format("'{}' (no version.py of PyTorch)", torch.string());
  const bool is_other = series_of(version) != series_of(kBuiltWith);
  return fmt::format("'{}' ({}{})", torch.string(), version,
                     is_other ? "" : fmt::format(" without lib/{}", kLibrary));
}

// Returns LD_LIBRARY_PATH with the libraries of `torch` in front. An empty part would be the
// working directory.
std::string path_with(const fs::path& torch) {
  const std::string lib = (torch / "lib").string();
  const std::string_view others = variable(kPath);
  return others.empty() ? lib : fmt::format("{}:{}", lib, others);
}

// Returns the output of a program, or "" if it failed.
std::string output_of(std::vector<std::string> command) {
  process::HookRunner runner;
  runner.start({.command = std::move(command), .limit = std::chrono::seconds(30)});
  const auto result = runner.wait(std::chrono::seconds(40));
  const bool ended = result && result->end == process::HookEnd::kExited && result->exit_code == 0;
  return ended ? result->output : "";
}

// Returns the names of libraries that the dynamic loader does not find for `program`. The loader
// says so itself, without starting the program.
std::vector<std::string> missing_libraries(const fs::path& program, const std::string& path) {
  constexpr const char* kTrace =
      "LD_LIBRARY_PATH=\"$1\" LD_TRACE_LOADED_OBJECTS=1 \"$0\" 2>/dev/null | grep ' => not found'";
  std::istringstream lines(output_of({"/bin/sh", "-c", kTrace, program.string(), path}));
  std::vector<std::string> missing;
  for (std::string line; std::getline(lines, line);) {
    std::string name;
    std::istringstream(line) >> name;
    if (std::ranges::find(missing, name) == missing.end()) missing.push_back(std::move(name));
  }
  return missing;
}

fs::path torch_of_python() {
  std::string printed = output_of({"python3", "-c", kAskPython});
  while (printed.ends_with('\n')) printed.pop_back();
  return printed;
}

fs::path cache_folder() {
  if (const auto given = variable("DYNMO_CACHE"); !given.empty()) return given;
  if (const auto given = variable("XDG_CACHE_HOME"); !given.empty())
    return fs::path(given) / "dynmo";
  return fs::path(variable("HOME")) / ".cache/dynmo";
}

std::vector<fs::path> entries_named(const fs::path& folder, std::string_view start) {
  std::error_code fault;
  std::vector<fs::path> found;
  for (fs::directory_iterator entry(folder, fault), end; !fault && entry != end;
       entry.increment(fault)) {
    if (entry->path().filename().string().starts_with(start)) found.push_back(entry->path());
  }
  std::ranges::sort(found);
  return found;
}

// Returns the folders `torch` of the copies that scripts/setup has made.
std::vector<fs::path> private_copies() {
  std::vector<fs::path> found;
  std::error_code fault;
  for (const fs::path& copy :
       entries_named(cache_folder(), fmt::format("torch-{}.", series_of(kBuiltWith)))) {
    for (const fs::path& python : entries_named(copy / "lib", "python3")) {
      const fs::path torch = python / "site-packages/torch";
      if (fs::exists(torch, fault)) found.push_back(torch);
    }
  }
  return found;
}

Expected<fs::path> named_torch(const char* command, const fs::path& torch) {
  if (is_wanted(torch)) return torch;
  return make_error(ErrorCode::kBadInput,
                    "dynmo {}: {} is {}, wanted the folder 'torch' of an installed PyTorch {} "
                    "(.../site-packages/torch), which this build is for: correct it, unset it, or "
                    "build DynMo with another of {}",
                    command, kHere, contents_of(torch), series_of(kBuiltWith), kBuildsWith);
}

Expected<fs::path> installed_torch(const char* command) {
  std::vector<fs::path> candidates = private_copies();
  if (const fs::path torch = torch_of_python(); !torch.empty()) {
    candidates.insert(candidates.begin(), torch);
  }
  std::vector<std::string> seen;
  for (const fs::path& torch : candidates) {
    if (is_wanted(torch)) return torch;
    seen.push_back(contents_of(torch));
  }
  return make_error(
      ErrorCode::kBadInput,
      "dynmo {0} needs libtorch: wanted PyTorch {1}, which this build is for, found {2}: run `pip "
      "install torch=={1}.*`, set {3} to the folder 'torch' of one (.../site-packages/torch), or "
      "build DynMo with another of {4}",
      command, series_of(kBuiltWith),
      seen.empty() ? "none" : fmt::format("{}", fmt::join(seen, ", ")), kHere, kBuildsWith);
}

}  // namespace

Expected<std::string> library_path_of(const char* command, const fs::path& program) {
  std::string path(variable(kPath));
  std::vector<std::string> missing;
  if (const auto named = variable(kHere); !named.empty()) {
    DYNMO_ASSIGN(const fs::path torch, named_torch(command, named));
    path = path_with(torch);
    missing = missing_libraries(program, path);
  } else {
    missing = missing_libraries(program, path);
    if (std::ranges::find(missing, kLibrary) != missing.end()) {
      DYNMO_ASSIGN(const fs::path torch, installed_torch(command));
      path = path_with(torch);
      missing = missing_libraries(program, path);
    }
  }
  if (missing.empty()) return path;
  return make_error(ErrorCode::kBadInput, "dynmo {}: {} needs {}, which {} found: install {}",
                    command, program.string(), fmt::join(missing, ", "),
                    missing.size() == 1 ? "is not" : "are not",
                    missing.size() == 1 ? "it" : "them");
}

}  // namespace dynmo::app
