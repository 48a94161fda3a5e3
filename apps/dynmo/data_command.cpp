// SPDX-License-Identifier: Apache-2.0
#include "apps/dynmo/data_command.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "dynmo/core/units.h"
#include "dynmo/data/prepare.h"

namespace dynmo::app {
namespace {

struct PrepareFlags {
  std::vector<std::filesystem::path> paths;
  data::PrepareOptions options;
};

// One line that is written over, where somebody watches.
class ProgressLine {
 public:
  ProgressLine() : shown_(::isatty(STDERR_FILENO) == 1) {}
  ~ProgressLine() {
    if (used_) fmt::print(stderr, "\r\033[K");
  }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void show(const data::PrepareProgress& progress) {
    if (!shown_) return;
    used_ = true;
    fmt::print(stderr, "\r\033[K{} files, {} documents, {:.1f} M tokens", progress.files,
               progress.documents, static_cast<double>(progress.tokens) * 1e-6);
    std::fflush(stderr);
  }

 private:
  bool shown_;
  bool used_ = false;
};

void print_summary(const data::PrepareReport& report, const std::filesystem::path& out) {
  fmt::print("train       {:>12} documents {:>14} tokens\n", report.train.documents,
             report.train.tokens);
  fmt::print("validation  {:>12} documents {:>14} tokens\n", report.validation.documents,
             report.validation.tokens);
  fmt::print(
      "skipped     {:>12} files: {} of other endings, {} binary, {} empty, {} seen twice, {} "
      "links and the like\n",
      report.skipped(), report.skipped_ending, report.skipped_binary, report.skipped_empty,
      report.skipped_twice, report.skipped_other);
  fmt::print("written to  {}\n", out.string());
}

Expected<int> run_prepare(PrepareFlags flags) {
  Expected<data::PrepareReport> report = [&] {
    ProgressLine line;
    flags.options.progress = [&](const data::PrepareProgress& progress) { line.show(progress); };
    return data::prepare(flags.paths, flags.options);
  }();
  if (!report) return report.error();
  print_summary(*report, flags.options.out);
  return 0;
}

// CLI11 reads -1 as the largest unsigned number.
std::string not_negative(const std::string& text) {
  return text.starts_with('-') ? text + " is below 0, wanted a whole number of at least 0" : "";
}

void add_prepare_command(CLI::App& data, Command& chosen) {
  CLI::App* prepare = data.add_subcommand(
      "prepare", "Turn text files, folders of them and JSON lines into token shards");
  const auto flags = std::make_shared<PrepareFlags>();
  prepare->add_option("paths", flags->paths, "Files and folders of text; .jsonl is JSON lines")
      ->required()
      ->option_text("PATH...");
  prepare->add_option("--out", flags->options.out, "Folder to write")
      ->required()
      ->option_text("DIR");
  prepare->add_option("--validation", flags->options.validation, "Share of the documents held out")
      ->capture_default_str();
  prepare->add_option("--seed", flags->options.seed, "Seed of the choice of those")
      ->check(not_negative)
      ->capture_default_str();
  prepare
      ->add_option("--endings", flags->options.endings,
                   "Files of a folder that are taken, such as .txt,.py")
      ->delimiter(',')
      ->capture_default_str();
  prepare
      ->add_option("--text-key", flags->options.text_key,
                   "Key of the text in a line of a .jsonl file")
      ->capture_default_str();
  prepare->callback([flags, &chosen] { chosen = [flags] { return run_prepare(*flags); }; });
}

}  // namespace

void add_data_command(CLI::App& app, Command& chosen) {
  CLI::App* data = app.add_subcommand("data", "Prepare training data");
  data->require_subcommand(1);
  add_prepare_command(*data, chosen);
}

}  // namespace dynmo::app
