// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "apps/dynmo/command.h"
#include "dynmo/core/effects.h"
#include "dynmo/core/files.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/files.h"
#include "dynmo/data/text_stream.h"
#include "dynmo/observe/import/trace_import.h"
#include "dynmo/plan/question/asked.h"

namespace dynmo::app {
namespace {

struct ImportFlags {
  std::vector<std::filesystem::path> traces;
  std::filesystem::path out;
  std::optional<std::int64_t> boundary_bytes;
  std::vector<int> blocks;
  plan::Asked asked;  // the model, and what its costs depend on
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
  if (!import.sharing.empty()) fmt::print("{}\n", import.sharing);
  if (import.overlapped > 0) {
    fmt::print("{} ranges of two actions at once are left out\n", import.overlapped);
  }
  if (import.unclaimed_s > 0) {
    fmt::print("{} of the backward pass belong to no layer and are left out\n",
               format_seconds(import.unclaimed_s));
  }
  fmt::print("written to {}\n", out.string());
}

Expected<void> check_files(const ImportFlags& flags) {
  std::vector<UsedFile> files;
  for (const std::filesystem::path& trace : flags.traces) {
    files.push_back({"TRACE", trace.string()});
  }
  files.push_back({"--model", flags.asked.model.value_or("")});
  files.push_back({"--out", flags.out.string()});
  return check_one_use(files);
}

Expected<void> check_numbers(const ImportFlags& flags) {
  const std::int64_t boundary = flags.boundary_bytes.value_or(0);
  if (boundary < 0 || Bytes{boundary} > cost::kMaxBytes) {
    return make_error(ErrorCode::kBadInput, "--boundary-bytes is {}, wanted 0 to {}", boundary,
                      cost::kMaxBytes.value);
  }
  const plan::Asked& asked = flags.asked;
  const bool model = asked.model.has_value();
  return check_flags(
      {{"--device", asked.device.has_value(), model, "--model"},
       {"--sequence", asked.sequence.has_value(), model, "--model"},
       {"--micro-batch-size", asked.micro_batch_size.has_value(), model, "--model"}});
}

Expected<observe::StageLayers> stage_layers(const ImportFlags& flags) {
  observe::StageLayers layers;
  layers.blocks = flags.blocks;
  if (!flags.asked.model) return layers;
  DYNMO_ASSIGN(layers.formulas, plan::costs_of(flags.asked, plan::Spelling::kFlag));
  layers.formulas_of = *flags.asked.model;
  return layers;
}

// Opens a trace as the profiler writes it, with or without compression.
Expected<observe::ReadTrace> open_trace(const std::filesystem::path& path) {
  DYNMO_ASSIGN(data::TextStream opened, data::TextStream::open(path));
  const auto stream = std::make_shared<data::TextStream>(std::move(opened));
  return observe::ReadTrace([stream](std::span<char> out) { return stream->read(out); });
}

Expected<int> run_import(const ImportFlags& flags) {
  DYNMO_TRY(check_numbers(flags));
  DYNMO_TRY(check_files(flags));
  DYNMO_ASSIGN(const observe::StageLayers layers, stage_layers(flags));
  DYNMO_ASSIGN(observe::TraceImport import, observe::read_traces(flags.traces, layers, open_trace));
  if (flags.boundary_bytes) {
    for (cost::LayerCost& layer : import.model.layers) {
      layer.boundary_bytes = Bytes{*flags.boundary_bytes};
    }
    import.model.layers.back().boundary_bytes = Bytes{0};  // the last sends nothing
  }
  DYNMO_TRY(write_file_durably(flags.out, cost::profile_json(import.model).dump(1) + "\n"));
  print_summary(import, flags.out);
  return 0;
}

void add_import_command(CLI::App& trace, Command& chosen) {
  CLI::App* import =
      trace.add_subcommand("import", "Make a profile from traces of PyTorch's profiler");
  const auto flags = std::make_shared<ImportFlags>();
  import
      ->add_option("trace", flags->traces,
                   "Traces of all ranks: of a pipeline of torch.distributed.pipelining or "
                   "torchtitan, or with each layer's forward in record_function(\"NAME.forward\")")
      ->required()
      ->option_text("TRACE.json[.gz]...");
  import->add_option("--out", flags->out, "Profile to write")
      ->required()
      ->option_text("PROFILE.json");
  import
      ->add_option("--blocks", flags->blocks,
                   "Blocks of each stage of the pipeline, such as 7,8,8,7; a trace does not hold "
                   "them")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->option_text("N,N,...");
  import
      ->add_option("--model", flags->asked.model,
                   "A Hugging Face config.json or its folder: layers get shares of a stage's time "
                   "by its formulas, and their bytes")
      ->option_text("CONFIG.json");
  import->add_option("--device", flags->asked.device, "What the formulas are for, such as h100");
  import->add_option("--sequence", flags->asked.sequence, "Tokens of a sequence, with --model");
  import->add_option("--micro-batch-size", flags->asked.micro_batch_size,
                     "Sequences of a micro-batch, with --model; default 1");
  import->add_option("--boundary-bytes", flags->boundary_bytes,
                     "Bytes a layer sends to the next, one micro-batch (tokens x hidden x 2 in "
                     "bfloat16); default those of --model, else 0");
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
