// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cctype>
#include <memory>

#include "apps/dynmo/command.h"
#include "apps/dynmo/terminal.h"
#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/core/allowed.h"
#include "dynmo/core/shell.h"
#include "dynmo/core/toml.h"
#include "dynmo/core/units.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/weights/export.h"

namespace dynmo::app {
namespace {

struct CheckpointFlags {
  std::string path;
  std::string out;
  bool overwrite = false;
  std::string dtype = "fp32";
  std::string shard_size = "50GB";
};

Expected<int> inspect(const CheckpointFlags& flags) {
  std::vector<Error> passed;
  DYNMO_ASSIGN(const checkpoint::VerifiedCheckpoint found,
               checkpoint::find_checkpoint(flags.path, &passed));
  for (const Error& error : passed) fmt::print("ignored: {}\n", error.message);
  const checkpoint::Manifest& manifest = found.manifest;
  Bytes total;
  for (const auto& entry : manifest.files) total += entry.bytes;
  fmt::print("checkpoint {}\nstep       {}\nlayers     {}, {}\n", found.path.string(),
             manifest.step, manifest.files.size(), format_bytes(total));
  if (manifest.state.contains("plan")) {
    Json plan = manifest.state["plan"];
    plan.erase("order");  // an action for every stage and micro-batch
    fmt::print("plan       {}\n", plan.dump());
  }
  for (const auto& entry : manifest.files) {
    DYNMO_ASSIGN(const auto file, checkpoint::read_layer(found, entry.layer));
    for (const auto& tensor : file.tensors()) {
      fmt::print("{:5}  {:4} {:>16}  {}\n", entry.layer.value, checkpoint::name(tensor.dtype),
                 fmt::format("[{}]", fmt::join(tensor.shape, ", ")), tensor.name);
    }
  }
  return 0;
}

// Reports the damaged checkpoints of a run that are newer than the newest valid one, and then that
// one.
Expected<int> verify(const CheckpointFlags& flags) {
  std::vector<Error> passed;
  DYNMO_ASSIGN(const checkpoint::VerifiedCheckpoint found,
               checkpoint::find_checkpoint(flags.path, &passed));
  for (const Error& error : passed) fmt::print("DAMAGED: {}\n", error.message);
  fmt::print("{}: step {}, {} files, all digests match\n", found.path.string(), found.manifest.step,
             found.manifest.files.size());
  return 0;
}

Expected<weights::ExportOptions> export_options(const CheckpointFlags& flags) {
  DYNMO_TRY(check_allowed("--dtype", flags.dtype, Names{"fp32", "bf16"}));
  const auto size = parse_bytes(flags.shard_size);
  if (!size) return make_error(ErrorCode::kBadInput, "--shard-size: {}", size.error().message);
  if (*size <= Bytes{0}) {
    return make_error(ErrorCode::kBadInput, "--shard-size is {}, wanted more than 0, such as 5GB",
                      flags.shard_size);
  }
  return weights::ExportOptions{
      .overwrite = flags.overwrite,
      .dtype = flags.dtype == "bf16" ? checkpoint::DType::kBF16 : checkpoint::DType::kF32,
      .shard_bytes = *size};
}

Expected<int> export_hf(const CheckpointFlags& flags) {
  DYNMO_ASSIGN(const weights::ExportOptions options, export_options(flags));
  if (!flags.overwrite) {  // fails before the weights are read
    const auto free = weights::check_export_folder(flags.out);
    if (!free) return make_error(free.error().code, "{} (--overwrite)", free.error().message);
  }
  DYNMO_ASSIGN(const weights::TrainedModel model, weights::open_trained(flags.path));
  for (const std::string& note : model.notes) print_note("{}", note);
  DYNMO_ASSIGN(std::vector<std::string> files,
               weights::export_hugging_face(model, flags.out, options));
  const auto tokenizer = weights::export_tokenizer(model, flags.out);
  if (!tokenizer) print_note("no tokenizer is exported: {}", tokenizer.error().message);
  if (tokenizer) files.insert(files.end(), tokenizer->begin(), tokenizer->end());
  fmt::print("{}: {} of step {}\n", flags.out, fmt::join(files, ", "), model.step);
  return 0;
}

// Returns a string as a value of --set. It is in quotes if TOML could read it as another type, such
// as a number.
std::string setting_text(std::string text) {
  const bool plain = !text.empty() && (std::isalpha(static_cast<unsigned char>(text[0])) != 0 ||
                                       text[0] == '/' || text[0] == '.');
  const bool word = text == "true" || text == "false" || text == "inf" || text == "nan";
  return plain && !word ? text : toml_value(&text);
}

Expected<int> import_hf(const CheckpointFlags& flags) {
  DYNMO_ASSIGN(const std::string left_out, weights::import_hugging_face(flags.path, flags.out));
  fmt::print(
      "{}: a checkpoint of step 0 and config.toml; train on with: dynmo train --config {} --set {} "
      "--data FOLDER --out RUN\n",
      flags.out, shell_quote(observe::RunFolder(flags.out).config().string()),
      shell_quote("train.init=" + setting_text(flags.out)));
  if (!left_out.empty()) fmt::print("{}\n", left_out);
  return 0;
}

}  // namespace

void add_checkpoint_command(CLI::App& app, Command& chosen) {
  CLI::App* command = app.add_subcommand(kCheckpointCommand.name, kCheckpointCommand.summary);
  command->require_subcommand(1);
  const auto flags = std::make_shared<CheckpointFlags>();
  const auto add = [&](const char* name, const char* summary, auto run) {
    CLI::App* sub = command->add_subcommand(name, summary);
    run_when_parsed(sub, chosen, flags, run);
    return sub;
  };
  const auto add_for_run = [&](const char* name, const char* summary, auto run) {
    CLI::App* sub = add(name, summary, run);
    sub->add_option("path", flags->path, "Folder of a run or of a checkpoint")->required();
    return sub;
  };
  add_for_run("inspect", "Print step, plan and tensors", inspect);
  add_for_run("verify", "Read every file and compare its digest", verify);
  CLI::App* hugging_face =
      add_for_run("export-hf", "Write a folder that Hugging Face's transformers reads", export_hf);
  hugging_face->add_option("--out", flags->out, "Folder to write: new or empty")->required();
  hugging_face->add_flag("--overwrite", flags->overwrite,
                         "Replace the model's files in a folder that is there");
  hugging_face->add_option("--dtype", flags->dtype, "Of the weights: fp32 or bf16")
      ->capture_default_str();
  hugging_face
      ->add_option("--shard-size", flags->shard_size, "At most so many bytes of weights in a file")
      ->capture_default_str();
  CLI::App* import =
      add("import-hf", "Make a run's folder of a model that Hugging Face's transformers saved",
          import_hf);
  import->add_option("directory", flags->path, "Folder of config.json and safetensors")->required();
  import->add_option("run", flags->out, "Folder to make")->required();
}

}  // namespace dynmo::app
