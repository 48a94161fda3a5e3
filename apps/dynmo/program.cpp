// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
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

#include "apps/dynmo/command.h"
#include "apps/dynmo/terminal.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/file_system.h"
#include "dynmo/core/files.h"
#include "dynmo/core/nearest.h"

namespace dynmo::app {
namespace {

// Refuses 99999999999999999999, which CLI11 reads as the largest number, and an empty text, which
// it accepts.
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

// Returns the name of an option for messages. CLI11 has none for a hidden one.
std::string name_of(const CLI::Option& option) {
  if (!option.get_lnames().empty()) return "--" + option.get_lnames().front();
  return option.get_name(/*positional=*/true);
}

// Explains a flag that was given too often, or without its value.
std::string explain_mismatch(const CLI::App& command, const std::string& text,
                             const std::vector<std::string>& arguments) {
  for (const CLI::Option* option : command.get_options()) {
    if (option->get_expected_max() != 1 || option->count() < 2) continue;
    return fmt::format("{} is given {} times, wanted it once", name_of(*option), option->count());
  }
  if (!text.ends_with("missing")) return text;
  std::string name = text.substr(0, text.find(':'));
  for (std::size_t i = 1; i < arguments.size() && name.empty(); ++i) {
    const bool alone = i + 1 == arguments.size() || arguments[i + 1].starts_with("-");
    if (alone && command.get_option_no_throw(arguments[i]) != nullptr) name = arguments[i];
  }
  return fmt::format("{} has no value, wanted one", name);
}

// Explains a refused value. CLI11's text is "NAME: Value 7 not in range 1 to 5.000000", from 2.3 on
// "... [1 - 5]", or "NAME: x not in {a,b}".
std::string explain_value(const std::string& text) {
  const std::size_t colon = text.find(": ");
  const std::size_t range = text.find(" not in range ");
  const std::size_t list = text.find(" not in {");
  if (colon == std::string::npos || std::min(range, list) == std::string::npos) return text;
  std::string given = text.substr(colon + 2, std::min(range, list) - colon - 2);
  if (range == std::string::npos) {
    std::string names = text.substr(list + 9, text.rfind('}') - list - 9);
    if (const std::size_t comma = names.rfind(','); comma != std::string::npos) {
      names.replace(comma, 1, " or ");
    }
    for (std::size_t at = 0; (at = names.find(',', at)) != std::string::npos; at += 2) {
      names.replace(at, 1, ", ");
    }
    return fmt::format("{} is '{}', wanted {}", text.substr(0, colon), given, names);
  }
  if (given.starts_with("Value ")) given = given.substr(6);
  std::string bounds = text.substr(range + 14);
  std::size_t to = bounds.find(" to ");
  std::size_t behind = to + 4;
  if (bounds.starts_with("[") && bounds.ends_with("]")) {
    bounds = bounds.substr(1, bounds.size() - 2);
    to = bounds.find(" - ");
    behind = to + 3;
  }
  if (to == std::string::npos) return text;
  const auto plain = [](std::string number) {
    if (number.find('.') == std::string::npos) return number;
    number.erase(number.find_last_not_of('0') + 1);
    if (number.ends_with('.')) number.pop_back();
    return number;
  };
  const std::string least = plain(bounds.substr(0, to));
  const std::string most = plain(bounds.substr(behind));
  constexpr std::size_t kNoLimit = 20;  // digits of the largest number
  return fmt::format(
      "{} is '{}', wanted {}", text.substr(0, colon), given,
      most.size() >= kNoLimit ? least + " or more" : fmt::format("{} to {}", least, most));
}

// Explains a word that is not the value of a flag.
std::string explain_word(const CLI::App& command, const std::string& given,
                         const std::vector<std::string>& known) {
  const bool has_commands = !command.get_subcommands([](const CLI::App*) { return true; }).empty();
  if (has_commands) {
    return fmt::format("'{}' is not known here{}", given,
                       suggestion(given, names_of_commands(command)));
  }
  if (given.ends_with(".toml") && std::ranges::find(known, "--config") != known.end()) {
    return fmt::format("'{0}' is a word without a flag: a config is given by --config {0}", given);
  }
  return fmt::format("'{}' is one word too many: no flag before it takes it", given);
}

// Returns a parse error as a message. CLI11 reports a missing subcommand or flag before a misspelt
// one, which is its cause.
std::string explain(const CLI::App& app, const CLI::ParseError& fault,
                    const std::vector<std::string>& arguments) {
  const std::string text = fault.what();
  if (dynamic_cast<const CLI::ConversionError*>(&fault) != nullptr) {
    const std::string_view prefix = "Could not convert: ";
    return fmt::format("{}, wanted a number the flag can hold",
                       text.starts_with(prefix) ? text.substr(prefix.size()) : text);
  }
  if (dynamic_cast<const CLI::ValidationError*>(&fault) != nullptr) return explain_value(text);
  const CLI::App* last = &app;  // the innermost parsed subcommand
  while (!last->get_subcommands().empty()) last = last->get_subcommands().front();
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&fault) != nullptr) {
    return explain_mismatch(*last, text, arguments);
  }
  std::vector<std::string> known = names_of_commands(*last);
  const auto unknown = app.remaining(/*recurse=*/true);
  if (unknown.empty() && text.starts_with("A subcommand")) {
    return fmt::format("'{}' wants a command: {}", last->get_display_name(),
                       fmt::join(known, ", "));
  }
  if (unknown.empty()) return text;
  const std::string given = unknown.front().substr(0, unknown.front().find('='));
  // Flags of config keys are many and hidden, and named only if one is similar.
  std::vector<std::string> all = known;
  for (const CLI::Option* option : last->get_options()) {
    if (option->get_lnames().empty()) continue;
    all.push_back("--" + option->get_lnames().front());
    if (!option->get_group().empty()) known.push_back(all.back());
  }
  const bool is_key = given.find('.') != std::string::npos;
  const std::string near = did_you_mean(given, is_key ? all : known);
  if (!near.empty() || given.starts_with('-')) {
    return fmt::format("'{}' is not known here{}", given,
                       near.empty() ? suggestion(given, known) : near);
  }
  return explain_word(*last, given, known);
}

// Flushes standard output. Errors of pipes, files and full disks appear only here.
Expected<void> flush_output() {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return {};
  return make_error(ErrorCode::kBadInput, "cannot write to standard output: {}",
                    std::strerror(errno));
}

// Prints the text of --help or --version.
Expected<int> print_parse_result(const CLI::App& app, const CLI::ParseError& asked) {
  std::ostringstream text;
  app.exit(asked, text, text);
  fmt::print("{}", text.str());
  return 0;
}

// Returns the command that the arguments name.
Expected<Command> parse(int argc, char** argv,
                        const std::function<void(CLI::App&, Command&)>& add_commands) {
  CLI::App app("DynMo: balanced and elastic pipelines for dynamic language models", "dynmo");
  // CLI11 reads all flags of a level before it calls their functions, in the order of these lines.
  bool as_json = false;
  CLI::Option* json =
      app.add_flag("--json", as_json, "With --version: what a report of a defect needs");
  json->needs(app.set_version_flag("--version", [&as_json] {
    return as_json ? version_report().dump(2) : fmt::format("dynmo {}", kVersion);
  }));
  app.require_subcommand(1);
  Command chosen;
  add_commands(app, chosen);
  check_whole_numbers(app);
  try {
    app.parse(argc, argv);
    return chosen;
  } catch (const CLI::ParseError& fault) {
    if (fault.get_exit_code() != 0) {
      const std::vector<std::string> arguments(argv, argv + argc);
      return make_error(ErrorCode::kBadInput, "{} (see --help)", explain(app, fault, arguments));
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

// Opens a placeholder for each standard descriptor that is closed. Otherwise the next opened file
// would get its number, and output would go into that file. Reads and writes of a placeholder fail,
// as those of a closed descriptor do.
void reserve_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) < 0) static_cast<void>(::open("/", O_PATH));
  }
}

// Freed before an out-of-memory error is printed, because printing needs memory.
std::atomic<void*> memory_for_the_last_line = nullptr;
constexpr std::size_t kLastLine = std::size_t{1} << 20;

// Ends the process like any other error. A thread of a library (such as SentencePiece's) cannot
// pass on an exception, so its missing memory is reported here.
[[noreturn]] void end_for_uncaught() {
  if (const std::exception_ptr fault = std::current_exception()) {
    try {
      std::rethrow_exception(fault);
    } catch (const std::bad_alloc& lack) {
      std::free(memory_for_the_last_line.exchange(nullptr));
      ::_exit(print_error(error_of(lack)));
    } catch (...) {
      // Any other exception is a defect, which a core dump shows.
    }
  }
  std::abort();
}

}  // namespace

Expected<void> check_one_use(const std::vector<UsedFile>& files) {
  for (std::size_t i = 0; i < files.size(); ++i) {
    for (std::size_t other = 0; other < i; ++other) {
      if (files[i].path.empty() || files[other].path.empty() ||
          !is_same_file(files[other].path, files[i].path)) {
        continue;
      }
      return make_error(ErrorCode::kBadInput, "{} and {} are both '{}': name another file",
                        files[other].flag, files[i].flag, files[i].path);
    }
  }
  return {};
}

int run_program(int argc, char** argv,
                const std::function<void(CLI::App&, Command&)>& add_commands) {
  reserve_standard_descriptors();
  memory_for_the_last_line = std::malloc(kLastLine);
  std::set_terminate(end_for_uncaught);
  show_notes_by([](std::string_view line) { print_note("note: {}", line); });
  std::signal(SIGXFSZ, SIG_IGN);  // a file at its limit is an error of the write, like a full disk
  std::signal(SIGCHLD, SIG_DFL);  // if a parent ignores it, the system takes the ends of ranks
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
