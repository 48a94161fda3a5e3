// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/losses.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "dynmo/observe/table.h"
#include "dynmo/process/late_ranks.h"

namespace dynmo::train {
namespace {

constexpr int kMaxLosses = 3;  // of one step
constexpr std::chrono::seconds kLately{60};
constexpr int kMaxLately = 6;  // maximum number of losses that lengthen the delay: up to 63 s

}  // namespace

Error named_as_early(const Error& why) {
  if (why.code != ErrorCode::kPeerLost) return why;
  return make_error(why.code,
                    "{}; before the ranks know each other none goes on: start again, or have "
                    "`dynmo train --restarts N` do so",
                    why.message);
}

Expected<void> Losses::check_respawn() const {
  if (!respawns_ || process::has_launcher()) return {};
  return make_error(
      ErrorCode::kBadInput,
      "elastic.respawn is true, wanted false where `dynmo train` has not started the "
      "ranks: whoever has (torchrun, srun) starts others with --join or --resume auto");
}

Losses::Known Losses::with_another(const std::vector<Known>& known, std::int64_t reached) {
  Known all;
  for (const Known& theirs : known) {
    for (const auto& [step, times] : theirs.counts) {
      all.counts[step] = std::max(all.counts[step], times);
    }
    all.begun = std::max(all.begun, theirs.begun);
    all.counted = std::max(all.counted, theirs.counted);
  }
  // Without the steps that the run has done since.
  all.counts.erase(all.counts.begin(), all.counts.lower_bound(reached));
  if (all.begun > all.counted) ++all.counts[reached];
  all.counted = all.begun;
  return all;
}

Expected<void> Losses::note(Known now, const Error& why) {
  known_ = std::move(now);
  for (const auto& [step, times] : known_.counts) {
    if (times < kMaxLosses) continue;
    const std::string begin = fmt::format("step {} was lost {} times, at last: ", step, times);
    // Another rank may have ended by this error, and was then lost here.
    if (why.message.starts_with(begin)) return Error{ErrorCode::kPeerLost, why.message};
    return Error{ErrorCode::kPeerLost, begin + why.message};
  }
  return {};
}

bool Losses::too_many() const {
  return std::ranges::any_of(known_.counts,
                             [](const auto& each) { return each.second >= kMaxLosses; });
}

void Losses::will_respawn(int ranks) {
  if (!respawns_) return;
  const auto now = std::chrono::steady_clock::now();
  lately_ = now - newest_ < kLately ? std::min(lately_ + 1, kMaxLately) : 0;
  newest_ = now;
  missing_ += ranks;
  respawn_at_ = now + std::chrono::seconds((1 << lately_) - 1);
}

std::optional<std::string> Losses::respawn(bool leads) {
  if (missing_ == 0 || std::chrono::steady_clock::now() < respawn_at_) return std::nullopt;
  const int ranks = std::exchange(missing_, 0);
  if (!leads) return std::nullopt;
  const auto asked = process::ask_for_ranks(ranks);
  return fmt::format("respawn  {}", asked ? observe::format_count(ranks, "rank") + " started"
                                          : asked.error().message);
}

}  // namespace dynmo::train
