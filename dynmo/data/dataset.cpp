// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/dataset.h"

#include <limits>

#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/data/sentence_piece.h"

namespace dynmo::data {
namespace {

constexpr std::string_view kFormat = "dynmo-dataset-1";

Json to_json(const ShardSummary& shard) {
  return {{"documents", shard.documents},
          {"tokens", shard.tokens},
          {"bin_digest", shard.bin.hex()},
          {"idx_digest", shard.idx.hex()}};
}

std::int64_t read_count(JsonObject& object, const std::string& key) {
  const std::int64_t count = object.integer(key);
  if (count < 0) object.fail(key, fmt::format("is {}, wanted 0 or more", count));
  return count;
}

Digest read_digest(JsonObject& object, const std::string& key) {
  const auto digest = parse_digest(object.string(key));
  if (!digest) object.fail(key, "is not a digest, wanted 32 hexadecimal digits");
  return digest.value_or(Digest{});
}

Expected<ShardSummary> read_shard(JsonObject& root, const std::string& key) {
  auto object = root.object(key);
  if (!object) {
    root.fail(key, "is missing");
    return root.finish().error();
  }
  ShardSummary shard;
  shard.documents = read_count(*object, "documents");
  shard.tokens = read_count(*object, "tokens");
  shard.bin = read_digest(*object, "bin_digest");
  shard.idx = read_digest(*object, "idx_digest");
  DYNMO_TRY(object->finish());
  return shard;
}

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
  Json json = {{"format", kFormat}, {"tokenizer", description.tokenizer}};
  if (description.tokenizer != kByteTokenizer) {
    json["tokenizer_digest"] = description.tokenizer_model.hex();
  }
  json["vocabulary"] = description.vocabulary;
  json["end_of_document"] = description.end_of_document;
  json["seed"] = description.seed;
  json["validation_share"] = description.validation_share;
  json["train"] = to_json(description.train);
  json["validation"] = to_json(description.validation);
  return write_file_durably(folder / kDescriptionFile, json.dump(2) + "\n");
}

Expected<DatasetDescription> read_description(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / kDescriptionFile;
  DYNMO_ASSIGN(const Json json, read_json(path));
  JsonObject root(json, path.string());
  root.expect_format(kFormat);
  DatasetDescription description;
  description.tokenizer = root.string("tokenizer");
  if (description.tokenizer == kSentencePieceTokenizer) {
    description.tokenizer_model = read_digest(root, "tokenizer_digest");
  } else if (description.tokenizer != kByteTokenizer) {
    root.fail("tokenizer", fmt::format("is '{}', wanted {} or {}", description.tokenizer,
                                       kByteTokenizer, kSentencePieceTokenizer));
  }
  const std::int64_t vocabulary = root.integer("vocabulary");
  const std::int64_t end = root.integer("end_of_document");
  if (vocabulary < 1 || vocabulary > std::numeric_limits<std::int32_t>::max()) {
    root.fail("vocabulary", fmt::format("is {}, wanted 1 to 2^31 - 1", vocabulary));
  } else if (end < 0 || end >= vocabulary) {
    root.fail("end_of_document", fmt::format("is {}, wanted a token below {}", end, vocabulary));
  } else {
    description.vocabulary = static_cast<std::int32_t>(vocabulary);
    description.end_of_document = static_cast<std::int32_t>(end);
  }
  // The whole range of a seed, which is more than JsonObject::integer reads.
  root.ignore("seed");
  const auto seed = json.is_object() ? json.find("seed") : json.end();
  if (seed == json.end() || !seed->is_number_unsigned()) {
    root.fail("seed", "is missing or not a whole number of at least 0");
  } else {
    description.seed = seed->get<std::uint64_t>();
  }
  description.validation_share = root.number("validation_share");
  DYNMO_ASSIGN(description.train, read_shard(root, "train"));
  DYNMO_ASSIGN(description.validation, read_shard(root, "validation"));
  DYNMO_TRY(root.finish());
  return description;
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
  const std::filesystem::path path = folder / kTokenizerFile;
  DYNMO_ASSIGN(std::string model, read_file(path));
  if (digest_of(model) != description.tokenizer_model) {
    return make_error(ErrorCode::kBadInput,
                      "{}: not the tokenizer that the data were prepared with (its digest is not "
                      "that of dataset.json): put that back, or prepare the data again",
                      path.string());
  }
  return read_sentence_piece(std::move(model), path.string());
}

Expected<void> verify(const Dataset& dataset) {
  DYNMO_TRY(verify_shard(dataset.train, dataset.description.train));
  return verify_shard(dataset.validation, dataset.description.validation);
}

}  // namespace dynmo::data
