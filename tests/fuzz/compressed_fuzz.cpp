// SPDX-License-Identifier: Apache-2.0
// Compressed bytes give the same text for output buffers of any size, or are refused.
#include "dynmo/data/text_stream.h"
#include "tests/fuzz/target.h"
#include "tests/support/compressed.h"

namespace dynmo::fuzz {
namespace {

// Returns the text, at most 1 MiB of it, and whether the bytes were taken as a whole file.
std::pair<std::string, bool> decoded(std::string_view bytes, std::size_t piece) {
  const auto decoder = data::make_decoder(data::compression_of(bytes));
  std::string text;
  while (text.size() < (1U << 20)) {
    std::string buffer(piece, '\0');
    std::span<char> out(buffer);
    const std::size_t before = bytes.size();
    if (!decoder->decode(bytes, out)) return {text, false};
    text += buffer.substr(0, piece - out.size());
    if (out.size() == piece && bytes.size() == before) return {text, decoder->is_whole()};
  }
  return {text.substr(0, 1U << 20), true};
}

}  // namespace

Outcome run_target(std::string_view text) {
  const data::Compression compression = data::compression_of(text);
  if (compression == data::Compression::kNone) return Outcome::kRefused;
  const auto large = decoded(text, 65536);
  const auto small = decoded(text, 61);
  const bool both = large.second && small.second;
  // (libzstd compares the stated size of a frame without content only if it has room for all.)
  DYNMO_CHECK(large.second == small.second || compression == data::Compression::kZstd,
              "the same outcome, got {}", small.second);
  DYNMO_CHECK(!both || large.first == small.first, "the same text of {} bytes, got {}",
              large.first.size(), small.first.size());
  return both ? Outcome::kTaken : Outcome::kRefused;
}

std::vector<std::string> seeds() {
  const std::string text = "{\"text\": \"one line, and one line, and one\"}\n";
  return {gzip_of(text), gzip_of(text, 0) + gzip_of(text), zstd_of(text),
          zstd_of(text + text, 19) + zstd_of("")};
}

}  // namespace dynmo::fuzz
