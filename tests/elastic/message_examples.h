// SPDX-License-Identifier: Apache-2.0
#pragma once

// One message of each kind, with something in every field.

#include <string>
#include <vector>

#include "dynmo/elastic/messages.h"

namespace dynmo::elastic {

inline std::vector<Message> message_examples() {
  const Member first{.id = {~0ULL}, .number = 0, .host = "a", .pid = 7, .address = "a:1"};
  const Member second{
      .id = {5}, .number = 3, .host = "b", .pid = 1 << 20, .address = "[::1]:65535"};
  const View view{.generation = 9, .members = {first, second}};
  const Ballot ballot{.number = 10, .proposer = first.id};
  const Standing standing{.installed = view,
                          .earlier = {{.generation = 8, .members = {second}}},
                          .attempts = {view, view},
                          .gone = {{3}, {4}},
                          .losses = {.step = 6, .count = 2}};
  const Report report{.member = second,
                      .step = 12,
                      .gradients_complete = true,
                      .updated = UpdateRecord{.step = 11, .exchange = std::string("\0bytes", 6)},
                      .holdings = {{.layer = LayerId(0), .step = 12},
                                   {.layer = LayerId(4), .step = 8, .kind = CopyKind::kNeighbour}},
                      .checkpoint = 10};
  const Decision decision{.step = 12, .finish = report.updated};
  return {Notice{ballot, false},
          Prepare{ballot},
          Refuse{ballot, 44},
          Reported{ballot, standing, report},
          Form{.ballot = ballot,
               .view = view,
               .before = {view},
               .gone = standing.gone,
               .losses = standing.losses,
               .decision = decision},
          Out{ballot},
          OutAcknowledged{ballot},
          End{ballot, 3, "no plan fits"}};
}

}  // namespace dynmo::elastic
