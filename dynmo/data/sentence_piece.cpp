// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/sentence_piece.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <charconv>
#include <unordered_map>
#include <unordered_set>

#include "dynmo/core/check.h"
#include "dynmo/core/files.h"
#include "dynmo/core/rng.h"
#include "dynmo/data/utf8.h"

namespace dynmo::data {
namespace {

constexpr std::string_view kSpace = "\xE2\x96\x81";  // U+2581, how pieces write a space
constexpr std::int32_t kMinPieces = 3 + 1 + 256;     // control, end of line, bytes
constexpr std::int32_t kMaxPieces = 1 << 20;

// Returns the byte of a piece such as "<0x0A>".
std::string byte_of(const std::string& piece) {
  unsigned value = 0;
  if (piece.size() == 6) std::from_chars(piece.data() + 3, piece.data() + 5, value, 16);
  return {static_cast<char>(value)};
}

std::string text_of_piece(std::string_view piece) {
  std::string text;
  while (!piece.empty()) {
    const bool space = piece.starts_with(kSpace);
    text += space ? ' ' : piece.front();
    piece.remove_prefix(space ? kSpace.size() : 1);
  }
  return text;
}

class SentencePiece final : public Tokenizer {
 public:
  SentencePiece(std::unique_ptr<sentencepiece::SentencePieceProcessor> processor, std::string model)
      : processor_(std::move(processor)), model_(std::move(model)) {
    for (int id = 0; id < processor_->GetPieceSize(); ++id) {
      const std::string& piece = processor_->IdToPiece(id);
      texts_.push_back(processor_->IsControl(id)   ? ""
                       : processor_->IsUnknown(id) ? "\xEF\xBF\xBD"
                       : processor_->IsByte(id)    ? byte_of(piece)
                                                   : text_of_piece(piece));
    }
    std::vector<std::int32_t> ids;
    encode_whole("a", ids);
    adds_space_ = !ids.empty() && text_of(ids.front()).starts_with(' ');
    cuts_ = !adds_space_ && keeps_words();
  }

  std::string_view kind() const override { return kSentencePieceTokenizer; }
  std::int32_t vocabulary() const override { return processor_->GetPieceSize(); }
  std::int32_t end_of_document() const override { return processor_->eos_id(); }
  void encode(std::string_view text, std::vector<std::int32_t>& tokens) const override {
    while (cuts_ && text.size() > kFastBytes) {
      const std::size_t cut = cut_of(text);
      if (cut == text.size()) break;
      encode_whole(text.substr(0, cut), tokens);
      text.remove_prefix(cut);
    }
    encode_whole(text, tokens);
  }
  std::string text_of(std::int32_t token) const override {
    if (token < 0 || token >= vocabulary()) return {};
    return texts_[static_cast<std::size_t>(token)];
  }
  bool adds_space() const override { return adds_space_; }
  std::string_view model() const override { return model_; }

 private:
  // For a text of megabytes, SentencePiece takes twice as long a byte as for a text that fits the
  // cache. It also takes some 100 bytes of memory a byte.
  static constexpr std::size_t kFastBytes = std::size_t{1} << 15;
  // A longer text without spaces is cut after this size. Tokens differ from those of the whole only
  // at the cut.
  static constexpr std::size_t kMaxWordBytes = std::size_t{1} << 18;

  // Returns whether the tokens before `i` and from it on are those of the whole. This holds behind
  // the end of a line, and before the spaces before a word.
  static bool is_boundary(std::string_view text, std::size_t i) {
    return text[i - 1] == '\n' || (text[i] == ' ' && text[i - 1] != ' ');
  }
  // Returns the last boundary of the first kFastBytes, or else the first one behind them.
  static std::size_t cut_of(std::string_view text) {
    for (std::size_t i = kFastBytes; i > 0; --i) {
      if (is_boundary(text, i)) return i;
    }
    const std::size_t end = std::min(text.size(), kMaxWordBytes);
    for (std::size_t i = kFastBytes + 1; i < end; ++i) {
      if (is_boundary(text, i)) return i;
    }
    return end == text.size() ? end : end - incomplete_tail(text.substr(0, end));
  }

  void encode_whole(std::string_view text, std::vector<std::int32_t>& tokens) const {
    std::vector<int> ids;
    const auto status = processor_->Encode(text, &ids);
    DYNMO_CHECK(status.ok(), "SentencePiece to encode, got {}", status.ToString());
    tokens.insert(tokens.end(), ids.begin(), ids.end());
  }

  // Returns whether the tokens of a text are those of its words. No piece may cross the end of a
  // line, or reach from a word to the spaces behind it. Spaces must be neither dropped nor added.
  [[nodiscard]] bool keeps_words() const {
    for (const std::string& text : texts_) {
      for (std::size_t i = 1; i < text.size(); ++i) {
        if (text[i] == '\n' || is_boundary(text, i)) return false;
      }
    }
    constexpr std::string_view kSpaces = "  a \n\n  b  \n ";
    std::vector<std::int32_t> tokens;
    encode_whole(kSpaces, tokens);
    return decode(*this, tokens) == kSpaces;
  }

  std::unique_ptr<sentencepiece::SentencePieceProcessor> processor_;
  std::string model_;
  std::vector<std::string> texts_;  // by id
  bool adds_space_ = false;
  bool cuts_ = false;
};

class Lines final : public sentencepiece::SentenceIterator {
 public:
  explicit Lines(std::vector<std::string> lines) : lines_(std::move(lines)) {}
  bool done() const override { return next_ == lines_.size(); }
  void Next() override { ++next_; }
  const std::string& value() const override { return lines_[next_]; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  std::vector<std::string> lines_;
  std::size_t next_ = 0;
};

// Returns the number behind `words` in a message of the library, or 0.
std::int64_t number_after(std::string_view text, std::string_view words) {
  std::int64_t number = 0;
  if (const auto place = text.find(words); place != std::string_view::npos) {
    const char* from = text.data() + place + words.size();
    std::from_chars(from, text.data() + text.size(), number);
  }
  return number;
}

// Translates a message of the library. The message says behind file and line what the library
// wanted.
Error explain(const std::string& said, const SentencePieceOptions& options) {
  if (const auto max = number_after(said, "set it to a value <= "); max > 0) {
    return make_error(
        ErrorCode::kBadInput,
        "vocabulary is {}, more than this text has pieces for: wanted {} at most; give "
        "more text or a smaller vocabulary",
        options.vocabulary, max);
  }
  if (said.find("required_chars") != std::string::npos) {
    return make_error(
        ErrorCode::kBadInput,
        "vocabulary is {}, too small for the characters of this text: give a larger one, "
        "or take the tokenizer 'bytes'",
        options.vocabulary);
  }
  return make_error(ErrorCode::kBadInput,
                    "SentencePiece cannot train a vocabulary of {} by the algorithm {}: {}",
                    options.vocabulary, options.algorithm, said);
}

}  // namespace

Expected<std::unique_ptr<const Tokenizer>> read_sentence_piece(std::string model,
                                                               const std::string& origin) {
  auto processor = std::make_unique<sentencepiece::SentencePieceProcessor>();
  if (model.empty() || !processor->LoadFromSerializedProto(model).ok() ||
      processor->GetPieceSize() < 1) {
    if (const std::string other = known_content(model); !other.empty()) {
      return make_error(ErrorCode::kBadInput, "'{}' is not a SentencePiece model but {}", origin,
                        other);
    }
    return make_error(
        ErrorCode::kBadInput,
        "'{}' is not a SentencePiece model: wanted a file such as the tokenizer.model "
        "of a Hugging Face Llama",
        origin);
  }
  if (processor->eos_id() < 0) {
    return make_error(
        ErrorCode::kBadInput,
        "'{}' has no end-of-sentence token, which ends documents here: wanted a model "
        "trained with one (its eos_id is -1)",
        origin);
  }
  return std::unique_ptr<const Tokenizer>(
      std::make_unique<SentencePiece>(std::move(processor), std::move(model)));
}

std::int64_t limit_words(std::vector<std::string>& lines, std::size_t max_bytes) {
  const auto count = static_cast<std::uint64_t>(lines.size());
  std::vector<bool> taken(lines.size());
  std::unordered_set<std::string_view> words;
  std::size_t bytes = 0;
  for (std::uint64_t i = 0; i < count && bytes < max_bytes; ++i) {
    const auto line = static_cast<std::size_t>(permute(i, count, /*key=*/0));
    taken[line] = true;
    for (std::string_view rest = lines[line]; !rest.empty();) {
      const std::string_view word = rest.substr(0, rest.find(' '));
      if (words.insert(word).second) bytes += word.size();
      rest.remove_prefix(std::min(rest.size(), word.size() + 1));
    }
  }
  words.clear();  // its views end with the lines
  std::size_t index = 0;
  return static_cast<std::int64_t>(
      std::erase_if(lines, [&](const std::string&) { return !taken[index++]; }));
}

Expected<std::string> train_sentence_piece(std::vector<std::string> lines,
                                           const SentencePieceOptions& options) {
  if (options.algorithm != "bpe" && options.algorithm != "unigram") {
    return make_error(ErrorCode::kBadInput, "algorithm is '{}', wanted bpe or unigram",
                      options.algorithm);
  }
  if (options.vocabulary <= kMinPieces || options.vocabulary > kMaxPieces) {
    return make_error(
        ErrorCode::kBadInput,
        "vocabulary is {}, wanted more than the {} of control tokens and bytes, and {} at "
        "most",
        options.vocabulary, kMinPieces, kMaxPieces);
  }
  std::erase_if(lines, [](const std::string& line) {
    return line.find_first_not_of(" \t\r\n") == std::string::npos;
  });
  if (lines.empty()) {
    return make_error(ErrorCode::kBadInput, "no text to train a tokenizer on: give more text");
  }
  const std::unordered_map<std::string, std::string> words = {
      {"model_type", options.algorithm},
      {"vocab_size", std::to_string(options.vocabulary)},
      {"character_coverage", "0.9995"},
      {"byte_fallback", "true"},
      {"normalization_rule_name", "identity"},
      {"add_dummy_prefix", "false"},
      {"remove_extra_whitespaces", "false"},
      {"allow_whitespace_only_pieces", "true"},
      {"split_digits", "true"},
      {"user_defined_symbols", "\n"},
      {"max_sentence_length", "1000000000"},
      {"shuffle_input_sentence", "false"},
      // Groups unigram's sums, which affects the result, so it is the same on any number of cores.
      {"num_threads", "8"},
      {"minloglevel", "3"},
  };
  Lines text(std::move(lines));
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(words, &text, &model);
  if (!status.ok()) return explain(status.ToString(), options);
  return model;
}

}  // namespace dynmo::data
