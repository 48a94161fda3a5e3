// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/resizing.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/version.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <future>
#include <span>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/digest.h"
#include "dynmo/core/files.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/core/units.h"
#include "dynmo/model/processor.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/pack.h"
#include "dynmo/train/resizing_impl.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {
namespace {

using transport::Control;
using transport::control_tag;

constexpr std::chrono::milliseconds kHookRound{100};
constexpr std::chrono::milliseconds kAskedHooks{3000};  // of a run that was asked to end

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

}  // namespace

elastic::Build this_build(const Config& config, const Inputs& inputs) {
  Config decides = config;
  decides.data.path = decides.data.validation_path = decides.run.directory = "";
  const auto program = read_file("/proc/self/exe");
  return {.program = program ? digest_of(*program).hex() : "unknown",
          .libtorch = TORCH_VERSION,
          .instruction_set = model::instruction_set_name(),
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
  DYNMO_TRY(open_service(view_.size(), /*secret=*/""));
  if (config_.elastic.release == "command") {
    DYNMO_TRY(process::check_program(config_.elastic.release_command));
  }
  open_releases();
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

// The other ranks wait for the leader's hooks in short rounds: the wait for one message is limited
// by pipeline.timeout_s, which need not be as long as a hook may take.
Expected<void> Resizing::finish(std::int64_t step) {
  std::atomic<bool> lost{false};
  // Whoever asks a process to leave kills it some time later.
  const bool asked = groups_.asked_to_leave();
  const auto hurry = [&] { return lost || (!asked && groups_.asked_to_leave()); };
  std::future<std::vector<elastic::ReleaseNews>> hooks;
  if (releases_) {
    hooks = std::async(std::launch::async,
                       [&] { return releases_->finish(asked ? kAskedHooks : kLastHooks, hurry); });
  }
  while (true) {
    const bool runs = hooks.valid() && hooks.wait_for(kHookRound) != std::future_status::ready;
    const double mine = runs ? 1 : 0;
    const auto all =
        transport::gather_numbers(group(), control_tag(Control::kSize), std::span(&mine, 1));
    lost = !all;
    if (!all) return all.error();
    if (std::ranges::all_of(*all, [](const auto& one) { return one.front() == 0; })) break;
  }
  if (hooks.valid()) tell_releases(hooks.get(), step);
  return {};
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
  give_up_growing();
  std::vector<RankWord> words;
  if (asked) {
    RankWord mine{.leave = groups_.asked_to_leave()};
    if (leads()) {
      mine.wishes = service_->take();
      take_own(mine.wishes);
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

Error Resizing::stopped(const Turn& turn, const GroupRun& group, const Expected<void>& finished) {
  const std::int64_t step = group.pipeline().next_step();
  if (!finished) {
    for (const process::ClientId client : turn.wait_for_stop) {
      answer(client, elastic::refusal(finished.error()));
    }
    return finished.error();
  }
  tell_.event("stop", step, {{"why", *turn.stop}});
  for (const process::ClientId client : turn.wait_for_stop) {
    answer(client, done(fmt::format("stopped before step {} of {}, after a checkpoint", step,
                                    config_.train.steps)));
  }
  return make_error(ErrorCode::kInterrupted, "stopped before step {} of {}: {}", step,
                    config_.train.steps, *turn.stop);
}

}  // namespace dynmo::train
