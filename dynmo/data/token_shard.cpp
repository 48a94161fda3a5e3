// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/token_shard.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "dynmo/core/check.h"
#include "dynmo/core/files.h"
#include "dynmo/data/shard_format_impl.h"

namespace dynmo::data {
namespace {

static_assert(std::endian::native == std::endian::little, "token shards are little-endian");

// Loads a number that need not be aligned: the arrays of an index follow 34 bytes.
template <typename T>
T load(std::span<const std::byte> bytes, std::size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

std::filesystem::path with_ending(const std::filesystem::path& prefix, const char* ending) {
  return prefix.string() + ending;
}

template <typename T>
void copy_tokens(std::span<const std::byte> bin, std::int64_t first,
                 std::span<std::int32_t> tokens) {
  const std::byte* from = bin.data() + static_cast<std::size_t>(first) * sizeof(T);
  for (std::int32_t& token : tokens) {
    T value;
    std::memcpy(&value, from, sizeof value);
    from += sizeof value;
    if constexpr (sizeof(T) == 8) {
      token = value < 0 || value > std::numeric_limits<std::int32_t>::max()
                  ? -1
                  : static_cast<std::int32_t>(value);
    } else {
      token = static_cast<std::int32_t>(value);
    }
  }
}

// The fixed part of an index, and the places of the arrays behind it.
struct IndexHead {
  TokenType type = TokenType::kUint16;
  std::uint64_t sequences = 0;
  std::uint64_t boundaries = 0;  // documents + 1

  [[nodiscard]] std::uint64_t width() const {
    return static_cast<std::uint64_t>(bytes_per_token(type));
  }
  [[nodiscard]] std::size_t pointers() const { return kIndexHeaderBytes + sequences * 4; }
  [[nodiscard]] std::size_t documents() const { return pointers() + sequences * 8; }
  [[nodiscard]] std::uint64_t index_bytes() const { return documents() + boundaries * 8; }
};

Error index_fault(const std::string& file, const std::string& what) {
  return make_error(ErrorCode::kBadInput, "{}: {}", file, what);
}

// Returns an error if the file is not a token index of a known version.
Expected<void> check_index_format(std::span<const std::byte> bytes, const std::string& file) {
  const std::string_view head(reinterpret_cast<const char*>(bytes.data()),
                              std::min(bytes.size(), kIndexMagic.size()));
  if (!kIndexMagic.starts_with(head)) {
    const std::string other =
        known_content({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    if (!other.empty()) return index_fault(file, "not a token index but " + other);
    return index_fault(file, "not a token index: wanted a file that begins with MMIDIDX");
  }
  if (bytes.size() < kIndexHeaderBytes) {
    return index_fault(file, fmt::format("truncated: {} bytes are there, an index has at least {}",
                                         bytes.size(), kIndexHeaderBytes));
  }
  if (const auto version = load<std::uint64_t>(bytes, kVersionOffset); version != kIndexVersion) {
    return index_fault(file, fmt::format("index version {}, wanted {}", version, kIndexVersion));
  }
  return {};
}

// Returns the head of an index, or an error if the file's size differs from the one in the head.
Expected<IndexHead> read_index_head(std::span<const std::byte> bytes, const std::string& file) {
  DYNMO_TRY(check_index_format(bytes, file));
  const auto code = load<std::uint8_t>(bytes, kTypeOffset);
  const IndexHead head = {.type = static_cast<TokenType>(code),
                          .sequences = load<std::uint64_t>(bytes, kSequencesOffset),
                          .boundaries = load<std::uint64_t>(bytes, kDocumentsOffset)};
  if (head.width() == 0) {
    return index_fault(file, fmt::format("tokens of type code {}, wanted an integer type", code));
  }
  constexpr std::uint64_t kMaxEntries = std::uint64_t{1} << 58;  // so that no sum overflows
  if (head.sequences > kMaxEntries || head.boundaries > kMaxEntries) {
    return index_fault(
        file, fmt::format("{} sequences and {} document boundaries, more than a file can hold",
                          head.sequences, head.boundaries));
  }
  if (const std::uint64_t wanted = head.index_bytes(); wanted != bytes.size()) {
    return index_fault(
        file, fmt::format("{}{} bytes are there, wanted {} for {} sequences and {} document "
                          "boundaries",
                          bytes.size() < wanted ? "truncated: " : "", bytes.size(), wanted,
                          head.sequences, head.boundaries));
  }
  return head;
}

// Checks that the sequences are contiguous. Returns the bytes that all of them have in the .bin.
Expected<std::uint64_t> check_sequences(std::span<const std::byte> bytes, const IndexHead& head,
                                        const std::string& file) {
  std::uint64_t position = 0;
  for (std::size_t i = 0; i < head.sequences; ++i) {
    const auto size = load<std::int32_t>(bytes, kIndexHeaderBytes + i * 4);
    if (size < 0) {
      return index_fault(file, fmt::format("sequence {} has {} tokens", i, size));
    }
    const auto pointer = load<std::uint64_t>(bytes, head.pointers() + i * 8);
    if (pointer != position) {
      return index_fault(
          file, fmt::format("sequence {} begins at byte {}, wanted {}", i, pointer, position));
    }
    // One sequence adds less than 2^34 bytes, so the sum is stopped long before it can overflow.
    if (position >> 62 != 0) return index_fault(file, "more tokens than a file can hold");
    position += static_cast<std::uint64_t>(size) * head.width();
  }
  return position;
}

// Checks that the documents are ascending and have all sequences.
Expected<void> check_boundaries(std::span<const std::byte> bytes, const IndexHead& head,
                                const std::string& file) {
  std::uint64_t before = 0;
  for (std::size_t i = 0; i < head.boundaries; ++i) {
    const auto boundary = load<std::uint64_t>(bytes, head.documents() + i * 8);
    if (boundary < before || boundary > head.sequences || (i == 0 && boundary != 0)) {
      return index_fault(file, fmt::format("document boundary {} is sequence {}, wanted {} to {}",
                                           i, boundary, before, i == 0 ? 0 : head.sequences));
    }
    before = boundary;
  }
  if (head.boundaries == 0 || before != head.sequences) {
    return index_fault(
        file, fmt::format("the documents end at sequence {} of {}", before, head.sequences));
  }
  return {};
}

}  // namespace

std::string_view name(TokenType type) {
  switch (type) {
    case TokenType::kUint8:
      return "uint8";
    case TokenType::kInt8:
      return "int8";
    case TokenType::kInt16:
      return "int16";
    case TokenType::kInt32:
      return "int32";
    case TokenType::kInt64:
      return "int64";
    case TokenType::kUint16:
      return "uint16";
  }
  return "unknown";
}

int bytes_per_token(TokenType type) {
  switch (type) {
    case TokenType::kUint8:
    case TokenType::kInt8:
      return 1;
    case TokenType::kInt16:
    case TokenType::kUint16:
      return 2;
    case TokenType::kInt32:
      return 4;
    case TokenType::kInt64:
      return 8;
  }
  return 0;
}

Expected<TokenShard> TokenShard::open(const std::filesystem::path& prefix) {
  TokenShard shard;
  shard.prefix_ = prefix;
  DYNMO_ASSIGN(shard.idx_, MappedFile::open(with_ending(prefix, ".idx")));
  DYNMO_ASSIGN(shard.bin_, MappedFile::open(with_ending(prefix, ".bin")));
  DYNMO_TRY(shard.check_index());
  return shard;
}

Expected<void> TokenShard::check_index() {
  const std::string file = with_ending(prefix_, ".idx").string();
  const auto bytes = idx_->bytes();
  DYNMO_ASSIGN(const IndexHead head, read_index_head(bytes, file));
  type_ = head.type;
  sequences_ = static_cast<std::int64_t>(head.sequences);
  DYNMO_ASSIGN(const std::uint64_t wanted, check_sequences(bytes, head, file));
  if (wanted != bin_->bytes().size()) {
    return make_error(ErrorCode::kBadInput, "{}: {}{} bytes are there, wanted {} by its index",
                      with_ending(prefix_, ".bin").string(),
                      bin_->bytes().size() < wanted ? "truncated: " : "", bin_->bytes().size(),
                      wanted);
  }
  tokens_ = static_cast<std::int64_t>(wanted / head.width());
  DYNMO_TRY(check_boundaries(bytes, head, file));
  documents_ = static_cast<std::int64_t>(head.boundaries) - 1;
  return {};
}

std::int64_t TokenShard::token_of_sequence(std::int64_t sequence) const {
  if (sequence == sequences_) return tokens_;
  const auto offset =
      static_cast<std::size_t>(sequences_) * 4 + static_cast<std::size_t>(sequence) * 8;
  return load<std::int64_t>(idx_->bytes(), kIndexHeaderBytes + offset) / bytes_per_token(type_);
}

TokenShard::Range TokenShard::document(std::int64_t document) const {
  DYNMO_CHECK(document >= 0 && document < documents_, "a document below {}, got {}", documents_,
              document);
  const std::size_t offset = kIndexHeaderBytes + static_cast<std::size_t>(sequences_) * 12 +
                             static_cast<std::size_t>(document) * 8;
  const auto first = token_of_sequence(load<std::int64_t>(idx_->bytes(), offset));
  const auto end = token_of_sequence(load<std::int64_t>(idx_->bytes(), offset + 8));
  return {.first = first, .count = end - first};
}

void TokenShard::read(std::int64_t first, std::span<std::int32_t> tokens) const {
  const auto count = static_cast<std::int64_t>(tokens.size());
  DYNMO_CHECK(first >= 0 && count <= tokens_ && first <= tokens_ - count,
              "tokens within the {} of the shard, got {} from {}", tokens_, count, first);
  const auto bin = bin_->bytes();
  switch (type_) {
    case TokenType::kUint8:
      return copy_tokens<std::uint8_t>(bin, first, tokens);
    case TokenType::kInt8:
      return copy_tokens<std::int8_t>(bin, first, tokens);
    case TokenType::kInt16:
      return copy_tokens<std::int16_t>(bin, first, tokens);
    case TokenType::kInt32:
      return copy_tokens<std::int32_t>(bin, first, tokens);
    case TokenType::kInt64:
      return copy_tokens<std::int64_t>(bin, first, tokens);
    case TokenType::kUint16:
      return copy_tokens<std::uint16_t>(bin, first, tokens);
  }
}

ShardSummary TokenShard::summary() const {
  return {.documents = documents_,
          .tokens = tokens_,
          .bin = digest_of(bin_->bytes()),
          .idx = digest_of(idx_->bytes())};
}

}  // namespace dynmo::data
