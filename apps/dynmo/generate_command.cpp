// SPDX-License-Identifier: Apache-2.0
#include "apps/dynmo/generate_command.h"

#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>

#include "dynmo/checkpoint/safetensors.h"
#include "dynmo/data/tokenizer.h"
#include "dynmo/data/utf8.h"
#include "dynmo/train/trained_model.h"

namespace dynmo::app {
namespace {

struct GenerateFlags {
  std::string path;
  std::optional<std::string> prompt;
  std::vector<std::int64_t> prompt_tokens;
  std::string scores;
  std::string tokenizer;
  train::Sampling sampling;
};

// Tokens in and out, for models whose tokenizer is somewhere else.
Expected<int> continue_tokens(const train::TrainedModel& model, const GenerateFlags& flags) {
  DYNMO_ASSIGN(const auto made, train::generate(model, flags.prompt_tokens, flags.sampling));
  fmt::print("{}\n", fmt::join(made, " "));
  if (flags.scores.empty()) return 0;
  std::vector<std::int64_t> all = flags.prompt_tokens;
  all.insert(all.end(), made.begin(), made.end());
  DYNMO_ASSIGN(const at::Tensor logits, train::logits(model, all));
  const auto bytes = [](const auto* data, std::size_t count) {
    return std::as_bytes(std::span(data, count));
  };
  const std::vector<checkpoint::TensorView> tensors = {
      {.name = "logits",
       .dtype = checkpoint::DType::kF32,
       .shape = {logits.size(0), logits.size(1)},
       .bytes = bytes(logits.const_data_ptr<float>(), static_cast<std::size_t>(logits.numel()))},
      {.name = "tokens",
       .dtype = checkpoint::DType::kI64,
       .shape = {std::ssize(all)},
       .bytes = bytes(all.data(), all.size())}};
  DYNMO_TRY(checkpoint::write_safetensors(flags.scores, tensors));
  return 0;
}

Expected<int> run_generate(const GenerateFlags& flags) {
  if (flags.prompt.has_value() == !flags.prompt_tokens.empty()) {
    return make_error(ErrorCode::kBadInput,
                      "wanted one of --prompt TEXT and --prompt-tokens 1,2,...");
  }
  if (!flags.scores.empty() && flags.prompt) {
    return make_error(ErrorCode::kBadInput,
                      "--scores with --prompt: wanted --prompt-tokens 1,2,... beside it");
  }
  DYNMO_ASSIGN(const train::TrainedModel model, train::open_trained(flags.path));
  for (const std::string& note : model.notes) fmt::print(stderr, "dynmo: {}\n", note);
  if (!flags.prompt) return continue_tokens(model, flags);
  DYNMO_ASSIGN(const auto tokenizer, train::tokenizer_of(model, flags.tokenizer));
  std::vector<std::int32_t> prompt;
  tokenizer->encode(*flags.prompt, prompt);
  train::Sampling sampling = flags.sampling;
  sampling.end = tokenizer->end_of_document();
  // Written as it is made, character by character: a token may be a part of one.
  std::string waiting = *flags.prompt;  // printed once it is sure that something follows
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
  command->add_option("--prompt", flags->prompt, "Text to continue");
  command
      ->add_option("--prompt-tokens", flags->prompt_tokens,
                   "Instead: token ids to continue; ids are printed")
      ->delimiter(',')
      ->check([](const std::string& text) {
        return text.empty() ? std::string("an empty token, wanted whole numbers such as 5,17")
                            : std::string();
      });
  command
      ->add_option("--scores", flags->scores,
                   "With --prompt-tokens: safetensors file to write the scores behind every "
                   "token to")
      ->option_text("FILE");
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
  command->add_option("--seed", flags->sampling.seed, "Of the draws")
      ->check(not_negative)
      ->capture_default_str();
  command->callback([flags, &chosen] { chosen = [flags] { return run_generate(*flags); }; });
}

}  // namespace dynmo::app
