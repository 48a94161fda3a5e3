// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "apps/dynmo/command.h"
#include "apps/dynmo/terminal.h"
#include "dynmo/checkpoint/masks.h"
#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/core/units.h"
#include "dynmo/dynamism/load_log.h"
#include "dynmo/dynamism/load_tensor.h"
#include "dynmo/dynamism/moe/load_counts.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/observe/table.h"
#include "dynmo/observe/traffic_log.h"
#include "dynmo/observe/traffic_picture.h"
#include "dynmo/tensor/features.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::app {
namespace {

struct StatsFlags {
  std::filesystem::path input;
  int along = 0;  // 0: the dimension of steps
  int threads = 0;
  bool json = false;
};

struct Named {
  std::string what;
  tensor::SparseTensor tensor;
  bool has_steps = false;
};

// Returns the tensors of a file or a run.
Expected<std::vector<Named>> read_tensors(const std::filesystem::path& input) {
  std::vector<Named> found;
  const auto add_counts = [&](const std::filesystem::path& path) -> Expected<void> {
    DYNMO_ASSIGN(const dynamism::RecordedCounts counts, dynamism::read_counts(path));
    found.push_back({"tokens of experts", dynamism::tensor_of(counts), true});
    return {};
  };
  const auto add_trace = [&](const std::filesystem::path& path) -> Expected<void> {
    DYNMO_ASSIGN(const auto load, dynamism::read_trace(path));
    found.push_back({"seconds of layers", dynamism::tensor_of(*load), true});
    return {};
  };
  const auto add_masks = [&](const std::filesystem::path& folder) -> Expected<void> {
    DYNMO_ASSIGN(auto masks, checkpoint::read_masks(folder));
    for (checkpoint::Mask& mask : masks) {
      found.push_back({mask.name, std::move(mask.places), false});
    }
    return {};
  };
  if (std::filesystem::exists(input / "manifest.json")) {
    DYNMO_TRY(add_masks(input));
    if (!found.empty()) return found;
    return make_error(ErrorCode::kBadInput,
                      "checkpoint '{}' has no masks, wanted one of a run with pruning",
                      input.string());
  }
  if (std::filesystem::is_directory(input)) {
    const observe::RunFolder run(input);
    if (std::filesystem::exists(run.load_trace(0))) DYNMO_TRY(add_trace(run.load_trace(0)));
    const std::filesystem::path records = run.records_of(WorldRank(0));
    if (std::filesystem::exists(records)) {
      // A run without experts has no counts.
      const auto counts = dynamism::read_counts(records);
      if (counts) found.push_back({"tokens of experts", dynamism::tensor_of(*counts), true});
    }
    if (std::filesystem::exists(run.traffic())) {
      DYNMO_ASSIGN(const auto intervals, observe::read_traffic(run.traffic()));
      if (!intervals.empty()) found.push_back({"bytes", observe::tensor_of(intervals), false});
    }
    if (found.empty()) {
      return make_error(ErrorCode::kBadInput,
                        "'{}' has neither a load trace nor counts of experts nor traffic, wanted a "
                        "run with run.load_trace above 0, with experts or with several ranks",
                        input.string());
    }
    return found;
  }
  if (input.extension() != ".jsonl") {
    DYNMO_ASSIGN(tensor::SparseTensor tensor, tensor::read_coordinates(input));
    found.push_back({"entries", std::move(tensor), false});
    return found;
  }
  DYNMO_ASSIGN(const std::string text, read_file(input));
  if (text.substr(0, text.find('\n')).find("dynmo-load-trace-") != std::string::npos) {
    DYNMO_TRY(add_trace(input));
  } else {
    DYNMO_TRY(add_counts(input));
  }
  return found;
}

std::string mode_name(const tensor::Features& features, int mode) {
  const auto m = static_cast<std::size_t>(mode);
  return features.names.empty() ? fmt::format("mode {}", mode + 1) : features.names[m];
}

std::string free_names(const tensor::Features& features, const std::vector<int>& free) {
  std::vector<std::string> names;
  for (const int mode : free) names.push_back(mode_name(features, mode));
  return fmt::format("{}", fmt::join(names, ", "));
}

void print_features(const std::string& what, const tensor::Features& features) {
  std::vector<std::string> sizes;
  for (std::size_t m = 0; m < features.sizes.size(); ++m) {
    sizes.push_back(
        fmt::format("{} {}", mode_name(features, static_cast<int>(m)), features.sizes[m]));
  }
  fmt::print("{}: {}, {} entries, density {:.4g}\n", what, fmt::join(sizes, ", "), features.entries,
             features.density);
  const std::vector<observe::Column> columns = {
      {"groups in which these vary", observe::Column::Align::kLeft},
      {"number", observe::Column::Align::kLeft},
      {"groups"},
      {"nonempty"},
      {"min"},
      {"mean"},
      {"max"},
      {"std"},
      {"CV"},
      {"imbalance"}};
  std::vector<std::vector<std::string>> rows;
  const auto add = [&](const std::vector<int>& free, const char* number,
                       const tensor::Distribution& d) {
    const tensor::Spread& spread = d.of_nonempty;
    rows.push_back({free_names(features, free), number, fmt::format("{:.15g}", d.groups),
                    fmt::format("{}", d.nonempty), fmt::format("{:.5g}", spread.min),
                    fmt::format("{:.5g}", spread.mean), fmt::format("{:.5g}", d.max),
                    fmt::format("{:.4g}", spread.std), fmt::format("{:.4g}", spread.cv),
                    fmt::format("{:.4g}", spread.imbalance)});
  };
  if (features.values) add({}, "value", *features.values);
  if (features.values) rows.back().front() = "none: single places";
  for (const auto* list : {&features.fibers, &features.slices, &features.modes}) {
    for (const tensor::GroupFeatures& group : *list) {
      if (group.values) add(group.free, "sum of values", *group.values);
      if (group.values) continue;
      add(group.free, "entries", group.entries);
      if (group.fibers) add(group.free, "fibers", *group.fibers);
    }
  }
  fmt::print("{}", for_terminal(observe::table(columns, rows)));
  if (!features.along) return;
  const tensor::Persistence& along = *features.along;
  fmt::print(
      "autocorrelation with the next {}: {:.4g}; {}\n", mode_name(features, along.mode),
      along.autocorrelation,
      along.half_life
          ? fmt::format("a plan has lost half of what it knew after {}",
                        observe::format_count(*along.half_life, mode_name(features, along.mode)))
          : std::string("within half of the recording no plan loses half of what it knew"));
  if (!features.uneven) return;
  const auto& [steps, parts] = *features.uneven;
  const auto [least, most] = std::ranges::minmax(parts);
  fmt::print("unevenness (CV over {}) by {}: {:.3g} to {:.3g}; at first {:.3g}, at last {:.3g}\n",
             mode_name(features, 2), mode_name(features, 1), least, most, steps.front(),
             steps.back());
}

Expected<int> run_stats(const StatsFlags& flags) {
  if (flags.threads < 0 || flags.threads > 1024) {
    return make_error(ErrorCode::kBadInput, "--threads is {}, wanted 1 to 1024, or 0 for all",
                      flags.threads);
  }
  DYNMO_ASSIGN(const std::vector<Named> tensors, read_tensors(flags.input));
  const int processors = static_cast<int>(std::max(std::thread::hardware_concurrency(), 1U));
  Json all = Json::array();
  for (const Named& named : tensors) {
    tensor::FeatureOptions options{.threads = flags.threads == 0 ? processors : flags.threads};
    if (flags.along != 0) {
      options.along = flags.along - 1;
    } else if (named.has_steps) {
      options.along = 0;
    }
    DYNMO_ASSIGN(const tensor::Features features, tensor::features_of(named.tensor, options));
    if (flags.json) {
      all.push_back(tensor::to_json(features));
    } else {
      print_features(named.what, features);
    }
  }
  if (flags.json) fmt::print("{}\n", (all.size() == 1 ? all.front() : all).dump(1));
  return 0;
}

}  // namespace

void add_stats_command(CLI::App& trace, Command& chosen) {
  CLI::App* stats = trace.add_subcommand(
      "stats", "Say how a load, the counts of experts or a sparse tensor is uneven");
  const auto flags = std::make_shared<StatsFlags>();
  stats
      ->add_option(
          "input", flags->input,
          "Folder of a run or a checkpoint, load trace or step records (.jsonl), or coordinates "
          "(.tns)")
      ->required();
  stats
      ->add_option("--along", flags->along,
                   "Mode of the steps, from 1, for coordinates: how long the load stays")
      ->option_text("MODE");
  stats->add_option("--threads", flags->threads, "Threads (0: one a processor)")
      ->capture_default_str();
  stats->add_flag("--json", flags->json, "Print \"dynmo-features-1\"");
  run_when_parsed(stats, chosen, flags, run_stats);
}

}  // namespace dynmo::app
