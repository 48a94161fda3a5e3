// SPDX-License-Identifier: Apache-2.0
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <limits>
#include <new>

#include "dynmo/data/text_stream.h"

namespace dynmo::data {
namespace {

using std::string_view_literals::operator""sv;

constexpr std::string_view kGzipBegin = "\x1f\x8b"sv;  // RFC 1952
constexpr std::string_view kZstdBegin = "\x28\xb5\x2f\xfd"sv;

// Returns the size of a skippable frame (RFC 8878, 3.1.2), which pzstd writes first, or 0 if none
// begins here.
std::size_t skippable_frame(std::string_view bytes) {
  constexpr std::size_t kHead = 8;
  if (bytes.size() < kHead || bytes.substr(1, 3) != "\x2a\x4d\x18"sv) return 0;
  if ((static_cast<unsigned char>(bytes[0]) & 0xF0U) != 0x50U) return 0;
  std::size_t size = 0;
  for (std::size_t i = kHead; i > 4; --i) {
    size = size << 8 | static_cast<unsigned char>(bytes[i - 1]);
  }
  return kHead + size;
}

// Joins the members to one text, like gzip. Zeros behind the last member are padding of a tape or a
// disk.
class GzipDecoder final : public Decoder {
 public:
  GzipDecoder() {
    constexpr int kWindowOfGzip = 15 + 16;  // the largest window, only the format of gzip
    if (inflateInit2(&stream_, kWindowOfGzip) != Z_OK) throw std::bad_alloc();
  }
  GzipDecoder(const GzipDecoder&) = delete;
  GzipDecoder& operator=(const GzipDecoder&) = delete;
  ~GzipDecoder() override { inflateEnd(&stream_); }

  [[nodiscard]] Expected<void> decode(std::string_view& in, std::span<char>& out) override {
    if (!inside_) {
      if (members_ > 0) in.remove_prefix(std::min(in.find_first_not_of('\0'), in.size()));
      if (in.empty()) return {};
      if (members_ > 0 && in.front() != kGzipBegin.front()) {
        return make_error(ErrorCode::kBadInput, "its end is no gzip");
      }
      inflateReset(&stream_);
      inside_ = true;
      ++members_;
    }
    constexpr std::size_t kMost = std::numeric_limits<uInt>::max();
    // (zlib does not write to its input.)
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(in.data()));
    stream_.avail_in = static_cast<uInt>(std::min(in.size(), kMost));
    stream_.next_out = reinterpret_cast<Bytef*>(out.data());
    stream_.avail_out = static_cast<uInt>(std::min(out.size(), kMost));
    const int code = inflate(&stream_, Z_NO_FLUSH);
    in.remove_prefix(
        static_cast<std::size_t>(reinterpret_cast<const char*>(stream_.next_in) - in.data()));
    out = out.subspan(
        static_cast<std::size_t>(reinterpret_cast<const char*>(stream_.next_out) - out.data()));
    if (code == Z_STREAM_END) inside_ = false;
    if (code == Z_MEM_ERROR) throw std::bad_alloc();
    if (code == Z_OK || code == Z_STREAM_END || code == Z_BUF_ERROR) return {};
    return make_error(ErrorCode::kBadInput, "{}",
                      stream_.msg != nullptr ? stream_.msg : "no data of gzip");
  }
  [[nodiscard]] bool is_whole() const override { return !inside_; }

 private:
  z_stream stream_{};
  bool inside_ = false;  // a member
  std::int64_t members_ = 0;
};

class ZstdDecoder final : public Decoder {
 public:
  ZstdDecoder() : stream_(ZSTD_createDStream(), ZSTD_freeDStream) {
    if (stream_ == nullptr) throw std::bad_alloc();
  }

  [[nodiscard]] Expected<void> decode(std::string_view& in, std::span<char>& out) override {
    ZSTD_inBuffer from{.src = in.data(), .size = in.size(), .pos = 0};
    ZSTD_outBuffer to{.dst = out.data(), .size = out.size(), .pos = 0};
    const std::size_t left = ZSTD_decompressStream(stream_.get(), &to, &from);
    in.remove_prefix(from.pos);
    out = out.subspan(to.pos);
    if (ZSTD_isError(left) != 0U) {
      return make_error(ErrorCode::kBadInput, "{}", ZSTD_getErrorName(left));
    }
    // A call that had nothing to do returns that the next frame is expected.
    if (from.pos > 0 || to.pos > 0) left_ = left;
    return {};
  }
  [[nodiscard]] bool is_whole() const override { return left_ == 0; }

 private:
  std::unique_ptr<ZSTD_DStream, std::size_t (*)(ZSTD_DStream*)> stream_;
  std::size_t left_ = 0;  // of the frame; 0: it has ended
};

}  // namespace

Compression compression_of(std::string_view begin) {
  if (begin.starts_with(kGzipBegin)) return Compression::kGzip;
  for (std::size_t skipped = skippable_frame(begin); skipped > 0 && skipped < begin.size();) {
    begin.remove_prefix(skipped);
    skipped = skippable_frame(begin);
  }
  return begin.starts_with(kZstdBegin) ? Compression::kZstd : Compression::kNone;
}

std::unique_ptr<Decoder> make_decoder(Compression compression) {
  if (compression == Compression::kGzip) return std::make_unique<GzipDecoder>();
  if (compression == Compression::kZstd) return std::make_unique<ZstdDecoder>();
  return nullptr;
}

}  // namespace dynmo::data
