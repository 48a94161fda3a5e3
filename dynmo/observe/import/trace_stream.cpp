// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "dynmo/core/units.h"
#include "dynmo/observe/import/trace_stream_impl.h"

namespace dynmo::observe {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{256} << 10;

Error stream_error(std::string_view what, const std::string& path) {
  return make_error(ErrorCode::kBadInput, "cannot {} '{}': {}", what, path, std::strerror(errno));
}

}  // namespace

TraceStream::TraceStream(const std::filesystem::path& path)
    : buffer_(kBufferBytes), path_(path.string()) {
  begin_ = end_ = buffer_.data();
  file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file_ < 0) {
    fault_ = stream_error("open", path_);
  } else {
    fill();
  }
}

TraceStream::~TraceStream() {
  if (file_ >= 0) ::close(file_);
}

std::string_view TraceStream::head() const {
  constexpr std::size_t kHead = 512;
  const auto size = static_cast<std::size_t>(end_ - begin_);
  return {begin_, std::min(size, kHead)};
}

Expected<void> TraceStream::finish() const {
  return fault_ ? Expected<void>(*fault_) : Expected<void>();
}

void TraceStream::fill() {
  if (file_ < 0) return;  // a text, which ends here
  if (since_value_ > kMaxValueBytes) {
    fault_ = make_error(ErrorCode::kBadInput, "{}: a value has more than {}, wanted a trace", path_,
                        format_bytes(Bytes{static_cast<std::int64_t>(kMaxValueBytes)}));
    return;
  }
  ssize_t got = -1;
  do {
    got = ::read(file_, buffer_.data(), buffer_.size());
  } while (got < 0 && errno == EINTR);
  if (got < 0) fault_ = stream_error("read", path_);
  const auto bytes = static_cast<std::size_t>(std::max<ssize_t>(got, 0));
  since_value_ += bytes;
  begin_ = buffer_.data();
  end_ = begin_ + bytes;
}

}  // namespace dynmo::observe
