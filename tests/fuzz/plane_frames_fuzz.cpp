// SPDX-License-Identifier: Apache-2.0
// Bytes from the network to a control plane: they come from an unknown process, then from a rank
// that has said hello. Whole frames are taken one by one, none above its limit; what is parsed of
// one is written again as the same bytes.
#include "dynmo/process/peer_connection.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {
namespace {

using process::Frame;
using process::FrameType;
using process::PeerConnection;

// A parsed group's frame is written again as the same bytes.
template <typename Parsed>
bool same(std::string_view text, const std::optional<Parsed>& parsed) {
  if (!parsed) return false;
  DYNMO_CHECK(process::text_of(*parsed) == text, "{} bytes that are written again", text.size());
  return true;
}

bool group_frame_taken(FrameType type, std::string_view text) {
  switch (type) {
    case FrameType::kJoin:
      return same(text, process::parse_join(text));
    case FrameType::kWord:
      return same(text, process::parse_word(text));
    case FrameType::kVerdict: {
      const auto verdict = process::parse_verdict(text);
      if (!verdict) return false;
      DYNMO_CHECK(exit_code(verdict->code) > 0, "a code that ends with an error");
      DYNMO_CHECK(process::text_of(*verdict).size() <= text.size(), "no more bytes than came");
      return true;
    }
    default:
      return true;
  }
}

bool taken(const Frame& frame) {
  const std::string again = process::encode(frame.type, frame.rest);
  if (frame.type == FrameType::kBeat || frame.type == FrameType::kAsk ||
      frame.type == FrameType::kNotice) {
    return true;
  }
  if (frame.type == FrameType::kHello) {
    const auto hello = process::parse_hello(frame.rest);
    DYNMO_CHECK(!hello || process::encode(*hello) == again, "a hello that is written again");
    return hello.has_value();
  }
  const auto of_group = process::parse_of_group(frame.rest);
  if (!of_group) return false;
  DYNMO_CHECK(process::encode(frame.type, *of_group) == again, "a frame that is written again");
  return group_frame_taken(frame.type, of_group->rest);
}

}  // namespace

Outcome run_target(std::string_view text) {
  constexpr std::size_t kStrangersFrame = 8192;
  bool any = false;
  for (const bool known : {false, true}) {
    PeerConnection peer;
    peer.known = known;
    peer.in = text;
    (void)peer.take_frames([&](const Frame& frame) {
      DYNMO_CHECK(known || frame.rest.size() < kStrangersFrame, "{} bytes of an unknown process",
                  frame.rest.size());
      const bool good = taken(frame);
      any = any || good;
      return good ? PeerConnection::State::kOpen : PeerConnection::State::kClosed;
    });
    DYNMO_CHECK(peer.in.size() <= text.size(), "no bytes that did not come");
  }
  return any ? Outcome::kTaken : Outcome::kRefused;
}

std::vector<std::string> seeds() {
  const auto of_group = [](FrameType type, const std::string& text) {
    return process::encode(type, {.channel = 3, .rest = text});
  };
  const std::string hello = process::encode(process::Hello{.secret = 7, .member = 5});
  const std::string beat = process::encode(FrameType::kBeat);
  const std::string join = of_group(
      FrameType::kJoin, process::text_of(process::Join{.generation = 2, .rank = WorldRank(1)}));
  const std::string word =
      of_group(FrameType::kWord, process::text_of(process::Word{.key = "rank.1", .value = "here"}));
  const std::string verdict =
      of_group(FrameType::kVerdict,
               process::text_of(Error{.code = ErrorCode::kPeerLost, .message = "rank 2 was lost"}));
  const std::string done = of_group(FrameType::kDone, "");
  return {hello,
          hello + process::encode(FrameType::kAsk),
          hello + process::encode(FrameType::kNotice, "{}"),
          join,
          word,
          verdict,
          hello + join + beat + word + verdict + done,
          of_group(FrameType::kAllDone, "") + of_group(FrameType::kGone, "")};
}

}  // namespace dynmo::fuzz
