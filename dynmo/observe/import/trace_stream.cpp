// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "dynmo/core/units.h"
#include "dynmo/observe/import/trace_stream_impl.h"
#include "dynmo/process/sockets.h"

namespace dynmo::observe {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{256} << 10;

Error stream_error(std::string_view what, const std::string& path) {
  return make_error(ErrorCode::kBadInput, "cannot {} '{}': {}", what, path, std::strerror(errno));
}

}  // namespace

Expected<ReadTrace> open_plain_trace(const std::filesystem::path& path) {
  process::UniqueFd opened(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!opened) return stream_error("open", path.string());
  const auto file = std::make_shared<process::UniqueFd>(std::move(opened));
  return ReadTrace([file, name = path.string()](std::span<char> out) -> Expected<std::size_t> {
    ssize_t got = -1;
    do {
      got = ::read(file->get(), out.data(), out.size());
    } while (got < 0 && errno == EINTR);
    if (got < 0) return stream_error("read", name);
    return static_cast<std::size_t>(got);
  });
}

TraceStream::TraceStream(const std::filesystem::path& path, const OpenTrace& open)
    : buffer_(kBufferBytes), path_(path.string()) {
  begin_ = end_ = buffer_.data();
  auto opened = open(path);
  if (opened) {
    read_ = *std::move(opened);
    fill();
  } else {
    fault_ = opened.error();
  }
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
  if (!read_) return;
  if (since_value_ > kMaxValueBytes) {
    fault_ = make_error(ErrorCode::kBadInput, "{}: a value has more than {}, wanted a trace", path_,
                        format_bytes(Bytes{static_cast<std::int64_t>(kMaxValueBytes)}));
    return;
  }
  const Expected<std::size_t> got = read_(buffer_);
  if (!got) fault_ = got.error();
  const std::size_t bytes = got ? *got : 0;
  since_value_ += bytes;
  begin_ = buffer_.data();
  end_ = begin_ + bytes;
}

}  // namespace dynmo::observe
