// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/observe/table.h"
#include "dynmo/train/run_impl.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {
namespace {

constexpr int kMaxLosses = 3;  // of one step

}  // namespace

bool Run::may_survive(const Error& why) const {
  if (!elasticity_ || elasticity_->is_changing() || lanes_.empty() || alone_) return false;
  return why.code == ErrorCode::kPeerLost ||
         (why.code == ErrorCode::kInternal && groups_->failure() == why);
}

Expected<void> Run::through_losses(Expected<void> done) {
  while (!done && may_survive(done.error())) {
    const auto stays = survive(done.error());
    if (stays && !*stays) return {};
    done = stays ? advance_all() : Expected<void>(stays.error());
  }
  return done;
}

Expected<elastic::View> Run::meet_survivors(const elastic::View& before, const Error& why) {
  alone_ = true;
  auto view = groups_->survive({.before = before,
                                .generation = newest_generation_,
                                .replicas = static_cast<int>(config_.pipeline.replicas),
                                .run = config_.run.directory,
                                .why = why});
  alone_ = !view;
  return view;
}

Expected<bool> Run::survive(const Error& why) {
  const auto start = std::chrono::steady_clock::now();
  Lane& lane = lanes_.front();
  RunSeries& series = lane.log->series();
  const std::int64_t reached = reached_;
  if (reached == lost_at_ && ++times_lost_ == kMaxLosses) {
    return make_error(ErrorCode::kPeerLost, "step {} was lost {} times, at last: {}", reached,
                      kMaxLosses, why.message);
  }
  if (reached != lost_at_) times_lost_ = 1;
  lost_at_ = reached;
  const elastic::View before = elasticity_->view();
  std::unique_ptr<elastic::Leader> led = elasticity_->take_leader();
  DYNMO_ASSIGN(const elastic::View view, meet_survivors(before, why));
  // Nothing of the group that has ended writes into its tensors any more.
  lane.group.reset();
  grid_.reset();
  elasticity_.emplace(*groups_, config_, inputs_);
  if (!view.has(groups_->self().id)) {
    static_cast<void>(lane.log->close());
    return false;
  }
  const double meeting_s = seconds_since(start);
  group_ = &groups_->group();
  grid_.emplace(*group_, static_cast<int>(config_.pipeline.replicas));
  const int next_member = std::max(series.members, before.members.back().number + 1);
  series.members = next_member;
  DYNMO_TRY(elasticity_->begin_again(view, std::move(led), next_member));
  if (group_->rank() == transport::Member(0) && !leads_) DYNMO_TRY(lead(nullptr));
  DYNMO_TRY(begin_again(lane, view.generation));
  note_loss(lane, before, why, reached, {.meet_s = meeting_s, .all_s = seconds_since(start)});
  return true;
}

Expected<void> Run::begin_again(Lane& lane, Generation generation) {
  TrainOptions options = options_;
  const auto found = checkpoint::list_checkpoints(folder_.checkpoints());
  DYNMO_ASSIGN(const Json resumes,
               transport::first_json(*group_, transport::control_tag(transport::Control::kSize),
                                     Json(found.has_value() && !found->empty()),
                                     "whether there is a checkpoint"));
  options.resume = resumes == Json(true);
  auto& cut = options.config.pipeline.cut;
  if (std::ssize(cut) != grid_->positions()) cut.clear();
  DYNMO_ASSIGN(Start begin, begin_run(*group_, options, inputs_));
  Generation& number = begin.first.plan.generation;
  number = std::max(number, generation);
  first_step_ = reached_ = begin.step();
  DYNMO_ASSIGN(lane.group, open_group(lane.settings, begin));
  return lane.log->roll_back(first_step_);
}

void Run::note_loss(Lane& lane, const elastic::View& before, const Error& why, std::int64_t reached,
                    LossTimes times) {
  std::vector<int> lost;
  for (const elastic::Member& member : before.members) {
    if (!elasticity_->view().has(member.id)) lost.push_back(member.number);
  }
  const std::vector<int> ranks = elastic::numbers_of(elasticity_->view());
  const std::int64_t again = reached - first_step_;
  RunSeries& series = lane.log->series();
  series.losses += static_cast<int>(lost.size());
  series.repeated_steps += again;
  lane.log->event("loss", reached, {{"lost", lost}, {"why", why.message}});
  lane.log->event("recovery", first_step_,
                  {{"ranks", ranks},
                   {"from", first_step_ > 0 ? "checkpoint" : "initial values"},
                   {"steps_again", again},
                   {"ms", {{"meet", 1e3 * times.meet_s}, {"all", 1e3 * times.all_s}}},
                   {"plan", plan::to_json(lane.group->pipeline().plan())}});
  say(fmt::format("step {:5}  {}: on with {} {} from step {} ({} again), in {}", reached,
                  why.message, ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "),
                  first_step_, observe::format_count(again, "step"), format_seconds(times.all_s)));
  say_start();
}

}  // namespace dynmo::train
