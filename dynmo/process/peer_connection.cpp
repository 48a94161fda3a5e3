// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/peer_connection.h"

#include <cstring>

namespace dynmo::process {
namespace {

constexpr std::size_t kMaxVerdictText = 4000;
constexpr std::size_t kMaxFrame = 8192;  // of a connection without a hello so far
constexpr std::size_t kMaxKnownFrame = std::size_t{8} << 20;

template <typename T>
void append(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <typename T>
T take(std::string_view& bytes) {
  T value{};
  std::memcpy(&value, bytes.data(), sizeof value);
  bytes.remove_prefix(sizeof value);
  return value;
}

}  // namespace

std::string encode(FrameType type, std::string_view rest) {
  std::string bytes;
  append(bytes, static_cast<std::uint32_t>(rest.size() + 1));
  append(bytes, type);
  bytes.append(rest);
  return bytes;
}

std::string encode(const Hello& hello) {
  std::string rest;
  append(rest, hello.secret);
  append(rest, hello.member);
  return encode(FrameType::kHello, rest);
}

std::string encode(FrameType type, const OfGroup& of_group) {
  std::string rest;
  append(rest, of_group.channel);
  rest += of_group.rest;
  return encode(type, rest);
}

std::string text_of(const Join& join) {
  std::string rest;
  append(rest, join.generation);
  append(rest, join.rank.value);
  return rest;
}

std::string text_of(const Word& word) {
  std::string rest;
  append(rest, static_cast<std::uint32_t>(word.key.size()));
  rest += word.key;
  rest += word.value;
  return rest;
}

std::string text_of(const Error& verdict) {
  std::string rest;
  append(rest, static_cast<std::int32_t>(verdict.code));
  rest.append(verdict.message, 0, kMaxVerdictText);
  return rest;
}

std::optional<Hello> parse_hello(std::string_view rest) {
  if (rest.size() != sizeof(Hello::secret) + sizeof(Hello::member)) return std::nullopt;
  const auto secret = take<std::uint64_t>(rest);
  return Hello{.secret = secret, .member = take<std::uint64_t>(rest)};
}

std::optional<OfGroup> parse_of_group(std::string_view rest) {
  if (rest.size() < sizeof(OfGroup::channel)) return std::nullopt;
  const auto channel = take<std::uint32_t>(rest);
  return OfGroup{.channel = channel, .rest = rest};
}

std::optional<Join> parse_join(std::string_view rest) {
  if (rest.size() != sizeof(Join::generation) + sizeof(Join::rank.value)) return std::nullopt;
  const auto generation = take<Generation>(rest);
  return Join{.generation = generation, .rank = WorldRank(take<std::int32_t>(rest))};
}

std::optional<Error> parse_verdict(std::string_view rest) {
  if (rest.size() < sizeof(std::int32_t)) return std::nullopt;
  const auto code = take<std::int32_t>(rest);
  if (code < 0 || code > static_cast<std::int32_t>(ErrorCode::kInternal)) return std::nullopt;
  return Error{static_cast<ErrorCode>(code), std::string(rest)};
}

std::optional<Word> parse_word(std::string_view rest) {
  if (rest.size() < sizeof(std::uint32_t)) return std::nullopt;
  const auto length = take<std::uint32_t>(rest);
  if (length > rest.size()) return std::nullopt;
  return Word{.key = std::string(rest.substr(0, length)),
              .value = std::string(rest.substr(length))};
}

void PeerConnection::flush() {
  if (socket && !send_present(socket, out)) out.clear();
}

PeerConnection::State PeerConnection::receive() {
  const std::size_t before = in.size();
  const bool open = receive_present(socket, in, 2 * kMaxFrame);
  if (in.size() > before) last_received = Clock::now();
  return open ? State::kOpen : State::kClosed;
}

std::optional<std::size_t> PeerConnection::first_frame() const {
  std::string_view bytes = in;
  if (bytes.size() < sizeof(std::uint32_t)) return 0;
  const auto length = take<std::uint32_t>(bytes);
  if (length == 0 || length > (known ? kMaxKnownFrame : kMaxFrame)) return std::nullopt;
  return bytes.size() < length ? 0 : length;
}

}  // namespace dynmo::process
