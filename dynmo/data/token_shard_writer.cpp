// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/file_system.h"
#include "dynmo/core/files.h"
#include "dynmo/data/shard_format_impl.h"
#include "dynmo/data/token_shard.h"

namespace dynmo::data {
namespace {

constexpr std::size_t kBufferTokens = std::size_t{1} << 19;
constexpr std::int64_t kLargestSequence = std::numeric_limits<std::int32_t>::max();

template <typename T>
void store(std::span<std::byte> bytes, std::size_t offset, T value) {
  std::memcpy(bytes.data() + offset, &value, sizeof value);
}

// Appends the tokens to `bytes` in the type of the .bin.
template <typename T>
void put(std::span<const std::int32_t> tokens, std::vector<std::byte>& bytes) {
  std::size_t offset = bytes.size();
  bytes.resize(offset + tokens.size() * sizeof(T));
  for (const std::int32_t token : tokens) {
    store(bytes, offset, static_cast<T>(token));
    offset += sizeof(T);
  }
}

}  // namespace

TokenType token_type_for(std::int32_t vocabulary) {
  return vocabulary <= 65536 ? TokenType::kUint16 : TokenType::kInt32;
}

struct TokenShardWriter::State {
  std::filesystem::path prefix;
  std::filesystem::path unfinished;        // PREFIX.bin.tmp
  std::filesystem::path unfinished_index;  // PREFIX.idx.tmp
  std::optional<Digest> index;             // once it is written
  int file = -1;
  TokenType type = TokenType::kUint16;
  std::vector<std::byte> buffer;  // of up to kBufferTokens tokens
  Digester digester;
  std::vector<std::int32_t> sizes;             // by sequence
  std::vector<std::int64_t> boundaries = {0};  // sequences before each document's end
  std::int64_t open_tokens = 0;                // of the sequence being written
  std::int64_t tokens = 0;

  ~State() {
    if (file < 0) return;
    ::close(file);
    ::unlink(unfinished.c_str());
    ::unlink(unfinished_index.c_str());
  }

  [[nodiscard]] Error fault() const { return fault_of(unfinished); }
  [[nodiscard]] static Error fault_of(const std::filesystem::path& path) {
    return make_error(ErrorCode::kBadInput, "cannot write '{}': {}", path.string(),
                      std::strerror(errno));
  }

  Expected<void> flush() {
    auto bytes = std::span<const std::byte>(buffer);
    digester.update(bytes);
    while (!bytes.empty()) {
      const ssize_t written = ::write(file, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return fault();
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
    buffer.clear();
    return {};
  }

  void end_sequence() {
    sizes.push_back(static_cast<std::int32_t>(open_tokens));
    open_tokens = 0;
  }

  Expected<void> publish() {
    // Closes the file first, because some file systems rename no open file.
    const bool closed = ::close(std::exchange(file, -1)) == 0;
    for (const auto& [from, ending] :
         {std::pair(&unfinished, ".bin"), {&unfinished_index, ".idx"}}) {
      if (closed && rename_over(*from, prefix.string() + ending)) continue;
      const Error why = fault_of(*from);
      ::unlink(unfinished.c_str());
      ::unlink(unfinished_index.c_str());
      return why;
    }
    return sync_directory(prefix.parent_path());
  }

  Expected<Digest> write_index() {
    std::array<std::byte, kIndexHeaderBytes> header{};
    std::memcpy(header.data(), kIndexMagic.data(), kIndexMagic.size());
    store(header, kVersionOffset, kIndexVersion);
    store(header, kTypeOffset, type);
    store(header, kSequencesOffset, std::uint64_t{sizes.size()});
    store(header, kDocumentsOffset, std::uint64_t{boundaries.size()});
    std::vector<std::int64_t> pointers;
    pointers.reserve(sizes.size());
    std::int64_t position = 0;
    for (const std::int32_t size : sizes) {
      pointers.push_back(position);
      position += std::int64_t{size} * bytes_per_token(type);
    }
    const std::array<std::span<const std::byte>, 4> pieces = {
        header, std::as_bytes(std::span(sizes)), std::as_bytes(std::span(pointers)),
        std::as_bytes(std::span(boundaries))};
    DYNMO_TRY(write_file_durably(unfinished_index, pieces));
    Digester written;
    for (const auto piece : pieces) written.update(piece);
    return written.digest();
  }
};

TokenShardWriter::TokenShardWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
TokenShardWriter::TokenShardWriter(TokenShardWriter&&) noexcept = default;
TokenShardWriter& TokenShardWriter::operator=(TokenShardWriter&&) noexcept = default;
TokenShardWriter::~TokenShardWriter() = default;

Expected<TokenShardWriter> TokenShardWriter::create(const std::filesystem::path& prefix,
                                                    TokenType type) {
  DYNMO_CHECK(type == TokenType::kUint16 || type == TokenType::kInt32, "uint16 or int32, got {}",
              name(type));
  auto state = std::make_unique<State>();
  state->type = type;
  state->prefix = prefix;
  state->unfinished = prefix.string() + ".bin.tmp";
  state->unfinished_index = prefix.string() + ".idx.tmp";
  state->file = ::open(state->unfinished.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (state->file < 0) return state->fault();
  state->buffer.reserve(kBufferTokens * static_cast<std::size_t>(bytes_per_token(type)));
  return TokenShardWriter(std::move(state));
}

Expected<void> TokenShardWriter::append(std::span<const std::int32_t> tokens) {
  State& state = *state_;
  const auto width = static_cast<std::size_t>(bytes_per_token(state.type));
  while (!tokens.empty()) {
    if (state.open_tokens == kLargestSequence) state.end_sequence();
    const std::size_t waiting = state.buffer.size() / width;
    if (waiting == kBufferTokens) {
      DYNMO_TRY(state.flush());
      continue;
    }
    const std::size_t room = kBufferTokens - waiting;
    const auto left = static_cast<std::size_t>(kLargestSequence - state.open_tokens);
    const std::size_t count = std::min({tokens.size(), room, left});
    const auto piece = tokens.first(count);
    if (state.type == TokenType::kUint16) {
      put<std::uint16_t>(piece, state.buffer);
    } else {
      put<std::int32_t>(piece, state.buffer);
    }
    state.open_tokens += static_cast<std::int64_t>(count);
    state.tokens += static_cast<std::int64_t>(count);
    tokens = tokens.subspan(count);
  }
  return {};
}

void TokenShardWriter::end_document() {
  DYNMO_CHECK(state_->open_tokens > 0, "a document of at least one token");
  state_->end_sequence();
  state_->boundaries.push_back(static_cast<std::int64_t>(state_->sizes.size()));
}

Expected<void> TokenShardWriter::write_out() {
  State& state = *state_;
  DYNMO_CHECK(state.open_tokens == 0, "every document ended, {} tokens are in none",
              state.open_tokens);
  DYNMO_TRY(state.flush());
  if (!sync_open(state.file, state.unfinished)) return state.fault();
  DYNMO_ASSIGN(state.index, state.write_index());
  return {};
}

Expected<ShardSummary> TokenShardWriter::finish() {
  State& state = *state_;
  if (!state.index) DYNMO_TRY(write_out());
  DYNMO_TRY(state.publish());
  return ShardSummary{.documents = static_cast<std::int64_t>(state.boundaries.size()) - 1,
                      .tokens = state.tokens,
                      .bin = state.digester.digest(),
                      .idx = *state.index};
}

}  // namespace dynmo::data
