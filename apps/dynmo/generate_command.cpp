// SPDX-License-Identifier: Apache-2.0
#include "apps/dynmo/generate_command.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "dynmo/data/tokenizer.h"
#include "dynmo/train/trained_model.h"

namespace dynmo::app {
namespace {

struct GenerateFlags {
  std::string path;
  std::string prompt;
  train::Sampling sampling;
};

Expected<int> run_generate(const GenerateFlags& flags) {
  DYNMO_ASSIGN(const train::TrainedModel model, train::open_trained(flags.path));
  if (model.config.vocabulary != data::kByteVocabulary) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' has a vocabulary of {}, wanted {}: only models of bytes can be given "
                      "text so far",
                      model.checkpoint.string(), model.config.vocabulary, data::kByteVocabulary);
  }
  std::vector<std::uint16_t> bytes;
  data::encode_bytes(flags.prompt, bytes);
  train::Sampling sampling = flags.sampling;
  sampling.end = data::kEndOfDocument;
  // Written byte by byte as it is made: a character of several bytes comes out whole in the end.
  std::string waiting = flags.prompt;  // printed once it is sure that something follows
  const auto print = [&](std::string_view text) {
    waiting += text;
    std::fwrite(waiting.data(), 1, waiting.size(), stdout);
    std::fflush(stdout);
    waiting.clear();
  };
  DYNMO_TRY(train::generate(model, {bytes.begin(), bytes.end()}, sampling, [&](std::int64_t token) {
    print(std::string(1, static_cast<char>(token)));
  }));
  print("\n");
  return 0;
}

}  // namespace

void add_generate_command(CLI::App& app, Command& chosen) {
  CLI::App* command = app.add_subcommand("generate", "Continue a text with a trained model");
  const auto flags = std::make_shared<GenerateFlags>();
  command->add_option("model", flags->path, "Folder of a run or of a checkpoint")->required();
  command->add_option("--prompt", flags->prompt, "Text to continue")->required();
  command->add_option("--tokens", flags->sampling.tokens, "Tokens to make at most")
      ->capture_default_str();
  command
      ->add_option("--temperature", flags->sampling.temperature,
                   "0: the likeliest token each time; otherwise tokens are drawn")
      ->capture_default_str();
  command
      ->add_option("--top-p", flags->sampling.top_p,
                   "Draw from the likeliest tokens whose probabilities sum to this")
      ->capture_default_str();
  command->add_option("--seed", flags->sampling.seed, "Of the draws")->capture_default_str();
  command->callback([flags, &chosen] { chosen = [flags] { return run_generate(*flags); }; });
}

}  // namespace dynmo::app
