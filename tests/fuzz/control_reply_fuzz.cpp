// SPDX-License-Identifier: Apache-2.0
// What the leader of a run answers: a reply that is taken reads back as it was written.
#include "dynmo/elastic/control_messages.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {

using elastic::Reply;

Outcome run_target(std::string_view text) {
  const auto taken = elastic::parse_reply(text);
  if (!taken) return refused(taken.error());
  const std::string line = to_line(*taken);
  DYNMO_CHECK(line.find('\n') + 1 == line.size(), "one line, got {}", line);
  const auto again = elastic::parse_reply(std::string_view(line).substr(0, line.size() - 1));
  DYNMO_CHECK(again.has_value(), "a reply that reads back, got: {}", again.error().message);
  DYNMO_CHECK(to_line(*again) == line && again->place == taken->place &&
                  again->standby == taken->standby && again->leader == taken->leader &&
                  again->status == taken->status,
              "the same reply, got another");
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  Reply place{.done = true, .text = "join"};
  place.place = elastic::Place{.generation = 7,
                               .size = 4,
                               .rank = WorldRank(3),
                               .member = 5,
                               .address = "127.0.0.1",
                               .port = 29500,
                               .secret = 77};
  Reply standby{.done = true, .text = "waiting to join as rank 5"};
  standby.standby = 5;
  Reply status{.done = true, .text = "", .status = Json{{"step", 3}, {"ranks", {{{"rank", 0}}}}}};
  Reply moved = elastic::refusal(Error{ErrorCode::kPeerLost, "another rank leads the run now"});
  moved.again = true;
  moved.leader = elastic::JobFile{.address = "10.0.0.2", .port = 4321, .host = "node-1", .pid = 77};
  return {to_line(place), to_line(standby), to_line(status), to_line(moved),
          to_line(elastic::refusal(Error{ErrorCode::kInfeasible, "no plan fits"}))};
}

}  // namespace dynmo::fuzz
