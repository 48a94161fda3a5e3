// SPDX-License-Identifier: Apache-2.0
// Actions as text, one between blanks or commas: what is taken is spelled in one way.
#include "dynmo/schedule/text.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {

Outcome run_target(std::string_view text) {
  Outcome outcome = Outcome::kRefused;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find_first_of(" ,\n", begin), text.size());
    const std::string_view word = text.substr(begin, end - begin);
    begin = end + 1;
    const auto action = schedule::parse_action(word);
    if (!action) {
      (void)refused(action.error());
      continue;
    }
    outcome = Outcome::kTaken;
    const auto again = schedule::parse_action(schedule::to_string(*action));
    DYNMO_CHECK(again.has_value() && *again == *action, "an action that reads back, got '{}'",
                word);
  }
  return outcome;
}

std::vector<std::string> seeds() {
  return {"2F0 2B0 12I3 0W44,1SEND_F0,1RECV_F0 1SEND_B0\n1RECV_B0", "2147483647F2147483647"};
}

}  // namespace dynmo::fuzz
