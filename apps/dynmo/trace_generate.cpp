// SPDX-License-Identifier: Apache-2.0
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
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "apps/dynmo/command.h"
#include "dynmo/core/effects.h"
#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/core/units.h"
#include "dynmo/tensor/features.h"
#include "dynmo/tensor/generate.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::app {
namespace {

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
  std::set<std::string> given;  // names of the flags that were given
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

// Checks the flags of --sizes without --counts or --costs that are compared with nothing else.
Expected<void> check_spreads(const GenFlags& flags) {
  for (const auto& [flag, value] :
       {std::pair("--fibers-cv", flags.fibers_cv), std::pair("--entries-cv", flags.entries_cv),
        std::pair("--fibers-imbalance", flags.fibers_imbalance.value_or(0)),
        std::pair("--entries-imbalance", flags.entries_imbalance.value_or(0))}) {
    if (value >= 0 && std::isfinite(value)) continue;
    return make_error(ErrorCode::kBadInput, "{} is {}, wanted a number of at least 0", flag, value);
  }
  return {};
}

struct Groups {
  std::uint64_t sum = 0;
  std::uint64_t groups = 0;
  std::uint64_t size = 0;  // maximum of one
  double cv = 0;
};

// Returns the largest number of a group, mean (1 + imbalance). Without an imbalance it is four
// standard deviations above the mean, or more if the coefficient of variation needs it. It is at
// most `size`.
std::uint64_t largest(const Groups& of, std::optional<double> imbalance) {
  const double mean = static_cast<double>(of.sum) / static_cast<double>(of.groups);
  const double room = static_cast<double>(std::min(of.size, of.sum - of.groups + 1));
  double asked = 0;
  if (imbalance) {
    asked = std::round(mean * (1 + *imbalance));
  } else {
    // One of n values is at most sqrt(n - 1) standard deviations above the mean.
    const double far = std::min(4.0, 0.9 * std::sqrt(static_cast<double>(of.groups)));
    const double needed = mean > 1 ? mean + 2 * of.cv * of.cv * mean * mean / (mean - 1) : 1;
    asked = std::ceil(std::max(mean * (1 + far * of.cv), needed));
  }
  return static_cast<std::uint64_t>(std::clamp(asked, 1.0, room));
}

// Returns `to` if `count` is nearly equal. Densities have few digits, so counts that should be
// equal differ a little.
std::uint64_t snapped(std::uint64_t count, std::uint64_t to) {
  const double difference = std::abs(static_cast<double>(count) - static_cast<double>(to));
  return difference <= 1e-4 * static_cast<double>(to) ? to : count;
}

// Returns `count`, corrected if it is about one thing in each of `groups`. The number of groups
// with two decides the spread, but the densities have too few digits for it. So it follows from
// `cv` if snapped() permits.
std::uint64_t fitted(std::uint64_t count, std::uint64_t groups, double cv) {
  const auto ones = static_cast<double>(groups);
  if (snapped(count, groups) != groups) return count;
  // A share p of groups with two has cv^2 = p (1 - p) / (1 + p)^2.
  double share = 0;
  for (int i = 0; i < 8 && share < 0.5; ++i) {
    share = cv * cv * (1 + share) * (1 + share) / (1 - share);
  }
  if (!(share < 1e-4)) return snapped(count, groups);
  return groups + static_cast<std::uint64_t>(std::llround(share * ones));
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
  DYNMO_TRY(check_spreads(flags));
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
  request.fibers = fitted(request.fibers, request.slices, flags.fibers_cv);
  request.entries = fitted(request.entries, request.fibers, flags.entries_cv);
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
  // If all slices must be equal, their sum is the product.
  request.fibers = snapped(request.fibers, request.slices * request.fibers_max);
  request.entries = snapped(request.entries, request.fibers * request.entries_max);
  return request;
}

// A number of --scale and its field.
struct Scaled {
  std::string_view name;
  std::int64_t* number;
};

// Sets the sizes that --scale names.
Expected<void> scale_sizes(const GenFlags& flags, const std::vector<Scaled>& sizes) {
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
    *found->number = number;
  }
  return {};
}

// Fills in the sizes of a request, or all that --like gives.
template <typename Request>
Expected<void> complete(const GenFlags& flags, std::string_view modes,
                        const std::vector<std::int64_t*>& sizes,
                        Expected<Request> (*like)(const tensor::Features&), Request& request) {
  if (!flags.like.empty()) {
    DYNMO_ASSIGN(const Json json, read_json(flags.like));
    DYNMO_ASSIGN(const tensor::Features features,
                 tensor::parse_features(json, flags.like.string()));
    DYNMO_ASSIGN(request, like(features));
  } else if (flags.sizes.size() == sizes.size()) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      *sizes[i] = static_cast<std::int64_t>(flags.sizes[i]);
    }
  } else {
    return make_error(ErrorCode::kBadInput,
                      "--sizes has {} numbers, wanted those of {}, or --like FEATURES.json",
                      flags.sizes.size(), modes);
  }
  request.seed = flags.seed;
  return {};
}

Expected<tensor::CountsRequest> counts_request(const GenFlags& flags) {
  tensor::CountsRequest request{.tokens = flags.tokens,
                                .cv = flags.cv,
                                .lasting_cv = flags.lasting_cv,
                                .autocorrelation = flags.autocorrelation};
  DYNMO_TRY(complete(flags, "steps, blocks and experts",
                     {&request.steps, &request.blocks, &request.experts},
                     tensor::counts_request_like, request));
  tensor::CountsRequest scaled = request;
  DYNMO_TRY(scale_sizes(
      flags, {{"steps", &scaled.steps}, {"blocks", &scaled.blocks}, {"experts", &scaled.experts}}));
  if (flags.like.empty()) return scaled;
  return tensor::resized(request, scaled.steps, scaled.blocks, scaled.experts);
}

Expected<tensor::CostsRequest> costs_request(const GenFlags& flags) {
  tensor::CostsRequest request{.step_s = flags.step_s,
                               .cv = flags.cv,
                               .lasting_cv = flags.lasting_cv,
                               .autocorrelation = flags.autocorrelation};
  DYNMO_TRY(complete(flags, "steps and layers", {&request.steps, &request.layers},
                     tensor::costs_request_like, request));
  tensor::CostsRequest scaled = request;
  DYNMO_TRY(scale_sizes(flags, {{"steps", &scaled.steps}, {"layers", &scaled.layers}}));
  if (flags.like.empty()) return scaled;
  return tensor::resized(request, scaled.steps, scaled.layers);
}

// Refuses features of another kind of file, and those that --like already gives.
Expected<void> check_kind(const GenFlags& flags) {
  const bool alike = !flags.like.empty();
  const auto check = [&](std::initializer_list<std::string_view> names, bool acts,
                         std::string_view wanted) -> Expected<void> {
    for (const std::string_view name : names) {
      DYNMO_TRY(check_flags({{name, flags.given.contains(std::string(name)), acts, wanted}}));
    }
    return {};
  };
  DYNMO_TRY(check({"--density", "--fiber-density", "--slice-density", "--fibers-cv", "--entries-cv",
                   "--fibers-imbalance", "--entries-imbalance"},
                  !alike && !flags.counts && !flags.costs, "no --counts, --costs or --like"));
  DYNMO_TRY(check({"--slice-density"}, flags.sizes.size() > 2, "three of --sizes or more"));
  DYNMO_TRY(check({"--scale"}, flags.counts || flags.costs || alike, "--counts or --costs"));
  DYNMO_TRY(check({"--step-s"}, flags.costs && !alike, "--costs and no --like"));
  DYNMO_TRY(check({"--tokens"}, flags.counts && !alike, "--counts and no --like"));
  return check({"--cv", "--lasting-cv", "--autocorrelation"},
               (flags.counts || flags.costs) && !alike, "--counts or --costs and no --like");
}

Expected<int> run_gen(const GenFlags& flags) {
  DYNMO_TRY(check_kind(flags));
  DYNMO_TRY(check_one_use({{"--like", flags.like.string()}, {"--out", flags.out.string()}}));
  // Both requests are checked before a file is written.
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

}  // namespace

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
  gen->callback([gen, flags, &chosen] {
    for (const CLI::Option* one : gen->get_options()) {
      if (one->count() > 0) flags->given.insert(one->get_name());
    }
    chosen = [flags] { return run_gen(*flags); };
  });
}

}  // namespace dynmo::app
