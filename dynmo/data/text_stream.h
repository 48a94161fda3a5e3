// SPDX-License-Identifier: Apache-2.0
#pragma once

// The bytes of a file as a stream, decompressed if its content is gzip or zstd. The content
// decides, not the name. Memory does not grow with the file. It is a buffer and the window of the
// format: 32 KiB for gzip, and at most 128 MiB for zstd.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"

namespace dynmo::data {

enum class Compression { kNone, kGzip, kZstd };
// Returns how the bytes that begin with `begin` are compressed.
[[nodiscard]] Compression compression_of(std::string_view begin);
inline constexpr std::size_t kCompressionBegin = 4096;  // bytes that compression_of() needs

// Decodes one format. One thread uses it.
class Decoder {
 public:
  Decoder() = default;
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;
  virtual ~Decoder() = default;
  // Decodes bytes of `in` into `out`, and removes the used part from the beginning of both. The
  // error has only the cause: "incorrect data check".
  [[nodiscard]] virtual Expected<void> decode(std::string_view& in, std::span<char>& out) = 0;
  // Returns whether a file may end here.
  [[nodiscard]] virtual bool is_whole() const = 0;
};
// Makes a decoder, or returns nullptr for kNone.
[[nodiscard]] std::unique_ptr<Decoder> make_decoder(Compression compression);

// Reads a file, and decompresses it if it is compressed. One thread uses it. A second read of the
// same file opens it again.
class TextStream {
 public:
  TextStream() = default;  // without bytes until another is assigned
  // Opens the file. Returns kBadInput with the path if the file cannot be read.
  [[nodiscard]] static Expected<TextStream> open(const std::filesystem::path& path);
  // Reads until `out` is full or the file ends, and returns the number of bytes. Returns kBadInput
  // with path and cause for an unreadable file, and for damaged or truncated compressed data.
  [[nodiscard]] Expected<std::size_t> read(std::span<char> out);
  [[nodiscard]] Compression compression() const { return compression_; }
  // Returns the number of bytes of the file that were read so far, before decompression.
  [[nodiscard]] std::int64_t consumed() const { return consumed_; }

 private:
  [[nodiscard]] Expected<void> refill();
  [[nodiscard]] Error damaged(std::string_view cause) const;

  std::filesystem::path path_;
  std::ifstream file_;
  Compression compression_ = Compression::kNone;
  std::unique_ptr<Decoder> decoder_;  // null: the bytes are as in the file
  std::string buffer_;                // of the file
  std::string_view unread_;           // its part that is not used yet
  bool ended_ = false;                // the file has no further bytes
  std::int64_t consumed_ = 0;
  std::int64_t made_ = 0;  // bytes returned
};

}  // namespace dynmo::data
