// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/tokenizer_json.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "dynmo/core/json.h"
#include "dynmo/data/tokenizer_parts_impl.h"
#include "dynmo/data/utf8.h"

namespace dynmo::data {
namespace {

constexpr std::array<const char*, 4> kUsualEnds = {"<|endoftext|>", "<|end_of_text|>", "</s>",
                                                   "<eos>"};

Expected<std::int32_t> resolve_end(const TokenizerParts& parts, const std::string& origin,
                                   const DocumentEnd& end) {
  if (end.id) {
    if (*end.id >= 0 && *end.id < std::ssize(parts.texts)) return *end.id;
    return make_error(ErrorCode::kBadInput,
                      "{}: the end of a document is {}, wanted a token below the {} of {}",
                      end.origin, *end.id, parts.texts.size(), origin);
  }
  if (end.content) {
    const auto found = parts.ids.find(*end.content);
    if (found != parts.ids.end()) return found->second;
    return make_error(ErrorCode::kBadInput, "{}: eos_token is {}, wanted a token of {}", end.origin,
                      in_quotes(*end.content), origin);
  }
  for (const char* usual : kUsualEnds) {
    const auto found = parts.ids.find(usual);
    if (found != parts.ids.end()) return found->second;
  }
  if (parts.special.size() == 1) return parts.special.front();
  return make_error(ErrorCode::kBadInput,
                    "{}: which token ends a document is not known: wanted a tokenizer_config.json "
                    "beside it with its eos_token",
                    origin);
}

// Returns the bytes of the whole characters at the beginning of `text`.
std::size_t valid_bytes(std::string_view text) {
  Utf8State state;
  std::size_t whole = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<std::uint8_t>(text[i]);
    if (!(byte < 0x80 && state.expected == 0) && !state.accept(byte)) return whole;
    if (state.expected == 0) whole = i + 1;
  }
  return whole;
}

// Returns the bytes before the first whole character of `text`.
std::size_t invalid_bytes(std::string_view text) {
  std::size_t i = 1;
  while (i < text.size() && valid_bytes(text.substr(i, 4)) == 0) ++i;
  return std::min(i, text.size());
}

class ByteLevelBpe final : public Tokenizer {
 public:
  ByteLevelBpe(TokenizerParts parts, std::int32_t end, std::string content)
      : end_(end),
        end_text_(parts.texts[static_cast<std::size_t>(end)]),
        content_(std::move(content)),
        texts_(std::move(parts.texts)),
        raw_(std::move(parts.raw)),
        normalized_(std::move(parts.normalized)),
        normalizes_(parts.normalizes),
        patterns_(std::move(parts.patterns)),
        pairs_(parts.bytes, parts.merges, whole_of(parts)) {
    texts_[static_cast<std::size_t>(end)].clear();
  }

  std::string_view kind() const override { return kByteLevelBpe; }
  std::int32_t vocabulary() const override { return static_cast<std::int32_t>(texts_.size()); }
  std::int32_t end_of_document() const override { return end_; }
  bool adds_space() const override { return false; }
  std::string_view model() const override { return content_; }
  std::string settings() const override {
    return Json{{"tokenizer_class", "PreTrainedTokenizerFast"}, {"eos_token", end_text_}}.dump(2) +
           "\n";
  }
  std::string text_of(std::int32_t token) const override {
    if (token < 0 || token >= vocabulary()) return {};
    return texts_[static_cast<std::size_t>(token)];
  }
  // Invalid UTF-8 is a separate piece.
  void encode(std::string_view text, std::vector<std::int32_t>& tokens) const override {
    std::unique_ptr<Work> work = take_work();
    work->tokens = &tokens;
    while (!text.empty()) {
      const std::size_t valid = valid_bytes(text);
      if (valid > 0) encode_text(text.substr(0, valid), *work);
      text.remove_prefix(valid);
      if (text.empty()) break;
      const std::size_t invalid = invalid_bytes(text);
      pairs_.encode(text.substr(0, invalid), work->pairs, tokens);
      text.remove_prefix(invalid);
    }
    give_back(std::move(work));
  }

 private:
  // The memory of one encode().
  struct Work {
    SplitPattern::State split;
    BytePairs::Scratch pairs;
    std::string normal;
    std::vector<std::int32_t>* tokens = nullptr;
  };

  // Returns the pieces that become a token without merges. With ignore_merges these are all that
  // equal a token, else none.
  static std::unordered_map<std::string, std::int32_t> whole_of(const TokenizerParts& parts) {
    std::unordered_map<std::string, std::int32_t> whole;
    if (!parts.ignore_merges) return whole;
    const ByteTable table;
    for (const auto& [written, id] : parts.ids) {
      if (auto bytes = table.bytes_of(written)) whole.emplace(std::move(*bytes), id);
    }
    return whole;
  }

  std::unique_ptr<Work> take_work() const {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return std::make_unique<Work>();
    std::unique_ptr<Work> work = std::move(idle_.back());
    idle_.pop_back();
    return work;
  }
  void give_back(std::unique_ptr<Work> work) const {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(work));
  }

  void encode_text(std::string_view text, Work& work) const {
    const auto take_token = [&](std::int32_t token) { work.tokens->push_back(token); };
    raw_.split(
        text,
        [&](std::string_view part) {
          if (!normalizes_) return split(part, 0, work);
          const std::string_view normal = normal_form_c(part, work.normal);
          normalized_.split(
              normal, [&](std::string_view piece) { split(piece, 0, work); }, take_token);
        },
        take_token);
  }

  // Applies the patterns from `level` on.
  void split(std::string_view text, std::size_t level, Work& work) const {
    if (level == patterns_.size()) return pairs_.encode(text, work.pairs, *work.tokens);
    patterns_[level].split(text, work.split,
                           [&](std::string_view piece) { split(piece, level + 1, work); });
  }

  std::int32_t end_;
  std::string end_text_;
  std::string content_;
  std::vector<std::string> texts_;  // by id
  AddedTokens raw_;
  AddedTokens normalized_;
  bool normalizes_;
  std::vector<SplitPattern> patterns_;
  BytePairs pairs_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Work>> idle_;  // one for each thread that encoded
};

}  // namespace

Expected<DocumentEnd> find_document_end(const std::filesystem::path& folder) {
  std::error_code fault;
  DocumentEnd end;
  if (const auto path = folder / "tokenizer_config.json"; std::filesystem::exists(path, fault)) {
    DYNMO_ASSIGN(const Json json, read_json(path));
    const Json* token =
        json.is_object() && json.contains("eos_token") ? &json["eos_token"] : nullptr;
    if (token != nullptr && token->is_object() && token->contains("content"))
      token = &(*token)["content"];
    if (token != nullptr && token->is_string()) {
      end.content = token->get<std::string>();
      end.origin = path.string();
      return end;
    }
  }
  if (const auto path = folder / "config.json"; std::filesystem::exists(path, fault)) {
    DYNMO_ASSIGN(const Json json, read_json(path));
    const Json* id =
        json.is_object() && json.contains("eos_token_id") ? &json["eos_token_id"] : nullptr;
    if (id != nullptr && id->is_array() && !id->empty()) id = &(*id)[0];
    if (id != nullptr && id->is_number_unsigned() && id->get<std::uint64_t>() < kMaxTokenIds) {
      end.id = id->get<std::int32_t>();
      end.origin = path.string();
    }
  }
  return end;
}

Expected<std::unique_ptr<const Tokenizer>> read_tokenizer_json(std::string content,
                                                               const std::string& origin,
                                                               const DocumentEnd& end) {
  DYNMO_ASSIGN(TokenizerParts parts, read_tokenizer_parts(content, origin));
  DYNMO_ASSIGN(const std::int32_t id, resolve_end(parts, origin, end));
  return std::unique_ptr<const Tokenizer>(
      std::make_unique<ByteLevelBpe>(std::move(parts), id, std::move(content)));
}

}  // namespace dynmo::data
