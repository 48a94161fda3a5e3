// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/resizing.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/digest.h"
#include "dynmo/core/files.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/core/units.h"
#include "dynmo/observe/table.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/pack.h"
#include "dynmo/runtime/regroup.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/grid.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {
namespace {

using transport::Control;
using transport::control_tag;

constexpr std::chrono::milliseconds kLastHooks{20000};  // for hooks when the run ends

std::vector<int> numbers_of(const elastic::View& view) {
  std::vector<int> numbers;
  for (const elastic::Member& member : view.members) numbers.push_back(member.number);
  return numbers;
}

elastic::Reply done(std::string text) { return {.done = true, .text = std::move(text)}; }

const char* text_of(elastic::ReleaseOutcome outcome) {
  switch (outcome) {
    case elastic::ReleaseOutcome::kDone:
      return "done";
    case elastic::ReleaseOutcome::kNotNow:
      return "not now";
    case elastic::ReleaseOutcome::kParked:
      break;
  }
  return "parked";
}

std::string ranks_text(int ranks, std::int64_t replicas) {
  return replicas > 1 ? fmt::format("{} x {} ranks", replicas, ranks)
                      : observe::format_count(ranks, "rank");
}

}  // namespace

elastic::Build this_build(const Config& config, const Inputs& inputs) {
  Config decides = config;
  decides.data.path = decides.data.validation_path = decides.run.directory = "";
  const auto program = read_file("/proc/self/exe");
  return {.program = program ? digest_of(*program).hex() : "unknown",
          .libtorch = TORCH_VERSION,
          .instruction_set = at::get_cpu_capability(),
          .threads = at::get_num_threads(),
          .config = digest_of(to_toml(decides)).hex(),
          .data = inputs.batches.fingerprint()};
}

std::vector<int> Resizing::numbers() const { return numbers_of(view_); }

elastic::Member Resizing::self() const {
  const elastic::Member* found = view_.find(groups_.self().id);
  return found != nullptr ? *found : groups_.self();
}

bool Resizing::asks() const {
  return groups_.asked_to_leave() || (leads() && service_->has_wishes());
}

void Resizing::answer(process::ClientId client, const elastic::Reply& reply) {
  if (leads()) service_->answer(client, reply);
}

Expected<void> Resizing::begin() {
  DYNMO_ASSIGN(const auto texts, transport::gather_texts(group(), control_tag(Control::kSize),
                                                         elastic::to_json(groups_.self()).dump()));
  for (const std::string& text : texts) {
    const std::string origin = "what a rank says of itself";
    DYNMO_ASSIGN(const Json json, parse_json(text, origin));
    JsonObject object(json, origin);
    DYNMO_ASSIGN(elastic::Member member, elastic::parse_member(object));
    member.number = view_.size();
    view_.members.push_back(std::move(member));
  }
  members_ = view_.size();
  if (group().rank() != transport::Member(0)) return {};
  DYNMO_ASSIGN(service_,
               ControlService::open({.run = config_.run.directory,
                                     .leader = self(),
                                     .config = to_toml(config_),
                                     .build = [this] { return this_build(config_, inputs_); },
                                     .first_member = view_.size(),
                                     .replicas = static_cast<int>(config_.pipeline.replicas)}));
  const Config::Elastic& elastic = config_.elastic;
  if (elastic.release == "command") DYNMO_TRY(process::check_program(elastic.release_command));
  releases_.emplace(elastic::ReleaseOptions{
      .command = elastic.release_command,
      .timeout = std::chrono::milliseconds(std::llround(1e3 * elastic.release_timeout_s)),
      .run = config_.run.directory});
  return {};
}

void Resizing::observe(const runtime::StepReport& report, const GroupRun& group) {
  if (!leads()) return;
  const double tokens = static_cast<double>(
      step_micro_batches(config_) * config_.batch.micro_batch_size * config_.model.shape.sequence);
  status_ = {{"step", report.step + 1},
             {"steps", config_.train.steps},
             {"loss", report.loss},
             {"tokens_per_s", tokens / report.step_s},
             {"imbalance", report.imbalance},
             {"bubble", report.bubble},
             {"frozen_layers", report.frozen_layers},
             {"replicas", config_.pipeline.replicas}};
  tell_ranks(group.pipeline().plan());
}

void Resizing::tell_ranks(const plan::Plan& plan) {
  Json members = Json::array();
  for (const elastic::Member& member : view_.members) {
    const Rank position(static_cast<int>(members.size()) % plan.ranks);
    int layers = 0;
    for (const int stage : plan.stages_of(position)) {
      layers += plan.stages[static_cast<std::size_t>(stage)].layers.count;
    }
    members.push_back(
        {{"rank", member.number}, {"host", member.host}, {"pid", member.pid}, {"layers", layers}});
  }
  status_["generation"] = plan.generation;
  status_["plan"] = plan::to_string(plan);
  status_["ranks"] = std::move(members);
  status_["standbys"] = service_->standbys().size();
  service_->set_status(status_);
}

void Resizing::tell_releases(const std::vector<elastic::ReleaseNews>& news, std::int64_t step) {
  for (const elastic::ReleaseNews& each : news) {
    tell_.say(fmt::format("step {:5}  {}", step, each.line));
    std::vector<int> released;
    for (const elastic::Member& member : each.release.released) released.push_back(member.number);
    tell_.event("release", step,
                {{"number", each.release.number},
                 {"ranks", released},
                 {"outcome", text_of(each.outcome)},
                 {"text", each.line}});
  }
}

void Resizing::finish(std::int64_t step) {
  if (releases_) tell_releases(releases_->finish(kLastHooks), step);
}

void Resizing::answer_checkpoints(const GroupRun& group) {
  if (wait_for_checkpoint_.empty() || group.checkpoints()->active()) return;
  const auto& failure = group.checkpoints()->failure();
  for (const process::ClientId client : wait_for_checkpoint_) {
    answer(client, failure ? elastic::refusal(*failure) : done("the checkpoint is written"));
  }
  wait_for_checkpoint_.clear();
}

Expected<Turn> Resizing::next(const GroupRun& group, bool asked) {
  answer_checkpoints(group);
  if (releases_) tell_releases(releases_->poll(), group.pipeline().next_step());
  std::vector<RankWord> words;
  if (asked) {
    RankWord mine{.leave = groups_.asked_to_leave()};
    if (leads()) {
      mine.wishes = service_->take();
      mine.joiners = service_->standbys();
    }
    DYNMO_ASSIGN(const auto texts, transport::gather_texts(
                                       this->group(), control_tag(Control::kSize), to_text(mine)));
    for (const std::string& text : texts) {
      DYNMO_ASSIGN(RankWord word, parse_word(text));
      words.push_back(std::move(word));
    }
  }
  const runtime::Pipeline& pipeline = group.pipeline();
  Turn turn = changes_.next(words, view_, pipeline.plan(), pipeline.next_step(),
                            pipeline.costs().has_value());
  for (const Turn::Answer& each : turn.answers) {
    if (each.client != 0) {
      answer(each.client, each.reply);
    } else {
      tell_.say(fmt::format("step {:5}  {}", pipeline.next_step(), each.reply.text));
    }
  }
  const auto& wait = turn.wait_for_checkpoint;
  wait_for_checkpoint_.insert(wait_for_checkpoint_.end(), wait.begin(), wait.end());
  return turn;
}

Expected<bool> Resizing::move(runtime::Pipeline& pipeline, const plan::Plan& plan) {
  const auto begin = std::chrono::steady_clock::now();
  const plan::Migration migration = plan::difference(pipeline.plan(), plan, *pipeline.costs());
  DYNMO_ASSIGN(const bool moved, pipeline.apply(plan));
  if (!moved) return false;
  ++moves_.count;
  moves_.layers += static_cast<int>(migration.moves.size());
  moves_.bytes += migration.bytes();
  moves_.seconds += seconds_since(begin);
  return true;
}

Expected<bool> Resizing::prepare(const SizeChange& change, GroupRun& group) {
  runtime::Pipeline& pipeline = group.pipeline();
  const std::vector<Rank> at_work = plan::ranks_at_work(pipeline.plan());
  if (std::ranges::includes(change.kept, at_work)) return true;
  const auto refuse = [&](const std::string& why) {
    changes_.done();
    const std::string line = fmt::format("{} is not possible: {}", change.why, why);
    tell_.say(fmt::format("step {:5}  {}", pipeline.next_step(), line));
    tell_.event("refused", pipeline.next_step(), {{"change", change.why}, {"reason", why}});
    answer(change.client, elastic::refusal(make_error(ErrorCode::kInfeasible, "{}", line)));
    return false;
  };
  const auto prospect = pipeline.prospect_on(change.kept);
  if (!prospect) return refuse(prospect.error().message);
  const auto begin = std::chrono::steady_clock::now();
  const auto moved = move(pipeline, prospect->plan);
  if (!moved && moved.error().code == ErrorCode::kInfeasible) return refuse(moved.error().message);
  if (!moved) return moved.error();
  if (!*moved) return refuse("a copy was not accepted");
  tell_.say(fmt::format("step {:5}  moved to {} in {}: a step is to take {}, it was {}",
                        pipeline.next_step(), plan::to_string(pipeline.plan()),
                        format_seconds(seconds_since(begin)), format_seconds(prospect->then_s),
                        format_seconds(prospect->now_s)));
  tell_.event("move", pipeline.next_step(),
              {{"cause", change.why},
               {"seconds", seconds_since(begin)},
               {"current_step_s", prospect->now_s},
               {"planned_step_s", prospect->then_s},
               {"plan", plan::to_json(pipeline.plan())}});
  return true;
}

elastic::View Resizing::next_view(const SizeChange& change, int positions) const {
  const auto replicas = static_cast<int>(config_.pipeline.replicas);
  elastic::View next{.generation = 0, .members = {}};
  auto joiner = change.joiners.begin();
  const auto joining = std::ssize(change.joiners) / replicas;
  for (int replica = 0; replica < replicas; ++replica) {
    for (const Rank position : change.kept) {
      next.members.push_back(
          view_.members[static_cast<std::size_t>(replica * positions + position.value)]);
    }
    for (std::ptrdiff_t i = 0; i < joining; ++i) next.members.push_back((joiner++)->member);
  }
  return next;
}

Expected<std::unique_ptr<GroupRun>> Resizing::change(const SizeChange& change,
                                                     std::unique_ptr<GroupRun> group,
                                                     const RunLane& lane) {
  const auto begin = std::chrono::steady_clock::now();
  const plan::Plan before = group->pipeline().plan();
  const std::int64_t step = group->pipeline().next_step();
  const auto replicas = static_cast<int>(config_.pipeline.replicas);
  const int joining = static_cast<int>(std::ssize(change.joiners)) / replicas;
  plan::Plan plan = plan::with_more_ranks(plan::without_others(before, change.kept),
                                          static_cast<int>(change.kept.size()) + joining);
  plan.generation = before.generation + 1;
  const std::optional<cost::ModelCost> costs = group->pipeline().costs();
  runtime::RankState state = group->close();
  group.reset();

  const elastic::View old = std::exchange(view_, next_view(change, before.ranks));
  view_.generation = plan.generation;
  for (const elastic::Member& member : view_.members) {
    members_ = std::max(members_, member.number + 1);
  }
  if (leads()) {
    for (const Standby& standby : change.joiners) {
      elastic::Place place = groups_.place_in(view_);
      place.rank = *view_.rank_of(standby.member.id);
      place.member = standby.member.number;
      service_->admit(standby.client, place);
    }
  }
  DYNMO_ASSIGN(const auto mine, groups_.change(view_));
  if (!mine) return std::unique_ptr<GroupRun>();
  DYNMO_ASSIGN(group, open_group(lane, plan, std::move(state), costs));
  pause_s_ = seconds_since(begin);
  changes_.done();
  const std::string line =
      fmt::format("{} -> {}: {}, in {}", ranks_text(before.ranks, replicas),
                  ranks_text(plan.ranks, replicas), change.why, format_seconds(pause_s_));
  tell_.say(fmt::format("step {:5}  {}", step, line));
  tell_.event("size", step,
              {{"why", change.why},
               {"ranks_before", numbers_of(old)},
               {"ranks", numbers_of(view_)},
               {"seconds", pause_s_},
               {"plan", plan::to_json(plan)}});
  if (joining > 0) DYNMO_TRY(spread(*group));
  if (leads()) {
    std::vector<elastic::Member> ended;
    for (const elastic::Member& member : old.members) {
      if (!view_.has(member.id)) ended.push_back(member);
    }
    if (ended.empty()) releases_->set_running(view_.members);
    if (!ended.empty()) releases_->release(std::move(ended), view_.members);
    tell_ranks(group->pipeline().plan());
  }
  answer(change.client, done(fmt::format("before step {}: {}", step, line)));
  return group;
}

Expected<std::unique_ptr<GroupRun>> Resizing::enter(const RunLane& lane) {
  DYNMO_ASSIGN(auto group, open_group(lane, {}, {}, {}));
  DYNMO_TRY(spread(*group));
  return group;
}

// Those that were there tell the newcomers who and where all are.
Expected<std::unique_ptr<GroupRun>> Resizing::open_group(
    const RunLane& lane, plan::Plan plan, runtime::RankState state,
    const std::optional<cost::ModelCost>& costs) {
  const Json mine = plan.stages.empty()
                        ? Json()
                        : Json{{"view", elastic::to_json(view_)}, {"plan", plan::to_json(plan)}};
  DYNMO_ASSIGN(const auto texts,
               transport::gather_texts(group(), control_tag(Control::kSize), mine.dump()));
  const std::string origin = "what the leader says of the group";
  DYNMO_ASSIGN(const Json known, parse_json(texts.front(), origin));
  DYNMO_CHECK(known.contains("view") && known.contains("plan"), "a view and a plan, got {}",
              texts.front());
  DYNMO_ASSIGN(view_, elastic::parse_view(known["view"], origin));
  DYNMO_ASSIGN(plan, plan::parse_plan(known["plan"], origin));
  const transport::Grid grid(group(), static_cast<int>(config_.pipeline.replicas));
  DYNMO_TRY(runtime::regroup(grid, inputs_.model.layers, plan, state,
                             {.device = inputs_.model.device.device}));
  DYNMO_ASSIGN(const auto shared, runtime::share_costs(group(), costs));
  auto opened = std::make_unique<GroupRun>(group(), config_, inputs_, lane, std::move(state));
  if (shared) DYNMO_TRY(opened->pipeline().use(*shared));
  return opened;
}

Expected<void> Resizing::spread(GroupRun& group) {
  runtime::Pipeline& pipeline = group.pipeline();
  std::vector<Rank> all;
  for (int i = 0; i < pipeline.plan().ranks; ++i) all.emplace_back(i);
  const auto prospect = pipeline.prospect_on(all);
  const auto say = [&](const std::string& what, const std::string& why) {
    tell_.say(fmt::format("step {:5}  {}", pipeline.next_step(), why));
    tell_.event(what, pipeline.next_step(),
                {{"reason", why}, {"plan", plan::to_json(pipeline.plan())}});
  };
  if (!prospect) {
    say("refused", fmt::format("the new ranks wait: {}", prospect.error().message));
    return {};
  }
  if (prospect->then_s > (1 - config_.balance.minimum_gain) * prospect->now_s) {
    say("refused", fmt::format("the new ranks wait: with them a step would take {}, without {}",
                               format_seconds(prospect->then_s), format_seconds(prospect->now_s)));
    return {};
  }
  const auto begin = std::chrono::steady_clock::now();
  DYNMO_ASSIGN(const bool moved, move(pipeline, prospect->plan));
  say(moved ? "move" : "refused",
      moved ? fmt::format("moved to {} in {}: a step is to take {}, it was {}",
                          plan::to_string(pipeline.plan()), format_seconds(seconds_since(begin)),
                          format_seconds(prospect->then_s), format_seconds(prospect->now_s))
            : "the new ranks wait: a copy was not accepted");
  return {};
}

Error Resizing::stopped(const Turn& turn, const GroupRun& group) {
  const std::int64_t step = group.pipeline().next_step();
  tell_.event("stop", step, {{"why", *turn.stop}});
  for (const process::ClientId client : turn.wait_for_stop) {
    answer(client, done(fmt::format("stopped before step {} of {}, after a checkpoint", step,
                                    config_.train.steps)));
  }
  return make_error(ErrorCode::kInterrupted, "stopped before step {} of {}: {}", step,
                    config_.train.steps, *turn.stop);
}

}  // namespace dynmo::train
