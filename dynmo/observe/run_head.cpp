// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/run_head.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "dynmo/config/config.h"
#include "dynmo/core/units.h"
#include "dynmo/observe/table.h"

namespace dynmo::observe {
namespace {

std::string model_text(const config::Config& config) {
  const auto& model = config.model;
  std::string text =
      config::emulates(config)
          ? "emulated layers"
          : fmt::format("{} of {} blocks, hidden {}, sequence {}", model.family, model.shape.blocks,
                        model.shape.hidden, model.shape.sequence);
  const auto sources = config.sources.enabled_tables();
  if (!sources.empty()) text += fmt::format(", with {}", fmt::join(sources, ", "));
  return text;
}

std::string ranks_text(const RunTotals& totals, const RunSummary* run) {
  std::string text = fmt::format("{}", totals.ranks);
  if (run != nullptr && run->replicas > 1) text += fmt::format(" in {} replicas", run->replicas);
  if (run != nullptr && run->size && run->size->mean_ranks > 0) {
    text += fmt::format(" at first, {:.1f} in the mean", run->size->mean_ranks);
  }
  return text;
}

// Returns the gain of the run that is compared with the baseline, else "".
std::string gain_text(const Summary& summary, std::optional<std::size_t> number) {
  const auto pair = compared(summary);
  if (!pair || !number || pair->second != *number) return {};
  return fmt::format("{:.3f} x the speed of {}", summary.speedup, summary.runs[pair->first].name);
}

}  // namespace

std::string clocks_text(double error_s) {
  return fmt::format("of several hosts; times in the trace are right within {}",
                     format_seconds(error_s));
}

Json run_head(const RunFolder& folder, const Summary& summary, std::optional<std::size_t> number,
              const RunTotals& totals) {
  Json head = Json::array();
  const auto add = [&](const char* name, const std::string& value) {
    if (!value.empty()) head.push_back(Json::array({name, value}));
  };
  config::Config config;
  if (config::apply_file(config, folder.config())) {
    add("model", model_text(config));
    add("schedule", config.pipeline.schedule + ", balancer " + config.pipeline.balancer);
  }
  add("program", totals.program);
  const RunSummary* run = number ? &summary.runs[*number] : nullptr;
  add("ranks", ranks_text(totals, run));
  add("steps", fmt::format("{} to {}", totals.first_step, totals.first_step + totals.steps - 1));
  if (totals.seconds > 0) {
    add("speed", fmt::format("{:.0f} tokens/s, {} a step", totals.tokens / totals.seconds,
                             format_seconds(totals.seconds / static_cast<double>(totals.steps))));
  }
  add("gain", gain_text(summary, number));
  add("moves",
      fmt::format("{}, {} in all", totals.moves, format_count(totals.moved_layers, "layer")));
  if (totals.losses > 0) {
    add("lost ranks",
        fmt::format("{} of them, at {}", totals.lost_ranks, format_count(totals.losses, "step")));
  }
  if (run != nullptr && run->clock_error_s) add("clocks", clocks_text(*run->clock_error_s));
  return head;
}

}  // namespace dynmo::observe
