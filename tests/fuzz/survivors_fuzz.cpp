// SPDX-License-Identifier: Apache-2.0
// The call of another process, and what it knows of views: whatever it says, a survivor takes part
// in no view without itself, and what is taken is the same when it is written again.
#include "dynmo/elastic/survivors.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {
namespace {

elastic::View view_of(Generation generation, const std::vector<std::uint64_t>& ids) {
  elastic::View view{.generation = generation};
  for (const std::uint64_t id : ids) {
    view.members.push_back({.id = {id},
                            .number = static_cast<std::int32_t>(id) - 1,
                            .host = "host-" + std::to_string(id),
                            .pid = 1});
  }
  return view;
}

}  // namespace

Outcome run_target(std::string_view text) {
  const elastic::View before = view_of(1, {1, 2, 3});
  elastic::Standing standing{.open = {view_of(0, {1, 2, 3, 4})}};
  elastic::Survivors survivors(
      {.before = before, .generation = 1, .replicas = 1, .why = {}}, before.members[1],
      [&](const elastic::Member& member) -> elastic::Answer {
        return {.fate = member.number == 0 ? elastic::Fate::kAlive : elastic::Fate::kDead,
                .notice = std::string(text)};
      },
      standing);
  survivors.look(elastic::Survivors::Clock::now());
  const auto call = survivors.heard();
  if (call && call->next.has(before.members[1].id)) {
    DYNMO_CHECK(elastic::may_form(call->next, before, standing), "a quorum");
  }
  const auto json = parse_json(text, "what another knows");
  if (!json) return refused(json.error());
  const auto known = elastic::parse_standing(*json, "what another knows");
  if (!known) return call ? Outcome::kTaken : refused(known.error());
  const auto again = elastic::parse_standing(elastic::to_json(*known), "the same");
  DYNMO_CHECK(again.has_value() && *again == *known, "the same again");
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  const elastic::Place place{
      .generation = 2, .size = 2, .address = "10.0.0.1", .port = 7, .secret = 5};
  std::vector<std::string> all;
  for (const auto& next : {view_of(2, {1, 2}), view_of(2, {1, 3}), view_of(3, {1, 2, 3, 4})}) {
    all.push_back(
        elastic::text_of({.next = next, .place = place, .spares = {{2}}, .dead = {{3}, {4}}}));
    all.push_back(elastic::to_json(elastic::Standing{.open = {next}, .dead = {{1}}}).dump());
  }
  return all;
}

}  // namespace dynmo::fuzz
