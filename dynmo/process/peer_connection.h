// SPDX-License-Identifier: Apache-2.0
#pragma once

// Defines the frames between the control planes of two processes, and one end of their connection.
// A connection serves all groups that the two share. A group has a channel on it, whose number the
// connecting end chooses. The connection belongs to the plane's thread and never blocks it.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/process/sockets.h"

namespace dynmo::process {

// A frame has the length of what follows (4 bytes), a type (1), and bytes that depend on the type.
// Numbers are in the machine's order, because the ranks of a group have one architecture.
enum class FrameType : char {
  kHello,  // the first of either end: secret (8), member (8)
  kBeat,   // empty
  // The next frames have a group's channel (4), followed by these bytes:
  kJoin,     // to rank 0: generation (8), rank (4)
  kDone,     // to rank 0: empty
  kAllDone,  // from rank 0: empty
  kVerdict,  // code (4), text
  kWord,     // length of the key (4), key, value
  kGone,     // empty; the sender's end of the group has ended
  // The next frames have no channel.
  kAsk,     // empty; requests a notice
  kNotice,  // text
};

struct Frame {
  FrameType type = FrameType::kBeat;
  std::string_view rest;
};

struct Hello {
  std::uint64_t secret = 0;
  std::uint64_t member = 0;
};

struct Join {
  Generation generation = 0;
  WorldRank rank;
};

struct Word {
  std::string key;
  std::string value;
};

// A group's frame: its channel and the bytes that follow it.
struct OfGroup {
  std::uint32_t channel = 0;
  std::string_view rest;
};

// Encodes the whole frame.
[[nodiscard]] std::string encode(FrameType type, std::string_view rest = {});
[[nodiscard]] std::string encode(const Hello& hello);
[[nodiscard]] std::string encode(FrameType type, const OfGroup& of_group);

// Encodes the bytes that follow the channel.
[[nodiscard]] std::string text_of(const Join& join);
[[nodiscard]] std::string text_of(const Word& word);
[[nodiscard]] std::string text_of(const Error& verdict);

// Parses the bytes behind a frame's type, or behind its channel for a Join, verdict or Word.
// Returns nullopt if they are malformed.
[[nodiscard]] std::optional<Hello> parse_hello(std::string_view rest);
[[nodiscard]] std::optional<OfGroup> parse_of_group(std::string_view rest);
[[nodiscard]] std::optional<Join> parse_join(std::string_view rest);
[[nodiscard]] std::optional<Error> parse_verdict(std::string_view rest);
[[nodiscard]] std::optional<Word> parse_word(std::string_view rest);

struct PeerConnection {
  enum class State { kOpen, kClosed };
  using Clock = std::chrono::steady_clock;

  // Sends what the system takes at once. If the connection fails, receive() returns kClosed.
  void flush();
  // Reads what has arrived.
  [[nodiscard]] State receive();
  // Calls `handle` with each whole frame that has arrived, until it returns kClosed. Also returns
  // kClosed for bytes that are no frame.
  template <typename Handle>
  [[nodiscard]] State take_frames(const Handle& handle);

  UniqueFd socket;
  // The other end has sent its hello, or this end has connected to it.
  bool known = false;
  std::string in;
  std::string out;
  Clock::time_point last_received = Clock::now();

 private:
  // Returns the length of the first frame behind its length field. Returns 0 if the frame is
  // incomplete, and nullopt if no frame may have this length.
  [[nodiscard]] std::optional<std::size_t> first_frame() const;
};

template <typename Handle>
PeerConnection::State PeerConnection::take_frames(const Handle& handle) {
  while (true) {
    const auto length = first_frame();
    if (!length) return State::kClosed;
    if (*length == 0) return State::kOpen;
    const std::string_view bytes = std::string_view(in).substr(sizeof(std::uint32_t), *length);
    const Frame frame{.type = static_cast<FrameType>(bytes.front()), .rest = bytes.substr(1)};
    if (handle(frame) == State::kClosed) return State::kClosed;
    in.erase(0, sizeof(std::uint32_t) + *length);
  }
}

}  // namespace dynmo::process
