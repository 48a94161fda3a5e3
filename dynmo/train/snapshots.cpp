// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/snapshots.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "dynmo/model/state_bytes.h"
#include "dynmo/process/host_memory.h"
#include "dynmo/runtime/snapshot.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {
namespace {

constexpr double kMaxSteps = 1e6;  // from one to the next
constexpr double kMaxStepsAfterFirst = 10;

transport::Tag snapshot_tag() { return transport::control_tag(transport::Control::kSnapshot); }

// Returns a number a rank, equal ones for ranks of one host.
std::vector<int> hosts_of(const elastic::View& members) {
  std::map<std::string, int> numbers;
  std::vector<int> hosts;
  for (const elastic::Member& member : members.members) {
    hosts.push_back(
        numbers.try_emplace(member.host, static_cast<int>(numbers.size())).first->second);
  }
  return hosts;
}

}  // namespace

// Returns which rank lacks memory for a snapshot, or "". It needs the copies of its own layers, of
// those that it keeps, and of those that arrive.
Expected<std::string> Snapshots::missing_memory(const GroupRun& group, const elastic::View& members,
                                                transport::Transport& transport) const {
  Bytes layers;
  for (const auto& [id, layer] : group.pipeline().states()) {
    layers += model::tensor_bytes(layer);
  }
  const bool has_some = group.pipeline().state().snapshot.has_value();
  const std::array mine = {static_cast<double>(layers.value),
                           static_cast<double>(process::available_memory().value),
                           has_some ? 1.0 : 0.0};
  DYNMO_ASSIGN(const auto all, transport::gather_numbers(transport, snapshot_tag(), mine));
  double largest = 0;
  for (const auto& rank : all) largest = std::max(largest, rank[0]);
  // A device has a second copy of its own layers, for the next snapshot.
  const double own = group.pipeline().staging().device.is_cpu() ? 1 : 2;
  const std::vector<int> hosts = hosts_of(members);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const auto on_host = static_cast<double>(std::ranges::count(hosts, hosts[rank]));
    const double wanted = on_host * (own * all[rank][0] + 2 * largest);
    if (all[rank][1] == 0 || all[rank][2] > 0 || wanted <= all[rank][1]) continue;
    return fmt::format(
        "snapshots  none: the ranks on {} would take {} more, and {} are free there; a lost rank "
        "costs the steps since the last checkpoint",
        members.members[rank].host, format_bytes(Bytes{static_cast<std::int64_t>(wanted)}),
        format_bytes(Bytes{static_cast<std::int64_t>(all[rank][1])}));
  }
  return std::string();
}

Expected<Snapshots::Taken> Snapshots::take(GroupRun& group, const elastic::View& members,
                                           transport::Transport& transport) {
  const bool first = !next_;
  if (first) {
    DYNMO_ASSIGN(std::string missing, missing_memory(group, members, transport));
    wanted_ = missing.empty();
    if (!wanted_) return Taken{.line = std::move(missing)};
  }
  std::vector<WorldRank> keepers = runtime::keepers(hosts_of(members));
  DYNMO_ASSIGN(const runtime::MigrationReport report, group.pipeline().take_snapshot(keepers));
  const std::array mine = {report.seconds, steps_ > 0 ? step_s_ / static_cast<double>(steps_) : 0};
  DYNMO_ASSIGN(const auto all, transport::gather_numbers(transport, snapshot_tag(), mine));
  double seconds = 0;
  double step_s = 0;
  for (const auto& rank : all) {
    seconds = std::max(seconds, rank[0]);
    step_s = std::max(step_s, rank[1]);
  }
  // Before the first step its duration is unknown. A group's first snapshot takes longer, because
  // its memory is new.
  const double steps = step_s > 0 ? seconds / (cost_ * step_s) : 1;
  const double most = first ? kMaxStepsAfterFirst : kMaxSteps;
  next_ = group.pipeline().next_step() +
          static_cast<std::int64_t>(std::ceil(std::clamp(steps, 1.0, most)));
  step_s_ = 0;
  steps_ = 0;
  return Taken{
      .line = report.committed ? "" : fmt::format("snapshot  not taken: {}", report.refusal),
      .keepers = std::move(keepers)};
}

}  // namespace dynmo::train
