// SPDX-License-Identifier: Apache-2.0
// A message between members that is taken has the same bytes when it is written again, and a
// member of a run survives it.
#include "dynmo/elastic/membership.h"
#include "tests/elastic/message_examples.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {

Outcome run_target(std::string_view text) {
  const auto message = elastic::decode(text);
  if (!message) return refused(message.error());
  const auto again = elastic::encode(*message);
  DYNMO_CHECK(again.has_value() && *again == text, "{} bytes that are written again", text.size());
  const elastic::View view{.generation = 1,
                           .members = {{.id = {1}, .number = 0}, {.id = {2}, .number = 1}}};
  for (const elastic::MemberId self : {elastic::MemberId{1}, elastic::MemberId{2}}) {
    elastic::Membership membership = elastic::first_member({.model = {.layers = 2}}, view, self);
    (void)elastic::handle(membership, elastic::Received{view.members[0].id, *message});
    (void)elastic::handle(membership, elastic::Quieted{{.member = membership.self}});
    (void)elastic::handle(membership, elastic::Received{view.members[1].id, *message});
  }
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  std::vector<std::string> all;
  for (const elastic::Message& message : elastic::message_examples()) {
    all.push_back(*elastic::encode(message));
  }
  return all;
}

}  // namespace dynmo::fuzz
