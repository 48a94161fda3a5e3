// SPDX-License-Identifier: Apache-2.0
#include "apps/dynmo/report_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "apps/dynmo/terminal.h"
#include "dynmo/core/files.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/observe/run_report.h"
#include "dynmo/observe/traffic_log.h"
#include "dynmo/observe/traffic_picture.h"

namespace dynmo::app {
namespace {

struct ReportFlags {
  std::string run;
  std::vector<std::string> traffic;  // the file, where one is named
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

Expected<void> report_traffic(const ReportFlags& flags) {
  const auto path = observe::RunFolder(flags.run).traffic();
  DYNMO_ASSIGN(const auto intervals, observe::read_traffic(path));
  if (!flags.traffic.empty() && !flags.traffic.front().empty()) {
    DYNMO_ASSIGN(const std::string text, traffic_file(flags.traffic.front(), intervals));
    return write_file_durably(flags.traffic.front(), text);
  }
  fmt::print("{}",
             observe::traffic_text(observe::sum_of(intervals), {.ascii = !terminal_has_utf8()}));
  return {};
}

}  // namespace

void add_report_command(CLI::App& app, Command& chosen) {
  CLI::App* command = app.add_subcommand(
      "report", "Reprint the final report of a run, with a table of its layers and its traffic");
  const auto flags = std::make_shared<ReportFlags>();
  command->add_option("run", flags->run, "Folder of a run")->required();
  const CLI::Option* traffic =
      command
          ->add_option(
              "--traffic", flags->traffic,
              "Instead: who sent how much to whom, measured beside predicted; as a drawing "
              "or table, where a file is named")
          ->option_text("[OUT.svg|OUT.csv|OUT.json]")
          ->expected(0, 1);
  command->callback([flags, traffic, &chosen] {
    chosen = [flags, asks = traffic->count() > 0]() -> Expected<int> {
      if (asks) {
        DYNMO_TRY(report_traffic(*flags));
        return 0;
      }
      DYNMO_ASSIGN(const std::string text, observe::read_report(flags->run));
      fmt::print("{}", for_terminal(text));
      return 0;
    };
  });
}

}  // namespace dynmo::app
