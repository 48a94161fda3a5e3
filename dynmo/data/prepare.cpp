// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/prepare.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "dynmo/core/files.h"
#include "dynmo/core/ordered_tasks.h"
#include "dynmo/core/rng.h"
#include "dynmo/data/corpus_impl.h"
#include "dynmo/data/dataset.h"
#include "dynmo/data/held_out_impl.h"
#include "dynmo/data/utf8.h"

namespace dynmo::data {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kTaskBytes = std::size_t{1} << 20;  // of text, so that a task pays

Expected<void> check_options(std::span<const fs::path> paths, const PrepareOptions& options) {
  if (paths.empty()) {
    return make_error(ErrorCode::kBadInput, "no paths to prepare: give files or folders of text");
  }
  if (!(options.validation >= 0 && options.validation < 1)) {
    return make_error(ErrorCode::kBadInput, "validation is {}, wanted 0 or more and below 1",
                      options.validation);
  }
  if (options.jobs < 1 || options.jobs > 1024) {
    return make_error(ErrorCode::kBadInput, "jobs is {}, wanted 1 to 1024", options.jobs);
  }
  if (options.training_bytes < 1) {
    return make_error(ErrorCode::kBadInput, "{} bytes to train a tokenizer on, wanted 1 or more",
                      options.training_bytes);
  }
  for (const std::string& ending : options.endings) {
    if (ending.size() < 2 || ending.front() != '.') {
      return make_error(ErrorCode::kBadInput, "extension '{}' is none, wanted one such as '.txt'",
                        ending);
    }
  }
  return {};
}

bool is_within(const fs::path& inner, const fs::path& outer) {
  const auto [rest, end] = std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end());
  return rest == outer.end();
}

// Returns a file of the corpus that lies in the folder to write, or an empty path.
fs::path text_in_out(std::span<const fs::path> paths, const Corpus& corpus, const fs::path& out) {
  std::error_code fault;
  const fs::path folder = fs::weakly_canonical(out, fault);
  for (const fs::path& path : paths) {
    const fs::path given = fs::weakly_canonical(path, fault);
    if (is_within(given, folder)) return path;
    if (!is_within(folder, given)) continue;
    const fs::path inside = path / folder.lexically_relative(given);
    for (const CorpusFile& file : corpus.files) {
      if (is_within(file.path, inside)) return file.path;
    }
  }
  return {};
}

// A data set's files, but for its description.
constexpr std::array<std::string_view, 7> kOwn = {
    "train.bin",    "train.idx",        "validation.bin",      "validation.idx",
    kTokenizerFile, kTokenizerJsonFile, kTokenizerSettingsFile};

// Returns whether a preparation that was killed has left this file: NAME.tmp of a shard, or
// NAME.PROCESS.new of write_file_durably().
bool is_unfinished(std::string_view name) {
  const auto is_of = [&](std::string_view own) {
    if (!name.starts_with(own)) return false;
    const std::string_view rest = name.substr(own.size());
    return rest == ".tmp" || (rest.starts_with('.') && rest.ends_with(".new"));
  };
  return is_of(kDescriptionFile) || std::ranges::any_of(kOwn, is_of);
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code fault;
  fs::directory_iterator next(folder, fault);
  for (; !fault && next != fs::directory_iterator(); next.increment(fault)) {
    std::string name = next->path().filename().string();
    if (!is_unfinished(name)) names.push_back(std::move(name));
  }
  std::ranges::sort(names);
  return names;
}

// Refuses to overwrite a data set, a run, or the text itself.
Expected<void> check_out_folder(std::span<const fs::path> paths, const Corpus& corpus,
                                const PrepareOptions& options) {
  const std::vector<std::string> names = names_in(options.out);
  if (names.empty()) return {};
  const std::string out = options.out.string();
  if (const fs::path text = text_in_out(paths, corpus, options.out); !text.empty()) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' holds '{}', which is to be prepared: wanted another folder to write",
                      out, text.string());
  }
  const bool set = std::ranges::find(names, kDescriptionFile) != names.end();
  // A preparation that was killed at its end leaves only these files.
  const bool left = std::ranges::all_of(
      names, [](std::string_view name) { return std::ranges::find(kOwn, name) != kOwn.end(); });
  if ((set || left) && options.overwrite) return {};
  const std::size_t shown = std::min<std::size_t>(names.size(), 3);
  std::string content =
      fmt::format("{}{}", fmt::join(std::span(names).first(shown), ", "),
                  names.size() > shown ? fmt::format(" and {} more", names.size() - shown) : "");
  if (const auto description = read_description(options.out)) {
    content = fmt::format("a data set of {} documents, tokenizer {}",
                          description->train.documents + description->validation.documents,
                          description->tokenizer);
  }
  return make_error(ErrorCode::kBadInput, "'{}' holds {}: wanted a new or empty folder{}", out,
                    content, set || left ? ", or to be told to overwrite the data set in it" : "");
}

// Limits the bytes of distinct words that a tokenizer is trained on. Prose has a twentieth of it in
// the 32 MiB that are drawn.
constexpr std::size_t kMaxWordBytes = std::size_t{4} << 20;

// The tokens of some documents, by split, and the number of tokens before the end of each document.
struct Encoded {
  struct Split {
    std::vector<std::int32_t> tokens;
    std::vector<std::size_t> ends;
  };
  std::array<Split, 2> splits;
  BlockCounts counts;
};

Expected<Encoded> encode(std::span<const Block> blocks, const Tokenizer& tokenizer,
                         const HeldOut& held_out, const PrepareOptions& options) {
  Encoded encoded;
  DYNMO_ASSIGN(encoded.counts,
               for_each_document(blocks, options.text_key, [&](const Document& document) {
                 const auto parts = held_out.parts_of(document);
                 for (std::size_t i = 0; i < parts.size(); ++i) {
                   Encoded::Split& split = encoded.splits[i];
                   if (!parts[i].text.empty()) tokenizer.encode(parts[i].text, split.tokens);
                   if (!parts[i].ends) continue;
                   split.tokens.push_back(tokenizer.end_of_document());
                   split.ends.push_back(split.tokens.size());
                 }
               }));
  return encoded;
}

// Draws lines for training SentencePiece. Its time grows with the square of a word's length, so
// long lines are cut.
void split_lines(std::string_view text, double share, Rng& rng, std::vector<std::string>& lines) {
  constexpr std::size_t kMaxLine = 4096;
  while (!text.empty()) {
    std::string_view line = text.substr(0, std::min(text.find('\n'), kMaxLine));
    line.remove_suffix(line.size() < kMaxLine ? 0 : incomplete_tail(line));
    text.remove_prefix(line.size());
    if (text.starts_with('\n')) text.remove_prefix(1);
    if (!line.empty() && rng.uniform() < share) lines.emplace_back(line);
  }
}

Expected<std::vector<std::string>> draw(std::span<const Block> blocks, double share,
                                        const HeldOut& held_out, const PrepareOptions& options) {
  std::vector<std::string> lines;
  DYNMO_TRY(for_each_document(blocks, options.text_key, [&](const Document& document) {
    const std::string_view text = held_out.parts_of(document)[kTrain].text;
    if (text.empty()) return;
    const Digest digest =
        digest_of(fmt::format("{}\n{}\n{}", options.seed, document.name, document.piece));
    Rng rng(digest.low);
    split_lines(text, share, rng, lines);
  }));
  return lines;
}

// One run over a corpus.
class Preparation {
 public:
  Preparation(const PrepareOptions& options, Corpus corpus)
      : options_(options), corpus_(std::move(corpus)), report_(corpus_.skipped) {
    progress_.total_bytes = corpus_.bytes;
    report_.bytes = corpus_.bytes;
  }

  Expected<void> hold_out();
  Expected<void> find_tokenizer();
  Expected<PrepareReport> run();

 private:
  template <typename Work, typename Take>
  Expected<void> over_all_blocks(PrepareProgress::Phase phase, Work work, Take take);
  void tell(const BlockReader* reader);
  Expected<std::string> train_tokenizer();
  Expected<void> open_writers();
  Expected<void> write(Encoded encoded);
  void add_binary(const std::vector<NotText>& files);
  Expected<PrepareReport> finish();

  const PrepareOptions& options_;
  const Corpus corpus_;
  PrepareReport report_;
  HeldOut held_out_;
  std::unique_ptr<const Tokenizer> tokenizer_;
  std::vector<TokenShardWriter> writers_;  // kTrain, kValidation
  std::array<std::int64_t, 2> documents_{};
  PrepareProgress progress_;
};

// Calls `work` with some blocks, on any thread, and `take` with its results in the order of the
// blocks. Returns the first error in that order.
template <typename Work, typename Take>
Expected<void> Preparation::over_all_blocks(PrepareProgress::Phase phase, Work work, Take take) {
  using Result = decltype(work(std::span<const Block>()));
  progress_.phase = phase;
  BlockReader reader(corpus_, options_);
  OrderedTasks<Result> tasks(options_.jobs);
  const auto take_oldest = [&]() -> Expected<void> {
    DYNMO_ASSIGN(auto value, tasks.take());
    DYNMO_TRY(take(std::move(value)));
    tell(&reader);
    return {};
  };
  std::optional<Error> fault;
  for (bool more = true; more && !fault;) {
    std::vector<Block> blocks;
    for (std::size_t bytes = 0; more && !fault && bytes < kTaskBytes;) {
      Block block;
      const auto read = reader.next(block);
      more = read && *read;
      if (!read) fault = read.error();
      if (!more) break;
      bytes += block.text.size() + 64;  // empty files are work, too
      blocks.push_back(std::move(block));
    }
    if (tasks.full()) DYNMO_TRY(take_oldest());
    tasks.add([work, blocks = std::move(blocks)] { return work(std::span<const Block>(blocks)); });
  }
  while (!tasks.empty()) DYNMO_TRY(take_oldest());
  if (fault) return *fault;
  if (phase == PrepareProgress::Phase::kTokenize) add_binary(reader.binary());
  return {};
}

void Preparation::tell(const BlockReader* reader) {
  if (reader != nullptr) progress_.bytes = reader->bytes();
  if (options_.progress) options_.progress(progress_);
}

Expected<void> Preparation::hold_out() {
  progress_.phase = PrepareProgress::Phase::kHoldOut;
  DYNMO_ASSIGN(held_out_, choose_held_out(corpus_, options_, [this](std::int64_t bytes) {
                 progress_.bytes = bytes;
                 tell(nullptr);
               }));
  report_.held_out = held_out_.kind();
  report_.held_out_name = held_out_.name();
  report_.too_large = held_out_.too_large();
  return {};
}

Expected<void> Preparation::find_tokenizer() {
  if (options_.tokenizer == kSentencePieceTokenizer) {
    DYNMO_ASSIGN(std::string model, train_tokenizer());
    DYNMO_ASSIGN(tokenizer_, read_sentence_piece(std::move(model), "the tokenizer just trained"));
  } else {
    DYNMO_ASSIGN(tokenizer_, open_tokenizer(options_.tokenizer));
  }
  return {};
}

Expected<std::string> Preparation::train_tokenizer() {
  const double share = static_cast<double>(options_.training_bytes) /
                       static_cast<double>(std::max<std::int64_t>(corpus_.bytes, 1));
  std::vector<std::string> lines;
  DYNMO_TRY(over_all_blocks(
      PrepareProgress::Phase::kDraw,
      [this, share](std::span<const Block> blocks) {
        return draw(blocks, share, held_out_, options_);
      },
      [&](std::vector<std::string> drawn) -> Expected<void> {
        std::move(drawn.begin(), drawn.end(), std::back_inserter(lines));
        return {};
      }));
  progress_.phase = PrepareProgress::Phase::kTrain;
  tell(nullptr);
  report_.training_lines = std::ssize(lines);
  report_.unused_lines = limit_words(lines, kMaxWordBytes);
  return train_sentence_piece(std::move(lines), options_.training);
}

Expected<void> Preparation::open_writers() {
  DYNMO_TRY(make_directories(options_.out));
  for (const char* name : {"train", "validation"}) {
    DYNMO_ASSIGN(
        TokenShardWriter writer,
        TokenShardWriter::create(options_.out / name, token_type_for(tokenizer_->vocabulary())));
    writers_.push_back(std::move(writer));
  }
  return {};
}

Expected<PrepareReport> Preparation::run() {
  DYNMO_TRY(open_writers());
  progress_.bytes = 0;
  DYNMO_TRY(over_all_blocks(
      PrepareProgress::Phase::kTokenize,
      [this](std::span<const Block> blocks) {
        return encode(blocks, *tokenizer_, held_out_, options_);
      },
      [this](Encoded encoded) { return write(std::move(encoded)); }));
  return finish();
}

Expected<void> Preparation::write(Encoded encoded) {
  for (std::size_t i = 0; i < writers_.size(); ++i) {
    const Encoded::Split& split = encoded.splits[i];
    const std::span<const std::int32_t> tokens = split.tokens;
    std::size_t first = 0;
    for (const std::size_t end : split.ends) {
      DYNMO_TRY(writers_[i].append(tokens.subspan(first, end - first)));
      writers_[i].end_document();
      first = end;
    }
    DYNMO_TRY(writers_[i].append(tokens.subspan(first)));
    documents_[i] += static_cast<std::int64_t>(split.ends.size());
    progress_.tokens += static_cast<std::int64_t>(tokens.size());
  }
  progress_.documents += encoded.counts.documents;
  report_.files += encoded.counts.files;
  report_.json_lines += encoded.counts.json_lines;
  if (encoded.counts.first_by_content != nullptr && report_.first_by_content.empty()) {
    report_.first_by_content = encoded.counts.first_by_content->path.string();
  }
  report_.skipped_empty += encoded.counts.empty;
  add_binary(encoded.counts.binary);
  return {};
}

void Preparation::add_binary(const std::vector<NotText>& files) {
  report_.skipped_binary += static_cast<std::int64_t>(files.size());
  if (!files.empty() && report_.first_binary.empty()) {
    report_.first_binary = files.front().file->path.string();
    report_.why_binary = files.front().why;
  }
}

Expected<PrepareReport> Preparation::finish() {
  if (progress_.documents == 0) {
    return make_error(
        ErrorCode::kBadInput,
        "no text found: {} files with other extensions, {} compressed, {} not UTF-8 "
        "text{}, {} empty; the extensions taken are {}",
        report_.skipped_ending, report_.skipped_compressed, report_.skipped_binary,
        report_.why_binary.empty()
            ? ""
            : fmt::format(" ('{}' is none: {})", report_.first_binary, report_.why_binary),
        report_.skipped_empty, fmt::join(options_.endings, ","));
  }
  if (report_.json_lines == 0 && options_.text_key != PrepareOptions{}.text_key) {
    return make_error(ErrorCode::kBadInput,
                      "text_key is {}, but none of the {} files is JSON lines: wanted such a file, "
                      "or no text key",
                      options_.text_key, report_.files);
  }
  for (TokenShardWriter& writer : writers_) DYNMO_TRY(writer.write_out());
  // Removes dataset.json first. Without it, the folder is no data set until the new one is written.
  std::error_code fault;
  for (const char* name :
       {kDescriptionFile, kTokenizerFile, kTokenizerJsonFile, kTokenizerSettingsFile}) {
    const fs::path old = options_.out / name;
    if (fs::remove(old, fault)) DYNMO_TRY(sync_directory(options_.out));
    if (fault) {
      return make_error(ErrorCode::kBadInput, "cannot replace '{}': {}", old.string(),
                        fault.message());
    }
  }
  DYNMO_ASSIGN(report_.train, writers_[kTrain].finish());
  DYNMO_ASSIGN(report_.validation, writers_[kValidation].finish());
  if (report_.held_out == HeldOutKind::kEnd && report_.validation.documents == 0) {
    report_.held_out = HeldOutKind::kNothing;
  }
  const std::string_view model = tokenizer_->model();
  if (!model.empty()) {
    DYNMO_TRY(write_file_durably(options_.out / tokenizer_file(tokenizer_->kind()), model));
  }
  if (const std::string settings = tokenizer_->settings(); !settings.empty()) {
    DYNMO_TRY(write_file_durably(options_.out / kTokenizerSettingsFile, settings));
  }
  report_.vocabulary = tokenizer_->vocabulary();
  report_.tokenizer = tokenizer_->kind();
  DYNMO_TRY(write_description(options_.out,
                              {.tokenizer = report_.tokenizer,
                               .tokenizer_model = model.empty() ? Digest{} : digest_of(model),
                               .vocabulary = report_.vocabulary,
                               .end_of_document = tokenizer_->end_of_document(),
                               .seed = options_.seed,
                               .validation_share = options_.validation,
                               .train = report_.train,
                               .validation = report_.validation}));
  return report_;
}

}  // namespace

std::vector<std::string> default_endings() {
  return {".txt", ".text", ".md", ".rst", ".tex", ".org", ".jsonl", ".ndjson",
          ".py",  ".c",    ".h",  ".cc",  ".cpp", ".hpp", ".cu",    ".rs",
          ".go",  ".java", ".js", ".ts",  ".rb",  ".sh",  ".lua"};
}

Expected<PrepareReport> prepare(std::span<const std::filesystem::path> paths,
                                const PrepareOptions& options) {
  DYNMO_TRY(check_options(paths, options));
  DYNMO_ASSIGN(Corpus corpus, list_corpus(paths, options.endings));
  DYNMO_TRY(check_out_folder(paths, corpus, options));
  PrepareProgress measured{.phase = PrepareProgress::Phase::kMeasure, .total_bytes = corpus.bytes};
  DYNMO_TRY(measure_text(corpus, options.jobs, [&](std::int64_t bytes) {
    measured.bytes = bytes;
    if (options.progress) options.progress(measured);
  }));
  Preparation preparation(options, std::move(corpus));
  DYNMO_TRY(preparation.hold_out());
  DYNMO_TRY(preparation.find_tokenizer());
  return preparation.run();
}

}  // namespace dynmo::data
