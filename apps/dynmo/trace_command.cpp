// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>

#include "apps/dynmo/command.h"
#include "dynmo/core/files.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/files.h"
#include "dynmo/observe/trace_import.h"

namespace dynmo::app {
namespace {

struct ImportFlags {
  std::filesystem::path trace;
  std::filesystem::path out;
  std::int64_t boundary_bytes = 0;
};

void print_summary(const observe::TraceImport& import, const std::filesystem::path& out) {
  std::size_t width = 5;
  for (const cost::LayerCost& layer : import.model.layers) {
    width = std::max(width, layer.name.size());
  }
  fmt::print("{:<{}}  {:>10}  {:>10}  {:>10}\n", "layer", width, "F", "I", "W");
  for (const cost::LayerCost& layer : import.model.layers) {
    fmt::print("{:<{}}  {:>10}  {:>10}  {:>10}\n", layer.name, width,
               format_seconds(layer.forward_s), format_seconds(layer.backward_input_s),
               format_seconds(layer.backward_weight_s));
  }
  fmt::print("medians of {} micro-batches, of {}\n", import.micro_batches,
             import.device_times ? "device kernels" : "the CPU's operations");
  if (import.unclaimed_s > 0) {
    fmt::print("{} of the backward pass belong to no layer and are left out\n",
               format_seconds(import.unclaimed_s));
  }
  fmt::print("written to {}\n", out.string());
}

Expected<int> run_import(const ImportFlags& flags) {
  if (flags.boundary_bytes < 0 || Bytes{flags.boundary_bytes} > cost::kMaxBytes) {
    return make_error(ErrorCode::kBadInput, "--boundary-bytes is {}, wanted 0 to {}",
                      flags.boundary_bytes, cost::kMaxBytes.value);
  }
  DYNMO_TRY(check_one_use({{"TRACE", flags.trace.string()}, {"--out", flags.out.string()}}));
  DYNMO_ASSIGN(observe::TraceImport import, observe::read_trace(flags.trace));
  for (cost::LayerCost& layer : import.model.layers) {
    layer.boundary_bytes = Bytes{flags.boundary_bytes};
  }
  import.model.layers.back().boundary_bytes = Bytes{0};  // the last sends nothing
  DYNMO_TRY(write_file_durably(flags.out, cost::profile_json(import.model).dump(1) + "\n"));
  print_summary(import, flags.out);
  return 0;
}

void add_import_command(CLI::App& trace, Command& chosen) {
  CLI::App* import =
      trace.add_subcommand("import", "Make a profile from a trace of PyTorch's profiler");
  const auto flags = std::make_shared<ImportFlags>();
  import
      ->add_option("trace", flags->trace,
                   "Trace with each layer's forward in record_function(\"NAME.forward\")")
      ->required()
      ->option_text("TRACE.json");
  import->add_option("--out", flags->out, "Profile to write")
      ->required()
      ->option_text("PROFILE.json");
  import
      ->add_option("--boundary-bytes", flags->boundary_bytes,
                   "Bytes a layer sends to the next, one micro-batch (tokens x hidden x 2 in "
                   "bfloat16); a trace does not hold them")
      ->capture_default_str();
  run_when_parsed(import, chosen, flags, run_import);
}

}  // namespace

void add_trace_command(CLI::App& app, Command& chosen) {
  CLI::App* trace =
      app.add_subcommand("trace", "Profiles from traces of other tools, features of loads");
  trace->require_subcommand(1);
  add_import_command(*trace, chosen);
  add_stats_command(*trace, chosen);
  add_gen_command(*trace, chosen);
}

}  // namespace dynmo::app
