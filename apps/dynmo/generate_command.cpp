// SPDX-License-Identifier: Apache-2.0
#include "apps/dynmo/generate_command.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "dynmo/data/tokenizer.h"
#include "dynmo/data/utf8.h"
#include "dynmo/train/trained_model.h"

namespace dynmo::app {
namespace {

struct GenerateFlags {
  std::string path;
  std::string prompt;
  std::string tokenizer;
  train::Sampling sampling;
};

Expected<int> run_generate(const GenerateFlags& flags) {
  DYNMO_ASSIGN(const train::TrainedModel model, train::open_trained(flags.path));
  DYNMO_ASSIGN(const auto tokenizer, train::tokenizer_of(model, flags.tokenizer));
  std::vector<std::int32_t> prompt;
  tokenizer->encode(flags.prompt, prompt);
  train::Sampling sampling = flags.sampling;
  sampling.end = tokenizer->end_of_document();
  // Written as it is made, character by character: a token may be a part of one.
  std::string waiting = flags.prompt;  // printed once it is sure that something follows
  const auto print = [&](std::string_view text) {
    waiting += text;
    std::fwrite(waiting.data(), 1, waiting.size(), stdout);
    std::fflush(stdout);
    waiting.clear();
  };
  data::WholeCharacters characters;
  DYNMO_TRY(
      train::generate(model, {prompt.begin(), prompt.end()}, sampling, [&](std::int64_t token) {
        print(characters.feed(tokenizer->text_of(static_cast<std::int32_t>(token))));
      }));
  print(characters.finish() + "\n");
  return 0;
}

}  // namespace

void add_generate_command(CLI::App& app, Command& chosen) {
  CLI::App* command = app.add_subcommand("generate", "Continue a text with a trained model");
  const auto flags = std::make_shared<GenerateFlags>();
  command->add_option("model", flags->path, "Folder of a run or of a checkpoint")->required();
  command->add_option("--prompt", flags->prompt, "Text to continue")->required();
  command->add_option("--tokenizer", flags->tokenizer,
                      "Prepared folder or SentencePiece model; default: that of the run's data");
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
