// SPDX-License-Identifier: Apache-2.0
// Bytes from the network to a watchdog: they come from an unknown process, then from a rank that
// has said hello. Whole frames are taken one by one, none above its limit; what is parsed of one is
// written again as the same bytes.
#include "dynmo/process/peer_connection_impl.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {
namespace {

using process::Frame;
using process::FrameType;
using process::PeerConnection;

template <typename Parsed, typename Encode>
bool same(const Frame& frame, const std::optional<Parsed>& parsed, Encode encode) {
  if (!parsed) return false;
  DYNMO_CHECK(encode(*parsed) == process::encode(frame.type, frame.rest),
              "{} bytes that are written again", frame.rest.size());
  return true;
}

bool taken(const Frame& frame) {
  switch (frame.type) {
    case FrameType::kHello:
      return same(frame, process::parse_hello(frame.rest),
                  [](const process::Hello& hello) { return process::encode(hello); });
    case FrameType::kVerdict: {
      const auto verdict = process::parse_verdict(frame.rest);
      if (!verdict) return false;
      DYNMO_CHECK(exit_code(verdict->code) > 0, "a code that ends with an error");
      const auto again = process::encode_verdict(*verdict);
      DYNMO_CHECK(again.size() <= frame.rest.size() + 5, "no more bytes than came");
      return true;
    }
    case FrameType::kWord:
      return same(frame, process::parse_word(frame.rest),
                  [](const process::Word& word) { return process::encode(word); });
    default:
      return true;
  }
}

}  // namespace

Outcome run_target(std::string_view text) {
  constexpr std::size_t kStrangersFrame = 8192;
  bool any = false;
  for (const int rank : {-1, 1}) {
    PeerConnection peer;
    peer.rank = rank;
    peer.in = text;
    (void)peer.take_frames([&](const Frame& frame) {
      DYNMO_CHECK(rank > 0 || frame.rest.size() < kStrangersFrame, "{} bytes of an unknown process",
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
  const std::string hello = process::encode(process::Hello{.secret = 7, .rank = WorldRank(1)});
  const std::string word = process::encode(process::Word{.key = "rank.1", .value = "here"});
  const std::string verdict =
      process::encode_verdict({.code = ErrorCode::kPeerLost, .message = "rank 2 was lost"});
  const std::string beat = process::encode(FrameType::kBeat);
  return {hello, word, verdict, hello + beat + word + verdict + process::encode(FrameType::kDone),
          process::encode(FrameType::kAllDone)};
}

}  // namespace dynmo::fuzz
