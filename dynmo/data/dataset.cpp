// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/dataset.h"

#include <utility>

#include "dynmo/core/fields.h"
#include "dynmo/core/files.h"
#include "dynmo/data/sentence_piece.h"
#include "dynmo/data/tokenizer_json.h"

namespace dynmo::data {
namespace {

constexpr std::string_view kFormat = "dynmo-dataset-1";

constexpr Limits kToken{.wanted = "a token below the vocabulary"};
constexpr Limits kVocabulary{.min = 1, .wanted = "1 to 2^31 - 1"};

Expected<TokenShard> open_shard(const std::filesystem::path& folder, const char* name,
                                const ShardSummary& expected) {
  DYNMO_ASSIGN(TokenShard shard, TokenShard::open(folder / name));
  if (shard.documents() != expected.documents || shard.tokens() != expected.tokens) {
    return make_error(ErrorCode::kBadInput,
                      "{}: {} documents of {} tokens in all, wanted {} and {} by dataset.json: "
                      "prepare the data again",
                      shard.prefix().string(), shard.documents(), shard.tokens(),
                      expected.documents, expected.tokens);
  }
  return shard;
}

Expected<void> verify_shard(const TokenShard& shard, const ShardSummary& expected) {
  if (shard.summary() == expected) return {};
  return make_error(ErrorCode::kBadInput,
                    "{}: the digest of the .bin or .idx is not that of dataset.json: prepare the "
                    "data again",
                    shard.prefix().string());
}

}  // namespace

void list_fields(IsA<ShardSummary> auto& shard, auto& visit) {
  visit("documents", shard.documents, kCount);
  visit("tokens", shard.tokens, kCount);
  visit("bin_digest", shard.bin);
  visit("idx_digest", shard.idx);
}

void list_fields(IsA<DatasetDescription> auto& description, auto& visit) {
  visit.format(kFormat);
  visit("tokenizer", description.tokenizer);
  if (!tokenizer_file(description.tokenizer).empty()) {
    visit("tokenizer_digest", description.tokenizer_model);
  }
  visit("vocabulary", description.vocabulary, kVocabulary);
  visit("end_of_document", description.end_of_document, kToken);
  visit("seed", description.seed);
  visit("validation_share", description.validation_share);
  visit("train", description.train);
  visit("validation", description.validation);
}
void check_fields(const IsA<DatasetDescription> auto& description, JsonObject& object) {
  if (description.tokenizer != kByteTokenizer && tokenizer_file(description.tokenizer).empty()) {
    object.fail("tokenizer", fmt::format("is '{}', wanted {}, {} or {}", description.tokenizer,
                                         kByteTokenizer, kSentencePieceTokenizer, kByteLevelBpe));
  }
  const auto [vocabulary, end] = std::pair(description.vocabulary, description.end_of_document);
  if (end < 0 || end >= vocabulary) {
    object.fail("end_of_document", fmt::format("is {}, wanted a token below {}", end, vocabulary));
  }
}

std::string tokenizer_file(std::string_view kind) {
  return kind == kSentencePieceTokenizer ? kTokenizerFile
         : kind == kByteLevelBpe         ? kTokenizerJsonFile
                                         : "";
}

std::string tokenizer_name(const DatasetDescription& description) {
  if (description.tokenizer == kByteTokenizer) return std::string(kByteTokenizer);
  return description.tokenizer_model.hex();
}

std::string tokenizer_name(const Tokenizer& tokenizer) {
  if (tokenizer.kind() == kByteTokenizer) return std::string(kByteTokenizer);
  return digest_of(tokenizer.model()).hex();
}

Expected<void> write_description(const std::filesystem::path& folder,
                                 const DatasetDescription& description) {
  return write_file_durably(folder / kDescriptionFile, write_list(description).dump(2) + "\n");
}

Expected<DatasetDescription> read_description(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / kDescriptionFile;
  DYNMO_ASSIGN(const Json json, read_json(path));
  return parse_fields<DatasetDescription>(json, path.string());
}

Expected<Dataset> open_dataset(const std::filesystem::path& folder) {
  DYNMO_ASSIGN(DatasetDescription description, read_description(folder));
  DYNMO_ASSIGN(TokenShard train, open_shard(folder, "train", description.train));
  DYNMO_ASSIGN(TokenShard validation, open_shard(folder, "validation", description.validation));
  return Dataset{.path = folder,
                 .description = std::move(description),
                 .train = std::move(train),
                 .validation = std::move(validation)};
}

Expected<std::unique_ptr<const Tokenizer>> tokenizer_of(const std::filesystem::path& folder,
                                                        const DatasetDescription& description) {
  if (description.tokenizer == kByteTokenizer) return make_byte_tokenizer();
  const std::filesystem::path path = folder / tokenizer_file(description.tokenizer);
  DYNMO_ASSIGN(std::string model, read_file(path));
  if (digest_of(model) != description.tokenizer_model) {
    return make_error(ErrorCode::kBadInput,
                      "{}: not the tokenizer that the data were prepared with (its digest is not "
                      "that of dataset.json): put that back, or prepare the data again",
                      path.string());
  }
  if (description.tokenizer == kSentencePieceTokenizer) {
    return read_sentence_piece(std::move(model), path.string());
  }
  return read_tokenizer_json(std::move(model), path.string(),
                             {.id = description.end_of_document,
                              .content = {},
                              .origin = (folder / kDescriptionFile).string()});
}

Expected<void> verify(const Dataset& dataset) {
  DYNMO_TRY(verify_shard(dataset.train, dataset.description.train));
  return verify_shard(dataset.validation, dataset.description.validation);
}

}  // namespace dynmo::data
