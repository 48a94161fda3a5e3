// SPDX-License-Identifier: Apache-2.0
#pragma once

// Token shards in Megatron's indexed format. PREFIX.bin has the tokens back to back. PREFIX.idx has
// the ends of sequences and documents. Shards written by Megatron's preprocessing are read
// unchanged. The index, all numbers little-endian:
//
//   9 bytes    MMIDIDX\0\0
//   8          version, 1
//   1          TokenType
//   8          number of sequences S
//   8          number of document boundaries D + 1
//   4 S        int32 tokens of each sequence
//   8 S        int64 first byte of each sequence in the .bin
//   8 (D + 1)  int64 sequences before each boundary: 0, ..., S

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "dynmo/core/digest.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/data/mapped_file.h"

namespace dynmo::data {

// Type of a token in the .bin. The values are the format's codes. Floating-point shards (6, 7) have
// no tokens and are refused.
enum class TokenType : std::uint8_t {
  kUint8 = 1,
  kInt8 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kUint16 = 8,
};
[[nodiscard]] std::string_view name(TokenType type);  // "uint16"
[[nodiscard]] int bytes_per_token(TokenType type);

struct ShardSummary {
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
  Digest bin = {};  // of the whole .bin
  Digest idx = {};
  friend bool operator==(const ShardSummary&, const ShardSummary&) = default;
};

// A shard, mapped read-only. A value: copies share the mapping. Any number of threads may read.
class TokenShard {
 public:
  // Opens PREFIX.bin and PREFIX.idx and checks the whole index against both files' sizes. Returns
  // kBadInput with the file and its fault: missing, truncated, trailing bytes, another format, or
  // inconsistent sizes, pointers or documents.
  [[nodiscard]] static Expected<TokenShard> open(const std::filesystem::path& prefix);

  [[nodiscard]] const std::filesystem::path& prefix() const { return prefix_; }
  [[nodiscard]] TokenType type() const { return type_; }
  [[nodiscard]] std::int64_t tokens() const { return tokens_; }
  [[nodiscard]] std::int64_t sequences() const { return sequences_; }
  [[nodiscard]] std::int64_t documents() const { return documents_; }
  // First token and number of tokens of a document.
  struct Range {
    std::int64_t first = 0;
    std::int64_t count = 0;
  };
  // Returns the tokens of a document. Requires 0 <= document < documents().
  [[nodiscard]] Range document(std::int64_t document) const;

  // Copies the tokens from `first` on. Requires 0 <= first and first + tokens.size() <= tokens(). A
  // value that does not fit an int32 becomes negative.
  void read(std::int64_t first, std::span<std::int32_t> tokens) const;

  // Reads both files completely. The digests equal those of the writer's summary if nothing has
  // changed.
  [[nodiscard]] ShardSummary summary() const;

 private:
  TokenShard() = default;
  Expected<void> check_index();
  [[nodiscard]] std::int64_t token_of_sequence(std::int64_t sequence) const;

  std::filesystem::path prefix_;
  std::shared_ptr<const MappedFile> bin_;
  std::shared_ptr<const MappedFile> idx_;
  TokenType type_ = TokenType::kUint16;
  std::int64_t tokens_ = 0;
  std::int64_t sequences_ = 0;
  std::int64_t documents_ = 0;
};

// Returns the type for all tokens below `vocabulary`: uint16, or int32 above 65536.
[[nodiscard]] TokenType token_type_for(std::int32_t vocabulary);

// Writes a shard as a stream. Tokens are written as they come, and the index (about 12 bytes a
// document) is kept until finish(). Both files appear under their names, durably, only then. A
// writer that is destroyed before finish() leaves no files. One thread uses it.
class TokenShardWriter {
 public:
  [[nodiscard]] static Expected<TokenShardWriter> create(const std::filesystem::path& prefix,
                                                         TokenType type = TokenType::kUint16);
  TokenShardWriter(TokenShardWriter&&) noexcept;
  TokenShardWriter& operator=(TokenShardWriter&&) noexcept;
  ~TokenShardWriter();

  // Adds tokens to the current document, each within the range of the type. A document may have any
  // length. The format limits a sequence to 2^31 - 1 tokens, so a longer document has several
  // sequences. Returns kBadInput if the disk fails.
  [[nodiscard]] Expected<void> append(std::span<const std::int32_t> tokens);
  // Ends the current document. Requires at least one token since the last call.
  void end_document();
  // Writes both files to the disk under temporary names. Returns kBadInput if the disk fails.
  // Requires that all tokens are in ended documents. Only finish() may be called after it.
  [[nodiscard]] Expected<void> write_out();
  // Publishes both files, after write_out() if that was not called. Returns kBadInput if the disk
  // fails. Nothing may be called after it.
  [[nodiscard]] Expected<ShardSummary> finish();

 private:
  struct State;
  explicit TokenShardWriter(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace dynmo::data
