// SPDX-License-Identifier: Apache-2.0
#include "apps/dynmo/trace_features.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

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
#include "dynmo/observe/traffic_tensor.h"
#include "dynmo/tensor/coordinates.h"
#include "dynmo/tensor/features.h"
#include "dynmo/tensor/generate.h"

namespace dynmo::app {
namespace {

struct StatsFlags {
  std::filesystem::path input;
  int along = 0;  // 0: where the input has steps
  int threads = 0;
  bool json = false;
};

struct Named {
  std::string what;
  tensor::SparseTensor tensor;
  bool has_steps = false;
};

// The tensors that a file or a run has.
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

struct GenFlags {
  std::filesystem::path out;
  std::vector<std::uint64_t> sizes;
  std::filesystem::path like;
  std::vector<std::string> scale;
  double density = 1e-3;
  double fiber_density = 1e-2;
  double slice_density = 1;
  double fibers_cv = 0.5;
  double entries_cv = 0.5;
  std::optional<double> fibers_imbalance;
  std::optional<double> entries_imbalance;
  bool counts = false;
  bool costs = false;
  double step_s = 1;
  std::uint64_t tokens = 4096;
  double cv = 0.5;
  std::optional<double> lasting_cv;
  double autocorrelation = 0.9;
  std::uint64_t seed = 1;
};

Expected<std::uint64_t> whole(std::string_view flag, double share, double possible) {
  if (!(share > 0 && share <= 1)) {
    return make_error(ErrorCode::kBadInput, "{} is {}, wanted above 0, at most 1", flag, share);
  }
  if (share * possible > 0x1p40) {
    return make_error(ErrorCode::kBadInput, "{} of {:.3g} are {:.3g}, wanted at most 2^33", flag,
                      possible, share * possible);
  }
  return static_cast<std::uint64_t>(std::max(std::round(share * possible), 1.0));
}

struct Groups {
  std::uint64_t sum = 0;
  std::uint64_t groups = 0;
  std::uint64_t size = 0;  // the most that one has room for
  double cv = 0;
};

// The largest number of a group: mean (1 + imbalance). None is given: four standard deviations
// above the mean, or what the coefficient of variation needs, as far as there is room.
std::uint64_t largest(const Groups& of, std::optional<double> imbalance) {
  const double mean = static_cast<double>(of.sum) / static_cast<double>(of.groups);
  const double room = static_cast<double>(std::min(of.size, of.sum - of.groups + 1));
  double asked = 0;
  if (imbalance) {
    asked = std::round(mean * (1 + *imbalance));
  } else {
    // One alone may not be further away than the square root of their number allows.
    const double far = std::min(4.0, 0.9 * std::sqrt(static_cast<double>(of.groups)));
    const double needed = mean > 1 ? mean + 2 * of.cv * of.cv * mean * mean / (mean - 1) : 1;
    asked = std::ceil(std::max(mean * (1 + far * of.cv), needed));
  }
  return static_cast<std::uint64_t>(std::clamp(asked, 1.0, room));
}

// Densities of few digits do not fit together exactly: what differs by less is meant to be equal.
std::uint64_t snapped(std::uint64_t count, std::uint64_t to) {
  const double difference = std::abs(static_cast<double>(count) - static_cast<double>(to));
  return difference <= 1e-4 * static_cast<double>(to) ? to : count;
}

Expected<tensor::Request> coordinates_request(const GenFlags& flags) {
  if (!flags.like.empty()) {
    DYNMO_ASSIGN(const Json json, read_json(flags.like));
    DYNMO_ASSIGN(const tensor::Features features,
                 tensor::parse_features(json, flags.like.string()));
    DYNMO_ASSIGN(tensor::Request request, tensor::request_like(features));
    if (!flags.scale.empty()) {
      return make_error(
          ErrorCode::kBadInput,
          "--scale changes --counts and --costs; features of coordinates are generated "
          "at their own size");
    }
    request.seed = flags.seed;
    return request;
  }
  if (flags.sizes.size() < 2) {
    return make_error(ErrorCode::kBadInput,
                      "--sizes has {} numbers, wanted one for each of at "
                      "least 2 modes, or --like FEATURES.json",
                      flags.sizes.size());
  }
  double slices = 1;
  for (std::size_t m = 0; m + 2 < flags.sizes.size(); ++m) {
    slices *= static_cast<double>(flags.sizes[m]);
  }
  const double fibers = slices * static_cast<double>(flags.sizes[flags.sizes.size() - 2]);
  tensor::Request request{.sizes = flags.sizes, .seed = flags.seed};
  DYNMO_ASSIGN(request.slices, whole("--slice-density", flags.slice_density, slices));
  DYNMO_ASSIGN(request.fibers, whole("--fiber-density", flags.fiber_density, fibers));
  DYNMO_ASSIGN(request.entries,
               whole("--density", flags.density, fibers * static_cast<double>(flags.sizes.back())));
  request.fibers = snapped(request.fibers, request.slices);
  request.entries = snapped(request.entries, request.fibers);
  if (request.fibers < request.slices || request.entries < request.fibers) {
    return make_error(ErrorCode::kBadInput,
                      "{} slices, {} fibers and {} entries contradict each other: wanted at least "
                      "a fiber a slice and an entry a fiber",
                      request.slices, request.fibers, request.entries);
  }
  request.fibers_cv = flags.fibers_cv;
  request.entries_cv = flags.entries_cv;
  request.fibers_max = largest({.sum = request.fibers,
                                .groups = request.slices,
                                .size = flags.sizes[flags.sizes.size() - 2],
                                .cv = flags.fibers_cv},
                               flags.fibers_imbalance);
  request.entries_max = largest({.sum = request.entries,
                                 .groups = request.fibers,
                                 .size = flags.sizes.back(),
                                 .cv = flags.entries_cv},
                                flags.entries_imbalance);
  // Where all are to be alike, the sum is what fits.
  request.fibers = snapped(request.fibers, request.slices * request.fibers_max);
  request.entries = snapped(request.entries, request.fibers * request.entries_max);
  return request;
}

// A number of --scale and where it goes.
struct Scaled {
  std::string_view name;
  std::int64_t* number;
};

// Takes the sizes over that --scale names. Whether the number of steps has changed: sums over
// another number of steps are spread otherwise.
Expected<bool> scale_sizes(const GenFlags& flags, const std::vector<Scaled>& sizes) {
  bool steps_changed = false;
  for (const std::string& scale : flags.scale) {
    const std::size_t equals = scale.find('=');
    const std::string name = scale.substr(0, equals);
    std::int64_t number = 0;
    const std::string text = equals == std::string::npos ? "" : scale.substr(equals + 1);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    const bool good = error == std::errc() && end == text.data() + text.size() && number >= 1;
    const auto found = std::ranges::find(sizes, name, &Scaled::name);
    if (!good || found == sizes.end()) {
      std::vector<std::string> wanted;
      for (const Scaled& one : sizes) wanted.push_back(fmt::format("{}=N", one.name));
      const std::string last = wanted.back();
      wanted.pop_back();
      return make_error(ErrorCode::kBadInput, "--scale has '{}', wanted {} or {}", scale,
                        fmt::join(wanted, ", "), last);
    }
    steps_changed = steps_changed || (name == "steps" && *found->number != number);
    *found->number = number;
  }
  return steps_changed;
}

Expected<tensor::CountsRequest> counts_request(const GenFlags& flags) {
  tensor::CountsRequest request{.tokens = flags.tokens,
                                .cv = flags.cv,
                                .lasting_cv = flags.lasting_cv,
                                .autocorrelation = flags.autocorrelation};
  if (!flags.like.empty()) {
    DYNMO_ASSIGN(const Json json, read_json(flags.like));
    DYNMO_ASSIGN(const tensor::Features features,
                 tensor::parse_features(json, flags.like.string()));
    DYNMO_ASSIGN(request, tensor::counts_request_like(features));
  } else if (flags.sizes.size() == 3) {
    request.steps = static_cast<std::int64_t>(flags.sizes[0]);
    request.blocks = static_cast<std::int64_t>(flags.sizes[1]);
    request.experts = static_cast<std::int64_t>(flags.sizes[2]);
  } else {
    return make_error(ErrorCode::kBadInput,
                      "--sizes has {} numbers, wanted those of steps, blocks and experts, or "
                      "--like FEATURES.json",
                      flags.sizes.size());
  }
  DYNMO_ASSIGN(const bool steps_changed, scale_sizes(flags, {{"steps", &request.steps},
                                                             {"blocks", &request.blocks},
                                                             {"experts", &request.experts}}));
  if (steps_changed) request.lasting_cv.reset();
  request.seed = flags.seed;
  return request;
}

Expected<tensor::CostsRequest> costs_request(const GenFlags& flags) {
  tensor::CostsRequest request{.step_s = flags.step_s,
                               .cv = flags.cv,
                               .lasting_cv = flags.lasting_cv,
                               .autocorrelation = flags.autocorrelation};
  if (!flags.like.empty()) {
    DYNMO_ASSIGN(const Json json, read_json(flags.like));
    DYNMO_ASSIGN(const tensor::Features features,
                 tensor::parse_features(json, flags.like.string()));
    DYNMO_ASSIGN(request, tensor::costs_request_like(features));
  } else if (flags.sizes.size() == 2) {
    request.steps = static_cast<std::int64_t>(flags.sizes[0]);
    request.layers = static_cast<std::int64_t>(flags.sizes[1]);
  } else {
    return make_error(ErrorCode::kBadInput,
                      "--sizes has {} numbers, wanted those of steps and layers, or --like "
                      "FEATURES.json",
                      flags.sizes.size());
  }
  DYNMO_ASSIGN(const bool steps_changed,
               scale_sizes(flags, {{"steps", &request.steps}, {"layers", &request.layers}}));
  if (steps_changed) request.lasting_cv.reset();
  request.seed = flags.seed;
  return request;
}

Expected<int> run_gen(const GenFlags& flags) {
  // Both say what is wrong before a file is made.
  std::optional<tensor::CountsRequest> counts;
  std::optional<tensor::CostsRequest> costs;
  std::optional<tensor::Request> request;
  if (flags.costs) {
    DYNMO_ASSIGN(costs, costs_request(flags));
  } else if (flags.counts) {
    DYNMO_ASSIGN(counts, counts_request(flags));
  } else {
    DYNMO_ASSIGN(request, coordinates_request(flags));
  }
  std::ofstream file;
  std::uint64_t bytes = 0;
  const auto write = [&](std::string_view text) -> Expected<void> {
    if (!file.is_open()) file.open(flags.out, std::ios::binary);
    file.write(text.data(), static_cast<std::streamsize>(text.size()));
    bytes += text.size();
    if (file.flush()) return {};
    return make_error(ErrorCode::kBadInput, "cannot write '{}': choose another --out or make room",
                      flags.out.string());
  };
  DYNMO_TRY(costs    ? tensor::generate_costs(*costs, write)
            : counts ? tensor::generate_counts(*counts, write)
                     : tensor::generate(*request, write));
  if (costs) {
    fmt::print("{} steps, {} layers, {} of a micro-batch in a step\n", costs->steps, costs->layers,
               format_seconds(costs->step_s));
  } else if (counts) {
    fmt::print("{} steps, {} blocks, {} experts, {} tokens a block in a step\n", counts->steps,
               counts->blocks, counts->experts, counts->tokens);
  } else {
    fmt::print("{} entries in {} fibers of {} slices\n", request->entries, request->fibers,
               request->slices);
  }
  fmt::print("written to {}\n", flags.out.string());
  return 0;
}

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

void add_gen_command(CLI::App& trace, Command& chosen) {
  CLI::App* gen = trace.add_subcommand("gen",
                                       "Write a sparse tensor, counts of experts (--counts) or a "
                                       "load trace (--costs) of given features");
  const auto flags = std::make_shared<GenFlags>();
  const auto option = [&](const char* name, auto& value, const char* text) {
    return gen->add_option(name, value, text);
  };
  option("--out", flags->out, "File to write")->required()->option_text("FILE");
  option("--sizes", flags->sizes, "Sizes of the modes")->expected(1, tensor::kMaxOrder);
  option("--like", flags->like, "Features as `dynmo trace stats --json` prints them")
      ->option_text("FEATURES.json")
      ->excludes("--sizes");
  option("--scale", flags->scale,
         "Other sizes than those of --like: steps=N blocks=N experts=N layers=N")
      ->expected(1, 3);
  option("--density", flags->density, "Share of places with an entry")->capture_default_str();
  option("--fiber-density", flags->fiber_density, "Share of fibers along the last mode with any")
      ->capture_default_str();
  option("--slice-density", flags->slice_density, "Share of slices in the last two modes with any")
      ->capture_default_str();
  option("--fibers-cv", flags->fibers_cv, "Coefficient of variation of fibers a slice")
      ->capture_default_str();
  option("--entries-cv", flags->entries_cv, "Coefficient of variation of entries a fiber")
      ->capture_default_str();
  option("--fibers-imbalance", flags->fibers_imbalance,
         "max / mean - 1 of fibers a slice (absent: four standard deviations)");
  option("--entries-imbalance", flags->entries_imbalance,
         "max / mean - 1 of entries a fiber (absent: four standard deviations)");
  gen->add_flag("--counts", flags->counts,
                "Write tokens by step, block and expert, which moe.counts reads");
  gen->add_flag("--costs", flags->costs, "Write a load trace: seconds by step and layer")
      ->excludes("--counts");
  option("--step-s", flags->step_s,
         "With --costs: seconds of all layers' F, I and W of a micro-batch")
      ->capture_default_str();
  option("--tokens", flags->tokens, "With --counts: tokens of a block in a step")
      ->capture_default_str();
  option("--cv", flags->cv, "With --counts, --costs: coefficient of variation of all of them")
      ->capture_default_str();
  option("--lasting-cv", flags->lasting_cv,
         "With --counts, --costs: that of the sums over all steps (absent: as drift leaves it)");
  option("--autocorrelation", flags->autocorrelation,
         "With --counts, --costs: of one in a step and the next")
      ->capture_default_str();
  option("--seed", flags->seed, "Another seed, other draws")->capture_default_str();
  run_when_parsed(gen, chosen, flags, run_gen);
}

}  // namespace

void add_features_commands(CLI::App& trace, Command& chosen) {
  add_stats_command(trace, chosen);
  add_gen_command(trace, chosen);
}

}  // namespace dynmo::app
