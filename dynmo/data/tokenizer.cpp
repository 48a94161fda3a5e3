// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/tokenizer.h"

#include "dynmo/core/files.h"
#include "dynmo/data/dataset.h"
#include "dynmo/data/sentence_piece.h"
#include "dynmo/data/tokenizer_json.h"

namespace dynmo::data {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  std::string_view kind() const override { return kByteTokenizer; }
  std::int32_t vocabulary() const override { return kByteVocabulary; }
  std::int32_t end_of_document() const override { return kByteEndOfDocument; }
  void encode(std::string_view text, std::vector<std::int32_t>& tokens) const override {
    for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  }
  std::string text_of(std::int32_t token) const override {
    if (token < 0 || token >= kByteEndOfDocument) return {};
    return {static_cast<char>(token)};
  }
  bool adds_space() const override { return false; }
  std::string_view model() const override { return {}; }
};

}  // namespace

std::unique_ptr<const Tokenizer> make_byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

Expected<std::unique_ptr<const Tokenizer>> open_tokenizer(const std::string& name) {
  if (name == kByteTokenizer) return make_byte_tokenizer();
  std::error_code fault;
  std::filesystem::path path = name;
  if (std::filesystem::is_directory(path, fault)) {
    if (std::filesystem::exists(path / kDescriptionFile, fault)) {
      DYNMO_ASSIGN(const DatasetDescription description, read_description(path));
      return tokenizer_of(path, description);
    }
    const bool pieces = std::filesystem::exists(path / kTokenizerFile, fault);
    const bool json = std::filesystem::exists(path / kTokenizerJsonFile, fault);
    path /= json && !pieces ? kTokenizerJsonFile : kTokenizerFile;
  }
  if (!std::filesystem::is_regular_file(path, fault)) {
    return make_error(ErrorCode::kBadInput,
                      "tokenizer '{}' is not there, wanted bytes, a SentencePiece model such as "
                      "tokenizer.model, a tokenizer.json, or a folder with one",
                      path.string());
  }
  DYNMO_ASSIGN(std::string model, read_file(path));
  if (!model.starts_with('{')) return read_sentence_piece(std::move(model), path.string());
  DYNMO_ASSIGN(const DocumentEnd end, find_document_end(path.parent_path()));
  return read_tokenizer_json(std::move(model), path.string(), end);
}

std::string decode(const Tokenizer& tokenizer, std::span<const std::int32_t> tokens) {
  std::string text;
  for (const std::int32_t token : tokens) text += tokenizer.text_of(token);
  if (tokenizer.adds_space() && text.starts_with(' ')) text.erase(0, 1);
  return text;
}

}  // namespace dynmo::data
