// SPDX-License-Identifier: Apache-2.0
#include "apps/dynmo/program.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "apps/dynmo/terminal.h"
#include "dynmo/core/exception_error.h"
#include "dynmo/core/nearest.h"

namespace dynmo::app {
namespace {

// CLI11 reads 99999999999999999999 as the largest number there is, and an empty text as none.
std::string check_whole_number(const std::string& text) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, fault] = std::from_chars(text.data(), end, value);
  if (fault == std::errc() && stop == end) return "";
  return fmt::format(
      "'{}' is {}", text,
      fault == std::errc::result_out_of_range ? "too large a number" : "not a whole number");
}

void check_whole_numbers(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();
    if (type.starts_with("INT") || type.starts_with("UINT")) option->check(check_whole_number);
  }
  for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    check_whole_numbers(*command);
  }
}

std::vector<std::string> names_of_commands(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

// Explains a parse error to a person. CLI11 reports a missing subcommand or flag before a misspelt
// one, which is its cause.
std::string explain(const CLI::App& app, const CLI::ParseError& fault) {
  if (const std::string text = fault.what(); dynamic_cast<const CLI::ConversionError*>(&fault)) {
    const std::string_view prefix = "Could not convert: ";
    return fmt::format("{}, wanted a number the flag can hold",
                       text.starts_with(prefix) ? text.substr(prefix.size()) : text);
  }
  const CLI::App* last = &app;  // the innermost subcommand that was understood
  while (!last->get_subcommands().empty()) last = last->get_subcommands().front();
  std::vector<std::string> known = names_of_commands(*last);
  const auto unknown = app.remaining(/*recurse=*/true);
  if (unknown.empty() && std::string_view(fault.what()).starts_with("A subcommand")) {
    return fmt::format("'{}' wants a command: {}", last->get_display_name(),
                       fmt::join(known, ", "));
  }
  if (unknown.empty()) return fault.what();
  for (const CLI::Option* option : last->get_options()) {
    // The flags of config keys, which are many and hidden, only where one seems to be meant.
    const bool hidden =
        option->get_group().empty() && unknown.front().find('.') == std::string::npos;
    if (hidden || option->get_lnames().empty()) continue;
    known.push_back("--" + option->get_lnames().front());
  }
  return fmt::format("'{}' is not known here{}", unknown.front(),
                     suggestion(unknown.front(), known));
}

// Output to a pipe, a file or a full disk is known to be written only now.
Expected<void> flush_output() {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return {};
  return make_error(ErrorCode::kBadInput, "cannot write to standard output: {}",
                    std::strerror(errno));
}

// The text of --help or --version.
Expected<int> print_parse_result(const CLI::App& app, const CLI::ParseError& asked) {
  std::ostringstream text;
  app.exit(asked, text, text);
  fmt::print("{}", text.str());
  return 0;
}

// The command that the arguments name.
Expected<Command> parse(int argc, char** argv,
                        const std::function<void(CLI::App&, Command&)>& add_commands) {
  CLI::App app("DynMo: balanced and elastic pipelines for dynamic language models", "dynmo");
  app.set_version_flag("--version", "dynmo " DYNMO_VERSION);
  app.require_subcommand(1);
  Command chosen;
  add_commands(app, chosen);
  check_whole_numbers(app);
  try {
    app.parse(argc, argv);
    return chosen;
  } catch (const CLI::ParseError& fault) {
    if (fault.get_exit_code() != 0) {
      return make_error(ErrorCode::kBadInput, "{} (see --help)", explain(app, fault));
    }
    DYNMO_TRY(print_parse_result(app, fault));
    return Command([]() -> Expected<int> { return 0; });
  }
}

Expected<int> parse_and_run(int argc, char** argv,
                            const std::function<void(CLI::App&, Command&)>& add_commands) {
  DYNMO_ASSIGN(const Command command, parse(argc, argv, add_commands));
  DYNMO_ASSIGN(const int code, command());
  DYNMO_TRY(flush_output());
  return code;
}

// The next file that is opened would take the number of a closed standard descriptor, and what is
// printed would go into that file. Use of what is opened here fails as that of a closed one does.
void reserve_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) < 0) static_cast<void>(::open("/", O_PATH));
  }
}

// Given back before the lack of memory is said, which takes some.
std::atomic<void*> memory_for_the_last_line = nullptr;
constexpr std::size_t kLastLine = std::size_t{1} << 20;

// A library's own thread (SentencePiece's, say) hands on no exception: what memory it lacked is
// said here, and the process ends as for any other error.
[[noreturn]] void end_for_uncaught() {
  if (const std::exception_ptr fault = std::current_exception()) {
    try {
      std::rethrow_exception(fault);
    } catch (const std::bad_alloc& lack) {
      std::free(memory_for_the_last_line.exchange(nullptr));
      ::_exit(print_error(error_of(lack)));
    } catch (...) {
      // A defect: the core tells more.
    }
  }
  std::abort();
}

}  // namespace

int run_program(int argc, char** argv,
                const std::function<void(CLI::App&, Command&)>& add_commands) {
  reserve_standard_descriptors();
  memory_for_the_last_line = std::malloc(kLastLine);
  std::set_terminate(end_for_uncaught);
  std::signal(SIGXFSZ, SIG_IGN);  // a file at its limit is an error of the write, like a full disk
  try {
    const Expected<int> done = parse_and_run(argc, argv, add_commands);
    return done ? *done : print_error(done.error());
  } catch (const std::system_error& fault) {
    if (std::string_view(fault.what()).starts_with("cannot write to file")) {  // fmt::print
      return print_error(make_error(ErrorCode::kBadInput, "cannot write to standard output: {}",
                                    fault.code().message()));
    }
    return print_error(error_of(fault));
  } catch (const std::exception& fault) {
    return print_error(error_of(fault));
  }
}

}  // namespace dynmo::app
