// SPDX-License-Identifier: Apache-2.0
#include "apps/dynmo/checkpoint_command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/train/trained_model.h"

namespace dynmo::app {
namespace {

namespace fs = std::filesystem;

Expected<int> inspect(const fs::path& path) {
  std::vector<Error> passed;
  DYNMO_ASSIGN(const checkpoint::VerifiedCheckpoint found,
               checkpoint::find_checkpoint(path, &passed));
  for (const Error& error : passed) fmt::print("passed over: {}\n", error.message);
  const checkpoint::Manifest& manifest = found.manifest;
  Bytes total;
  for (const auto& entry : manifest.files) total += entry.bytes;
  fmt::print("checkpoint {}\nstep       {}\nlayers     {}, {}\n", found.path.string(),
             manifest.step, manifest.files.size(), format_bytes(total));
  if (manifest.state.contains("plan")) fmt::print("plan       {}\n", manifest.state["plan"].dump());
  for (const auto& entry : manifest.files) {
    DYNMO_ASSIGN(const auto file, checkpoint::read_layer(found, entry.layer));
    for (const auto& tensor : file.tensors()) {
      fmt::print("{:5}  {:4} {:>16}  {}\n", entry.layer.value, checkpoint::name(tensor.dtype),
                 fmt::format("[{}]", fmt::join(tensor.shape, ", ")), tensor.name);
    }
  }
  return 0;
}

// Those of a run that are damaged and newer than the one that verifies, then that one.
Expected<int> verify(const fs::path& path) {
  std::vector<Error> passed;
  DYNMO_ASSIGN(const checkpoint::VerifiedCheckpoint found,
               checkpoint::find_checkpoint(path, &passed));
  for (const Error& error : passed) fmt::print("DAMAGED: {}\n", error.message);
  fmt::print("{}: step {}, {} files, all digests match\n", found.path.string(), found.manifest.step,
             found.manifest.files.size());
  return 0;
}

Expected<int> export_hf(const fs::path& path, const fs::path& out) {
  DYNMO_ASSIGN(const train::TrainedModel model, train::open_trained(path));
  for (const std::string& note : model.notes) fmt::print(stderr, "dynmo: {}\n", note);
  DYNMO_TRY(train::export_hugging_face(model, out));
  fmt::print("{}: model.safetensors and config.json of step {}\n", out.string(), model.step);
  return 0;
}

Expected<int> import_hf(const fs::path& directory, const fs::path& run) {
  DYNMO_ASSIGN(const std::string left_out, train::import_hugging_face(directory, run));
  fmt::print(
      "{0}: a checkpoint of step 0 and config.toml; train on with `dynmo train --config "
      "{0}/config.toml --set train.init={0} --data FOLDER --out RUN`\n",
      run.string());
  if (!left_out.empty()) fmt::print("{}\n", left_out);
  return 0;
}

}  // namespace

void add_checkpoint_command(CLI::App& app, Command& chosen) {
  CLI::App* command = app.add_subcommand("checkpoint", "Look at, check or hand on checkpoints");
  command->require_subcommand(1);
  const auto path = std::make_shared<std::string>();
  const auto out = std::make_shared<std::string>();
  const auto add = [&](const char* name, const char* what) {
    CLI::App* sub = command->add_subcommand(name, what);
    sub->add_option("path", *path, "Folder of a run or of a checkpoint")->required();
    return sub;
  };
  add("inspect", "Print step, plan and tensors")->callback([path, &chosen] {
    chosen = [path] { return inspect(*path); };
  });
  add("verify", "Read every file and compare its digest")->callback([path, &chosen] {
    chosen = [path] { return verify(*path); };
  });
  CLI::App* hugging_face =
      add("export-hf", "Write a folder that Hugging Face's transformers reads");
  hugging_face->add_option("--out", *out, "Folder to write")->required();
  hugging_face->callback(
      [path, out, &chosen] { chosen = [path, out] { return export_hf(*path, *out); }; });
  CLI::App* import = command->add_subcommand(
      "import-hf", "Make a run's folder of a model that Hugging Face's transformers saved");
  import->add_option("directory", *path, "Folder of config.json and safetensors")->required();
  import->add_option("run", *out, "Folder to make")->required();
  import->callback(
      [path, out, &chosen] { chosen = [path, out] { return import_hf(*path, *out);
};
}  // namespace dynmo::app
);
}

}  // namespace dynmo::app
