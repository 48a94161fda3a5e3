// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/text_stream.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace dynmo::data {
namespace {

constexpr std::size_t kStreamBuffer = std::size_t{64} << 10;
static_assert(kStreamBuffer >= kCompressionBegin);

// Returns an error with the system's reason, if the standard library has set errno.
Error unreadable(const std::filesystem::path& path) {
  return make_error(ErrorCode::kBadInput, "cannot read '{}'{}", path.string(),
                    errno == 0 ? "" : fmt::format(": {}", std::strerror(errno)));
}

}  // namespace

Expected<TextStream> TextStream::open(const std::filesystem::path& path) {
  TextStream stream;
  stream.path_ = path;
  errno = 0;
  stream.file_.open(path, std::ios::binary);
  if (!stream.file_) return unreadable(path);
  stream.buffer_.resize(kStreamBuffer);
  DYNMO_TRY(stream.refill());
  stream.compression_ = compression_of(stream.unread_);
  stream.decoder_ = make_decoder(stream.compression_);
  return stream;
}

Expected<void> TextStream::refill() {
  errno = 0;
  file_.read(buffer_.data(), std::ssize(buffer_));
  if (file_.bad()) return unreadable(path_);
  unread_ = std::string_view(buffer_).substr(0, static_cast<std::size_t>(file_.gcount()));
  consumed_ += file_.gcount();
  ended_ = unread_.empty();
  return {};
}

Expected<std::size_t> TextStream::read(std::span<char> out) {
  const std::size_t wanted = out.size();
  while (!out.empty()) {
    if (unread_.empty() && !ended_ && file_.is_open()) DYNMO_TRY(refill());
    const std::size_t before = out.size();
    if (decoder_ != nullptr) {
      if (const auto done = decoder_->decode(unread_, out); !done) {
        made_ += static_cast<std::int64_t>(wanted - out.size());
        return damaged(done.error().message);
      }
    } else {
      const std::size_t count = std::min(unread_.size(), out.size());
      std::copy_n(unread_.begin(), count, out.begin());
      unread_.remove_prefix(count);
      out = out.subspan(count);
    }
    // A decoder may hold bytes that it has not written yet.
    if (out.size() == before && unread_.empty() && (ended_ || !file_.is_open())) break;
  }
  made_ += static_cast<std::int64_t>(wanted - out.size());
  if (!out.empty() && decoder_ != nullptr && !decoder_->is_whole()) return damaged("it ends early");
  return wanted - out.size();
}

Error TextStream::damaged(std::string_view cause) const {
  return make_error(ErrorCode::kBadInput,
                    "'{}', compressed by {}, is damaged behind {} bytes of its text: {}; wanted a "
                    "whole file: copy it again",
                    path_.string(), compression_ == Compression::kGzip ? "gzip" : "zstd", made_,
                    cause);
}

}  // namespace dynmo::data
