// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "apps/dynmo/command.h"
#include "apps/dynmo/terminal.h"
#include "dynmo/core/effects.h"
#include "dynmo/core/json.h"
#include "dynmo/core/units.h"
#include "dynmo/data/dataset.h"
#include "dynmo/data/prepare.h"
#include "dynmo/data/token_shards.h"
#include "dynmo/data/utf8.h"

namespace dynmo::app {
namespace {

struct PrepareFlags {
  std::vector<std::filesystem::path> paths;
  data::PrepareOptions options;
  std::optional<std::int32_t> vocabulary;
  std::optional<std::string> algorithm;
  std::string format = "auto";
};

// Shows the step of the preparation, and the time left.
class PrepareLine {
 public:
  void show(const data::PrepareProgress& progress) {
    const auto now = Clock::now();
    const bool begun = progress.phase != phase_;
    if (begun) phase_began_ = now;
    phase_ = progress.phase;
    if (begun || line_.is_due()) line_.show(text_of(progress, now - phase_began_));
  }

 private:
  using Clock = std::chrono::steady_clock;

  static std::string text_of(const data::PrepareProgress& progress, Clock::duration since) {
    using Phase = data::PrepareProgress::Phase;
    if (progress.phase == Phase::kTrain) return "training the tokenizer";
    const double seconds = std::chrono::duration<double>(since).count();
    const double done = static_cast<double>(progress.bytes);
    const double all = static_cast<double>(progress.total_bytes);
    const char* what = progress.phase == Phase::kMeasure   ? "measuring"
                       : progress.phase == Phase::kHoldOut ? "choosing what to hold out"
                       : progress.phase == Phase::kDraw    ? "drawing text"
                                                           : "tokenizing";
    std::string text = fmt::format("{} {:.0f} %, {:.1f} of {:.1f} MB", what,
                                   all > 0 ? 100 * done / all : 100.0, done * 1e-6, all * 1e-6);
    if (seconds > 0.5 && done > 0) {
      text += fmt::format(", {:.1f} MB/s, {:.0f} s left", done * 1e-6 / seconds,
                          (all - done) / done * seconds);
    }
    return text;
  }

  StatusLine line_;
  std::optional<data::PrepareProgress::Phase> phase_;
  Clock::time_point phase_began_;
};

// Returns which documents are held out, and why.
std::string held_out_text(const data::PrepareReport& report, double share) {
  constexpr const char* kWithout = "`dynmo train` will run without validation";
  const std::string percent = fmt::format("{:.3g} %", 100 * share);
  switch (report.held_out) {
    case data::HeldOutKind::kNotAsked:
      return fmt::format("nothing, as --held-out 0 asks: {}", kWithout);
    case data::HeldOutKind::kDrawn:
      return fmt::format(
          "{} of {} documents, drawn with a probability of {} each (--held-out){}",
          report.validation.documents, report.train.documents + report.validation.documents,
          percent,
          report.too_large == 0
              ? ""
              : fmt::format("; {} drawn and trained on, each too large a part of the text",
                            report.too_large));
    case data::HeldOutKind::kDocument:
      return fmt::format("one document, {}: a draw with {} each takes none of {}{}",
                         report.held_out_name, percent,
                         report.train.documents + report.validation.documents,
                         report.too_large == 0 ? "" : " that is no large part of the text");
    case data::HeldOutKind::kEnd:
      return fmt::format("the end of {}, {} of it: too few documents to hold one out",
                         report.held_out_name, percent);
    case data::HeldOutKind::kNothing:
      break;
  }
  return fmt::format("nothing, the text is too short: {}", kWithout);
}

void print_summary(const data::PrepareReport& report, const data::PrepareOptions& options) {
  fmt::print("tokenizer   {}, vocabulary {}{}\n", report.tokenizer, report.vocabulary,
             report.unused_lines == 0
                 ? ""
                 : fmt::format(", trained on {} of {} lines: more would take too much memory",
                               report.training_lines - report.unused_lines, report.training_lines));
  const std::string such =
      report.first_by_content.empty()
          ? ""
          : fmt::format(" (such as {}, by its first line)", report.first_by_content);
  fmt::print("taken       {:>12} files as JSON lines{}, {} as a document each\n", report.json_lines,
             such, report.files - report.json_lines);
  fmt::print("train       {:>12} documents {:>14} tokens\n", report.train.documents,
             report.train.tokens);
  fmt::print("validation  {:>12} documents {:>14} tokens\n", report.validation.documents,
             report.validation.tokens);
  fmt::print("held out    {}\n", held_out_text(report, options.validation));
  fmt::print(
      "skipped     {:>12} files: {} with other extensions, {} compressed, {} not text{}, {} empty, "
      "{} seen twice, {} links and the like\n",
      report.skipped(), report.skipped_ending, report.skipped_compressed, report.skipped_binary,
      report.first_binary.empty()
          ? ""
          : fmt::format(" (such as {}: {})", report.first_binary, report.why_binary),
      report.skipped_empty, report.skipped_twice, report.skipped_other);
  fmt::print("written to  {}\n", options.out.string());
}

// Replaces the wrong option's name in an error of the library by that of its flag.
Error with_flag(Error error) {
  for (const auto& [option, flag] : {std::pair("validation", "--held-out"),
                                     {"jobs", "--jobs"},
                                     {"vocabulary", "--vocabulary"},
                                     {"algorithm", "--algorithm"},
                                     {"text_key", "--text-key"}}) {
    const std::string prefix = fmt::format("{} is ", option);
    if (error.message.starts_with(prefix)) {
      error.message = fmt::format("{} is {}", flag, error.message.substr(prefix.size()));
      break;
    }
  }
  for (const auto& [end, flags] : {std::pair("the text key", "--text-key"),
                                   {"for the text of one document", "--text-key, --format text"},
                                   {"to overwrite the data set in it", "--overwrite"}}) {
    if (error.message.ends_with(end)) error.message += fmt::format(" ({})", flags);
  }
  return error;
}

Expected<void> check_effects(const PrepareFlags& flags) {
  const data::PrepareOptions& given = flags.options;
  const data::PrepareOptions standard;
  const bool draws = given.validation > 0 || given.tokenizer == data::kSentencePieceTokenizer;
  std::error_code fault;
  const bool lists = std::ranges::any_of(flags.paths, [&](const std::filesystem::path& path) {
    return !std::filesystem::exists(path, fault) || std::filesystem::is_directory(path, fault);
  });
  return check_flags({
      {"--seed", given.seed != standard.seed, draws, "a --held-out above 0"},
      {"--text-key", given.text_key != standard.text_key, flags.format != "text",
       "--format jsonl or auto"},
      {"--extensions", given.endings != standard.endings, lists, "a folder as one of the paths"},
  });
}

Expected<int> run_prepare(PrepareFlags flags) {
  DYNMO_TRY(check_effects(flags));
  if (flags.vocabulary) {
    if (flags.options.tokenizer != data::kSentencePieceTokenizer) {
      return make_error(
          ErrorCode::kBadInput,
          "--vocabulary is {}, but --tokenizer {} has a vocabulary of its own: leave --vocabulary "
          "out, or train one by --tokenizer sentencepiece",
          *flags.vocabulary, flags.options.tokenizer);
    }
    flags.options.training.vocabulary = *flags.vocabulary;
  }
  if (flags.algorithm) {
    if (flags.options.tokenizer != data::kSentencePieceTokenizer) {
      return make_error(ErrorCode::kBadInput,
                        "--algorithm is {}, but --tokenizer {} is not trained: leave --algorithm "
                        "out, or train one by --tokenizer sentencepiece",
                        *flags.algorithm, flags.options.tokenizer);
    }
    flags.options.training.algorithm = *flags.algorithm;
  }
  flags.options.format = flags.format == "text"    ? data::InputFormat::kText
                         : flags.format == "jsonl" ? data::InputFormat::kJsonLines
                                                   : data::InputFormat::kAuto;
  Expected<data::PrepareReport> report = [&] {
    PrepareLine line;
    flags.options.progress = [&](const data::PrepareProgress& progress) { line.show(progress); };
    return data::prepare(flags.paths, flags.options);
  }();
  if (!report) return with_flag(report.error());
  print_summary(*report, flags.options);
  return 0;
}

void add_prepare_command(CLI::App& data, Command& chosen) {
  CLI::App* prepare = data.add_subcommand(
      "prepare", "Turn text files, folders of them and JSON lines into token shards");
  const auto flags = std::make_shared<PrepareFlags>();
  data::PrepareOptions& options = flags->options;
  options.jobs = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  prepare->add_option("paths", flags->paths, "Files and folders of text or JSON lines")
      ->required()
      ->option_text("PATH...");
  prepare->add_option("--out,--output", options.out, "Folder to write")
      ->required()
      ->option_text("DIR");
  prepare->add_flag("--overwrite", options.overwrite, "Replace the data set in a folder");
  prepare
      ->add_option("--format", flags->format,
                   "auto: JSON lines where a file's name or first line says so; text: a file is a "
                   "document; jsonl: a line is one")
      ->check(CLI::IsMember({"auto", "text", "jsonl"}))
      ->capture_default_str();
  prepare
      ->add_option("--tokenizer", options.tokenizer,
                   "bytes; sentencepiece: train one on the text; or a Hugging Face tokenizer.json "
                   "(byte-level BPE) or tokenizer.model, or a folder with one")
      ->capture_default_str();
  prepare->add_option("--vocabulary,--vocab", flags->vocabulary,
                      "Tokens of the tokenizer to train [8000]");
  prepare->add_option("--algorithm", flags->algorithm, "Of that: bpe or unigram [bpe]");
  prepare->add_option("--jobs,-j", options.jobs, "Threads; the result is the same for any number")
      ->capture_default_str();
  prepare
      ->add_option("--held-out,--validation", options.validation, "Share of the documents held out")
      ->capture_default_str();
  prepare->add_option("--seed", options.seed, "Seed of the choice of those")
      ->check(not_negative)
      ->capture_default_str();
  prepare
      ->add_option("--extensions", options.endings,
                   "Files of a folder that are taken, such as .txt,.py")
      ->delimiter(',')
      ->capture_default_str();
  prepare->add_option("--text-key", options.text_key, "Key of the text in a line of JSON lines")
      ->capture_default_str();
  run_when_parsed(prepare, chosen, flags, run_prepare);
}

struct InspectFlags {
  std::string path;
  std::string tokenizer;
  std::int64_t document = 0;
  bool ids = false;
  bool json = false;
};

constexpr std::int64_t kShown = 400;  // tokens of the document

// Returns the smallest and the largest token id.
std::pair<std::int32_t, std::int32_t> min_and_max_token(const data::TokenShards& shards) {
  std::vector<std::int32_t> piece;
  std::pair<std::int32_t, std::int32_t> range{0, 0};
  for (std::int64_t first = 0; first < shards.tokens();) {
    piece.resize(static_cast<std::size_t>(
        std::min<std::int64_t>(shards.tokens() - first, std::int64_t{1} << 16)));
    shards.read(first, piece);
    const auto [min, max] = std::minmax_element(piece.begin(), piece.end());
    range = first == 0 ? std::pair(*min, *max)
                       : std::pair(std::min(range.first, *min), std::max(range.second, *max));
    first += static_cast<std::int64_t>(piece.size());
  }
  return range;
}

Expected<std::vector<std::int32_t>> document_of(const data::TokenShards& shards,
                                                std::int64_t document) {
  std::int64_t left = document;
  for (const data::TokenShard& shard : shards.shards()) {
    if (left < 0 || left >= shard.documents()) {
      left -= shard.documents();
      continue;
    }
    const auto range = shard.document(left);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(range.count));
    shard.read(range.first, tokens);
    return tokens;
  }
  return make_error(ErrorCode::kBadInput, "there is no document {}, wanted 0 to {}", document,
                    document - left - 1);
}

std::string text_of(const data::Tokenizer& tokenizer, std::span<const std::int32_t> tokens) {
  data::WholeCharacters characters;
  std::string text = characters.feed(data::decode(tokenizer, tokens));
  return text + characters.finish();
}

Json json_of(const data::TokenShards& shards) {
  std::int64_t documents = 0;
  for (const data::TokenShard& shard : shards.shards()) documents += shard.documents();
  const auto [min, max] = min_and_max_token(shards);
  return {{"shards", shards.shards().size()},
          {"documents", documents},
          {"tokens", shards.tokens()},
          {"type", data::name(shards.shards().front().type())},
          {"min_token", min},
          {"max_token", max}};
}

void print_shards(const char* name, const data::TokenShards& shards) {
  const Json json = json_of(shards);
  fmt::print("{:<11} {:>12} documents {:>14} tokens, {}, ids {} to {}{}\n", name,
             json["documents"].get<std::int64_t>(), shards.tokens(),
             json["type"].get<std::string>(), json["min_token"].get<std::int32_t>(),
             json["max_token"].get<std::int32_t>(),
             shards.shards().size() == 1 ? "" : fmt::format(", {} shards", shards.shards().size()));
}

// The contents of a path: a prepared folder, or shards without a description.
struct Inspected {
  data::TokenShards shards;
  std::optional<data::Dataset> dataset;
  std::unique_ptr<const data::Tokenizer> tokenizer;  // none: not known
};

Expected<Inspected> open_inspected(const InspectFlags& flags) {
  std::error_code fault;
  std::unique_ptr<const data::Tokenizer> tokenizer;
  if (!flags.tokenizer.empty()) {
    DYNMO_ASSIGN(tokenizer, data::open_tokenizer(flags.tokenizer));
  }
  const std::filesystem::path path = flags.path;
  if (!std::filesystem::exists(path / data::kDescriptionFile, fault)) {
    DYNMO_ASSIGN(data::TokenShards shards, data::TokenShards::open(path));
    return Inspected{std::move(shards), {}, std::move(tokenizer)};
  }
  DYNMO_ASSIGN(data::Dataset dataset, data::open_dataset(path));
  DYNMO_TRY(data::verify(dataset));
  if (!tokenizer) {
    DYNMO_ASSIGN(tokenizer, data::tokenizer_of(path, dataset.description));
  }
  return Inspected{dataset.train, std::move(dataset), std::move(tokenizer)};
}

Expected<int> run_inspect(const InspectFlags& flags) {
  DYNMO_TRY(check_flags({
      {"--ids", flags.ids, !flags.json, "no --json, which has them,"},
      {"--tokenizer", !flags.tokenizer.empty(), flags.json || !flags.ids, "no --ids"},
  }));
  DYNMO_ASSIGN(const Inspected inspected, open_inspected(flags));
  DYNMO_ASSIGN(const std::vector<std::int32_t> document,
               document_of(inspected.shards, flags.document));
  if (flags.json) {
    Json json = {{"train", json_of(inspected.shards)}};
    if (inspected.dataset) {
      json["validation"] = json_of(inspected.dataset->validation);
      json["tokenizer"] = inspected.dataset->description.tokenizer;
      json["vocabulary"] = inspected.dataset->description.vocabulary;
      json["end_of_document"] = inspected.dataset->description.end_of_document;
    }
    json["document"] = document;
    if (inspected.tokenizer) json["text"] = text_of(*inspected.tokenizer, document);
    fmt::print("{}\n", json.dump());
    return 0;
  }
  if (inspected.dataset) {
    const auto& description = inspected.dataset->description;
    fmt::print("tokenizer   {}, vocabulary {}, end of document {}\n", description.tokenizer,
               description.vocabulary, description.end_of_document);
    print_shards("train", inspected.shards);
    print_shards("validation", inspected.dataset->validation);
  } else {
    print_shards("tokens", inspected.shards);
  }
  const auto shown = std::span(document).first(
      static_cast<std::size_t>(std::min<std::int64_t>(kShown, std::ssize(document))));
  fmt::print("document {}  {} tokens{}\n\n", flags.document, document.size(),
             shown.size() < document.size() ? fmt::format(", the first {} of them:", kShown) : "");
  if (flags.ids || !inspected.tokenizer) {
    fmt::print("{}\n", fmt::join(shown, " "));
  } else {
    fmt::print("{}\n", text_of(*inspected.tokenizer, shown));
  }
  return 0;
}

void add_inspect_command(CLI::App& data, Command& chosen) {
  CLI::App* inspect =
      data.add_subcommand("inspect", "Show and verify what a prepared folder or a shard holds");
  const auto flags = std::make_shared<InspectFlags>();
  inspect
      ->add_option("path", flags->path,
                   "Prepared folder, PREFIX of PREFIX.bin and .idx, or a folder of such pairs")
      ->required();
  inspect->add_option("--document", flags->document, "Which one to show")->capture_default_str();
  inspect->add_option(
      "--tokenizer", flags->tokenizer,
      "Of shards without dataset.json: bytes, a tokenizer.json or a tokenizer.model");
  inspect->add_flag("--ids", flags->ids, "Show the document as token ids");
  inspect->add_flag("--json", flags->json, "Print JSON, with the whole document");
  run_when_parsed(inspect, chosen, flags, run_inspect);
}

}  // namespace

void add_data_command(CLI::App& app, Command& chosen) {
  CLI::App* data = app.add_subcommand("data", "Prepare training data");
  data->require_subcommand(1);
  add_prepare_command(*data, chosen);
  add_inspect_command(*data, chosen);
}

}  // namespace dynmo::app
