// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>

#include "apps/dynmo/command.h"
#include "apps/dynmo/terminal.h"
#include "dynmo/checkpoint/safetensors.h"
#include "dynmo/core/effects.h"
#include "dynmo/data/tokenizer.h"
#include "dynmo/data/utf8.h"
#include "dynmo/weights/generate.h"
#include "dynmo/weights/trained_model.h"

namespace dynmo::app {
namespace {

struct GenerateFlags {
  std::string path;
  std::optional<std::string> prompt;
  std::optional<std::string> prompt_tokens;
  std::string scores;
  std::string tokenizer;
  weights::Sampling sampling;
};

// Parses whole numbers with commas between: "5,17".
Expected<std::vector<std::int64_t>> parse_tokens(std::string_view text) {
  std::vector<std::int64_t> tokens;
  for (bool more = true; more;) {
    const std::size_t comma = text.find(',');
    const std::string_view word = text.substr(0, comma);
    more = comma != std::string_view::npos;
    text.remove_prefix(more ? comma + 1 : text.size());
    std::int64_t token = 0;
    const char* end = word.data() + word.size();
    const auto parsed = std::from_chars(word.data(), end, token);
    if (word.starts_with('-') || parsed.ec != std::errc() || parsed.ptr != end) {
      return make_error(ErrorCode::kBadInput,
                        "--prompt-tokens: token {} is '{}', wanted token ids with commas between, "
                        "such as 5,17",
                        tokens.size(), word);
    }
    tokens.push_back(token);
  }
  return tokens;
}

// Checks a generation, and notes a text longer than the longest input before generating it.
Expected<void> check(const weights::TrainedModel& model, const std::vector<std::int64_t>& prompt,
                     const weights::Sampling& sampling) {
  DYNMO_ASSIGN(const std::string note, weights::check_generation(model, prompt, sampling));
  if (!note.empty()) print_note("{}", note);
  return {};
}

// Checks that all tokens fit one input, as their scores need.
Expected<void> check_scores(const weights::TrainedModel& model, std::size_t prompt,
                            const GenerateFlags& flags) {
  const std::int64_t longest = model::shape_of(model.config).sequence;
  const std::int64_t all = static_cast<std::int64_t>(prompt) + flags.sampling.tokens;
  if (flags.scores.empty() || all <= longest) return {};
  return make_error(ErrorCode::kBadInput,
                    "--scores of {} + {} tokens, wanted at most the model's {} in all: fewer "
                    "--prompt-tokens or --tokens",
                    prompt, flags.sampling.tokens, longest);
}

// Continues tokens by tokens, for models whose tokenizer is not at hand.
Expected<int> continue_tokens(const weights::TrainedModel& model,
                              const std::vector<std::int64_t>& prompt, const GenerateFlags& flags) {
  DYNMO_TRY(check_scores(model, prompt.size(), flags));
  DYNMO_TRY(check(model, prompt, flags.sampling));
  DYNMO_ASSIGN(const auto made, weights::generate(model, prompt, flags.sampling));
  fmt::print("{}\n", fmt::join(made, " "));
  if (flags.scores.empty()) return 0;
  std::vector<std::int64_t> all = prompt;
  all.insert(all.end(), made.begin(), made.end());
  DYNMO_ASSIGN(const at::Tensor logits, weights::logits(model, all));
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

Expected<void> check_drawing(const GenerateFlags& flags) {
  const weights::Sampling greedy;
  const bool draws = flags.sampling.temperature != 0;
  constexpr std::string_view kDraws = "a --temperature above 0";
  return check_flags({
      {"--top-p", flags.sampling.top_p != greedy.top_p, draws, kDraws},
      {"--seed", flags.sampling.seed != greedy.seed, draws, kDraws},
      {"--tokenizer", !flags.tokenizer.empty(), flags.prompt.has_value(), "--prompt"},
      {"--scores", !flags.scores.empty(), flags.prompt_tokens.has_value(), "--prompt-tokens"},
  });
}

Expected<int> run_generate(const GenerateFlags& flags) {
  if (flags.prompt.has_value() == flags.prompt_tokens.has_value()) {
    return make_error(ErrorCode::kBadInput,
                      "wanted one of --prompt TEXT and --prompt-tokens 1,2,...");
  }
  DYNMO_TRY(check_drawing(flags));
  std::vector<std::int64_t> tokens;
  if (flags.prompt_tokens) {
    DYNMO_ASSIGN(tokens, parse_tokens(*flags.prompt_tokens));
  }
  DYNMO_ASSIGN(const weights::TrainedModel model, weights::open_trained(flags.path));
  for (const std::string& note : model.notes) print_note("{}", note);
  if (flags.prompt_tokens) return continue_tokens(model, tokens, flags);
  const auto found = weights::tokenizer_of(model, flags.tokenizer);
  if (!found) return make_error(found.error().code, "{} (--tokenizer)", found.error().message);
  const auto& tokenizer = *found;
  std::vector<std::int32_t> ids;
  tokenizer->encode(*flags.prompt, ids);
  const std::vector<std::int64_t> prompt(ids.begin(), ids.end());
  weights::Sampling sampling = flags.sampling;
  sampling.end = tokenizer->end_of_document();
  DYNMO_TRY(check(model, prompt, sampling));
  // Prints whole characters as they are generated, because a token may be a part of one.
  std::string waiting = *flags.prompt;  // printed once it is sure that something follows
  const auto print = [&](std::string_view text) {
    waiting += text;
    std::fwrite(waiting.data(), 1, waiting.size(), stdout);
    std::fflush(stdout);
    waiting.clear();
  };
  data::WholeCharacters characters;
  DYNMO_TRY(weights::generate(model, prompt, sampling, [&](std::int64_t token) {
    print(characters.feed(tokenizer->text_of(static_cast<std::int32_t>(token))));
  }));
  print(characters.finish() + "\n");
  return 0;
}

}  // namespace

void add_generate_command(CLI::App& app, Command& chosen) {
  CLI::App* command = app.add_subcommand(kGenerateCommand.name, kGenerateCommand.summary);
  const auto flags = std::make_shared<GenerateFlags>();
  command->add_option("model", flags->path, "Folder of a run or of a checkpoint")->required();
  command->add_option("--prompt", flags->prompt, "Text to continue");
  command->add_option("--prompt-tokens", flags->prompt_tokens,
                      "Instead: token ids to continue, such as 5,17; ids are printed");
  command
      ->add_option("--scores", flags->scores,
                   "With --prompt-tokens: safetensors file to write the scores after every "
                   "token to")
      ->option_text("FILE");
  command->add_option(
      "--tokenizer", flags->tokenizer,
      "Prepared folder, tokenizer.json or tokenizer.model; default: that of the run's "
      "data");
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
  run_when_parsed(command, chosen, flags, run_generate);
}

}  // namespace dynmo::app
