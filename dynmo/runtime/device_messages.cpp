// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/device_messages.h"

#include <set>
#include <utility>
#include <vector>

#include "dynmo/schedule/lowering.h"
#include "dynmo/transport/grid.h"
#include "dynmo/transport/tags.h"

namespace dynmo::runtime {
namespace {

// A channel between two ranks of a pipeline, the same in all replicas.
struct Link {
  Rank from;
  Rank to;
  transport::Tag tag = 0;
  friend auto operator<=>(const Link&, const Link&) = default;
};

// Returns the sender and the receiver of each channel of a lowered schedule.
std::set<Link> links_of(const schedule::Schedule& lowered, int lane) {
  std::set<Link> links;
  for (const auto& actions : lowered.ranks) {
    for (const schedule::Action& action : actions) {
      if (action.kind != schedule::ActionKind::kSendActivation &&
          action.kind != schedule::ActionKind::kSendGradient) {
        continue;
      }
      const auto position = [&](const schedule::Action& end) {
        return lowered.shape.stages[end.stage.index()].rank;
      };
      links.insert({position(action), position(schedule::peer(action)),
                    transport::schedule_tag(lane, schedule::channel(action))});
    }
  }
  return links;
}

}  // namespace

DeviceMessages::DeviceMessages(const transport::Grid& grid, c10d::ChannelTransport* group)
    : group_(group) {
  if (group == nullptr) return;
  std::vector<WorldRank> ranks;
  for (int i = 0; i < grid.positions(); ++i) {
    ranks.push_back(grid.world_rank({grid.replica(), Rank(i)}));
  }
  transport_ = transport::subset(*group, std::move(ranks));
}

Expected<void> DeviceMessages::check() const {
  if (group_ == nullptr) return {};
  if (const auto failure = group_->failure()) return *failure;
  return {};
}

Expected<void> DeviceMessages::open(const transport::Grid& grid, const Program& program, int lane) {
  if (!due_) return {};
  due_ = false;
  std::set<Link> links = links_of(program.training, lane);
  links.merge(links_of(program.validation, lane));
  std::vector<c10d::Channel> of_group;
  for (int replica = 0; replica < grid.replicas(); ++replica) {
    for (const Link& link : links) {
      of_group.push_back(
          {grid.world_rank({replica, link.from}), grid.world_rank({replica, link.to}), link.tag});
    }
  }
  return group_->open(of_group);
}

}  // namespace dynmo::runtime
