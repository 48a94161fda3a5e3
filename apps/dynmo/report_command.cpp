// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "apps/dynmo/command.h"
#include "apps/dynmo/terminal.h"
#include "dynmo/core/files.h"
#include "dynmo/observe/html_page.h"
#include "dynmo/observe/run_data.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/observe/run_report.h"
#include "dynmo/observe/traffic_log.h"
#include "dynmo/observe/traffic_picture.h"

namespace dynmo::app {
namespace {

struct ReportFlags {
  std::vector<std::string> runs;
  std::string html;
  std::vector<std::string> traffic;  // the file, if one is named
};

Expected<std::string> traffic_file(const std::string& out,
                                   const std::vector<observe::TrafficInterval>& intervals) {
  if (out.ends_with(".svg")) return observe::traffic_svg(observe::sum_of(intervals));
  if (out.ends_with(".csv")) return observe::traffic_csv(intervals);
  if (out.ends_with(".json")) {
    Json json = Json::array();
    for (const observe::TrafficInterval& one : intervals) json.push_back(observe::to_json(one));
    return json.dump(1) + "\n";
  }
  return make_error(ErrorCode::kBadInput,
                    "--traffic is '{}', wanted a file that ends with .svg, .csv or .json, or none "
                    "for the terminal",
                    out);
}

// Refuses an output that is a file of the run.
Expected<void> check_out(const std::vector<std::string>& runs, std::string_view flag,
                         const std::string& out) {
  for (const std::string& run : runs) {
    const observe::RunFolder folder(run);
    for (const std::filesystem::path& own :
         {std::filesystem::path(run), folder.summary(), folder.config(), folder.events(),
          folder.traffic(), folder.profile(), folder.cluster(), folder.trace()}) {
      DYNMO_TRY(check_one_use({{"a file of the run", own.string()}, {flag, out}}));
    }
  }
  return {};
}

Expected<void> report_traffic(const ReportFlags& flags) {
  const auto path = observe::RunFolder(flags.runs.front()).traffic();
  std::error_code fault;
  if (!std::filesystem::exists(path, fault)) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' has no traffic.jsonl: wanted the folder of a run of several ranks",
                      flags.runs.front());
  }
  if (!flags.traffic.empty()) {
    DYNMO_TRY(check_out(flags.runs, "--traffic", flags.traffic.front()));
  }
  DYNMO_ASSIGN(const auto intervals, observe::read_traffic(path));
  if (!flags.traffic.empty() && !flags.traffic.front().empty()) {
    DYNMO_ASSIGN(const std::string text, traffic_file(flags.traffic.front(), intervals));
    return write_file_durably(flags.traffic.front(), text);
  }
  fmt::print("{}",
             observe::traffic_text(observe::sum_of(intervals), {.ascii = !terminal_has_utf8()}));
  return {};
}

// Returns DYNMO_VEGA, or else the path at which `scripts/setup report` installs the script.
std::filesystem::path script_path() {
  const char* const named = std::getenv("DYNMO_VEGA");
  return named != nullptr && *named != '\0' ? named : cache_folder() / "report/vega.js";
}

Expected<void> report_html(const ReportFlags& flags) {
  DYNMO_TRY(check_out(flags.runs, "--html", flags.html));
  const std::filesystem::path path = script_path();
  const auto script = read_file(path);
  if (!script) {
    return make_error(
        ErrorCode::kBadInput,
        "--html draws with Vega, and its script is not there ({}): run `scripts/setup "
        "report` once, or name the file in DYNMO_VEGA",
        script.error().message);
  }
  std::error_code fault;
  if (flags.runs.size() == 1 && std::filesystem::is_regular_file(flags.runs.front(), fault)) {
    DYNMO_ASSIGN(const std::string text, read_file(flags.runs.front()));
    DYNMO_ASSIGN(const Json document, observe::parse_html_report(text, flags.runs.front()));
    return write_file_durably(flags.html, observe::html_page(document, *script));
  }
  std::vector<observe::RunData> runs;
  for (const std::string& run : flags.runs) {
    DYNMO_ASSIGN(std::vector<observe::RunData> own, observe::read_run_data(run));
    std::ranges::move(own, std::back_inserter(runs));
  }
  return write_file_durably(flags.html, observe::html_page(observe::html_report(runs), *script));
}

}  // namespace

void add_report_command(CLI::App& app, Command& chosen) {
  CLI::App* command = app.add_subcommand(
      "report", "Reprint the final report of a run, with a table of its layers and its traffic");
  const auto flags = std::make_shared<ReportFlags>();
  command
      ->add_option("run", flags->runs,
                   "Folder of a run; several with --html, or a document of its format")
      ->required();
  const CLI::Option* traffic =
      command
          ->add_option(
              "--traffic", flags->traffic,
              "Instead: who sent how much to whom, measured beside predicted; as a drawing "
              "or table, where a file is named")
          ->option_text("[OUT.svg|OUT.csv|OUT.json]")
          ->expected(0, 1);
  const CLI::Option* html =
      command->add_option("--html", flags->html,
                          "Instead: charts of the runs as one file for a browser, without network");
  command->callback([flags, traffic, html, &chosen] {
    chosen = [flags, asks = traffic->count() > 0, draws = html->count() > 0]() -> Expected<int> {
      if (asks && draws) {
        return make_error(ErrorCode::kBadInput, "--html with --traffic: wanted one of them");
      }
      if (draws) {
        DYNMO_TRY(report_html(*flags));
        return 0;
      }
      if (flags->runs.size() > 1) {
        return make_error(ErrorCode::kBadInput, "{} runs, wanted one without --html",
                          flags->runs.size());
      }
      if (asks) {
        DYNMO_TRY(report_traffic(*flags));
        return 0;
      }
      DYNMO_ASSIGN(const std::string text, observe::read_report(flags->runs.front()));
      fmt::print("{}", for_terminal(text));
      return 0;
    };
  });
}

}  // namespace dynmo::app
