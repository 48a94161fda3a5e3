// SPDX-License-Identifier: Apache-2.0
#pragma once

// Members send each other these messages to change their view; this file defines their bytes. How
// many bytes a frame has, its transport says; what is in them is checked here, for they come from
// outside.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/elastic/member.h"
#include "dynmo/elastic/recovery.h"

namespace dynmo::elastic {

// Longer frames are refused unread.
inline constexpr std::size_t kFrameLimit = std::size_t{16} << 20;

// Losses of the same step, one after another: the third ends the run.
struct Losses {
  std::int64_t step = -1;
  std::int32_t count = 0;
  friend bool operator==(const Losses&, const Losses&) = default;
};

// All that a member knows of views: what the quorum is counted from.
struct Standing {
  View installed = {};              // none: a newcomer whose first view is not in force yet
  std::vector<View> earlier = {};   // whose left-out members may be alive
  std::vector<View> attempts = {};  // taken part in since `installed`, oldest first
  std::vector<MemberId> gone = {};  // certainly dead or left for good; ascending
  Losses losses = {};
  friend bool operator==(const Standing&, const Standing&) = default;
};

struct Notice {  // to the leader: where the sender is
  Ballot promised;
  bool in_trouble = true;  // its group failed, or an answer is waited for; else only connected anew
  friend bool operator==(const Notice&, const Notice&) = default;
};
struct Prepare {
  Ballot ballot;
  friend bool operator==(const Prepare&, const Prepare&) = default;
};
struct Refuse {
  Ballot ballot;
  Generation seen = 0;  // the next ballot is above this
  friend bool operator==(const Refuse&, const Refuse&) = default;
};
struct Reported {
  Ballot ballot;
  Standing standing;
  Report report;
  friend bool operator==(const Reported&, const Reported&) = default;
};
struct Form {
  Ballot ballot;
  View view;
  std::vector<View> before = {};  // whose quorum this view has
  std::vector<MemberId> gone = {};
  Losses losses = {};
  Decision decision = {};
  friend bool operator==(const Form&, const Form&) = default;
};
struct Out {  // the others went on without the receiver
  Ballot ballot;
  friend bool operator==(const Out&, const Out&) = default;
};
struct OutAcknowledged {
  Ballot ballot;
  friend bool operator==(const OutAcknowledged&, const OutAcknowledged&) = default;
};
struct End {  // of the run, for all
  Ballot ballot;
  std::int32_t code = 0;
  std::string reason = {};
  friend bool operator==(const End&, const End&) = default;
};

using Message = std::variant<Notice, Prepare, Refuse, Reported, Form, Out, OutAcknowledged, End>;

// kBadInput where the message is longer than the limit: a model of too many layers.
[[nodiscard]] Expected<std::string> encode(const Message& message);
// kBadInput for anything that encode() has not made. Allocates a small multiple of the bytes.
[[nodiscard]] Expected<Message> decode(std::string_view bytes);

}  // namespace dynmo::elastic
