// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <span>
#include <utility>
#include <vector>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/core/files.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/elastic/recovery.h"
#include "dynmo/observe/event_log.h"
#include "dynmo/observe/table.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/runtime/regroup.h"
#include "dynmo/train/run_impl.h"
#include "dynmo/train/setup/pipeline_options.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {

using config::LogLevel;

namespace {

transport::Tag tag() { return transport::control_tag(transport::Control::kSize); }

// Returns, for each position after the loss, its position before the loss.
std::vector<std::optional<Rank>> positions_before(const elastic::View& before,
                                                  const elastic::View& view, int replicas) {
  const transport::Axes axes{.replicas = replicas, .positions = before.size() / replicas};
  std::vector<std::optional<Rank>> found;
  for (int i = 0; i < view.size() / replicas; ++i) {
    const auto rank = before.rank_of(view.members[static_cast<std::size_t>(i)].id);
    found.push_back(rank ? std::optional(axes.place(*rank).position) : std::nullopt);
  }
  for (auto at = found.begin(); at != found.end(); ++at) {  // two of one position, in two replicas
    if (std::find(found.begin(), at, *at) != at) at->reset();
  }
  return found;
}

struct Reports {
  std::vector<elastic::Report> all;
  // The newest validation of each rank, before step -1 where there was none.
  std::vector<observe::RunHistory::Validation> validated;
  Generation generation = 0;  // of the newest plan
  bool have_begun = true;     // all of them: each has a plan, layers and a log
  bool whole = false;         // one has found all that the run leaves
  bool has_been_packed = false;
  Losses::Known losses;  // this one is among them

  [[nodiscard]] std::int64_t reached() const {
    return std::ranges::max(all, {}, &elastic::Report::step).step;
  }
  // Returns the outcome of a validation that other ranks know and rank `rank` does not, because a
  // loss came before.
  [[nodiscard]] std::optional<observe::RunHistory::Validation> lacked_validation(
      std::size_t rank, std::int64_t step) const {
    const auto newest = std::ranges::max(validated, {}, &observe::RunHistory::Validation::step);
    if (all[rank].step != step || validated[rank].step >= step || newest.step < step) return {};
    return newest;
  }
};

Json to_json(const observe::RunHistory::Validation& validation) {
  return {
      {"step", validation.step},
      {"loss", validation.loss},
      {"generation_loss", validation.generation_loss ? Json(*validation.generation_loss) : Json()}};
}

// Reads the result of a validation. It has null for NaN, which JSON does not have.
observe::RunHistory::Validation validation_of(const Json& json) {
  const Json& loss = json.at("loss");
  observe::RunHistory::Validation found{.step = json.at("step").get<std::int64_t>(),
                                        .loss = loss.is_null() ? std::nan("") : loss.get<double>()};
  if (const Json& other = json.at("generation_loss"); !other.is_null()) {
    found.generation_loss = other.get<double>();
  }
  return found;
}

// The facts that a rank reports in addition to its state and its log.
struct Own {
  bool whole = false;
  bool complete = false;         // gradients of a step that lacks its update
  bool has_been_packed = false;  // SizeChanges::has_been_packed()
  std::int64_t checkpoint = -1;  // the newest one's step
  Losses::Known losses;          // before this one
};

Expected<Reports> gather_reports(transport::Transport& group, const runtime::RankState& state,
                                 const RunLog* log, const Own& own) {
  const auto validated = log != nullptr ? log->validation() : std::nullopt;
  const Json mine = {
      {"begun", log != nullptr},
      {"whole", own.whole},
      {"step", state.step},
      {"complete", own.complete},
      {"has_been_packed", own.has_been_packed},
      {"updated", state.last_exchange.has_value()},
      {"holds", runtime::to_json(runtime::holdings_of(state))},
      {"checkpoint", own.checkpoint},
      {"losses", own.losses.counts},
      {"begun_in", own.losses.begun},
      {"counted_in", own.losses.counted},
      {"validated", to_json(validated.value_or(observe::RunHistory::Validation{.step = -1}))}};
  const std::string origin = "what a rank has after a loss";
  DYNMO_ASSIGN(const auto values, transport::gather_json(group, tag(), mine, origin));
  Reports reports;
  std::vector<Losses::Known> losses;
  for (const Json& json : values) {
    JsonObject object(json, origin);
    object.ignore("holds");
    object.ignore("losses");
    object.ignore("validated");
    reports.have_begun = object.boolean("begun") && reports.have_begun;
    reports.whole = object.boolean("whole") || reports.whole;
    reports.has_been_packed = object.boolean("has_been_packed") || reports.has_been_packed;
    elastic::Report report{.step = object.integer("step"),
                           .gradients_complete = object.boolean("complete")};
    if (object.boolean("updated")) report.updated = {.step = report.step - 1};
    if (const auto at = object.integer("checkpoint"); at >= 0) report.checkpoint = at;
    reports.validated.push_back(validation_of(json.at("validated")));
    losses.push_back({.counts = json.value("losses", Losses::Counts()),
                      .begun = object.integer("begun_in"),
                      .counted = object.integer("counted_in")});
    DYNMO_ASSIGN(const runtime::Holdings holdings,
                 runtime::parse_holdings(json.value("holds", Json())));
    for (const auto& layer : holdings.layers) report.holdings.push_back(layer.copy);
    reports.generation = std::max(reports.generation, holdings.generation);
    DYNMO_TRY(object.finish());
    reports.all.push_back(std::move(report));
  }
  reports.losses = Losses::with_another(losses, reports.reached());
  return reports;
}

// Returns the error that the ranks that are left cannot hold the model. It names the checkpoint, if
// there is one. The loss comes last, because the launcher does not show a line that begins with a
// loss that it has reported itself.
Error too_few(const Error& loss, const std::string& why, std::optional<std::int64_t> checkpoint) {
  const std::string kept =
      checkpoint ? fmt::format("a checkpoint of step {}", *checkpoint) : "no checkpoint";
  return make_error(ErrorCode::kInfeasible, "{}; there is {}; {}", why, kept, loss.message);
}

}  // namespace

bool Run::may_survive(const Error& why) const {
  if (losses_.too_many()) return false;
  if (!elasticity_ || elasticity_->is_changing() || lanes_.empty() || group_.alone) return false;
  return why.code == ErrorCode::kPeerLost ||
         (why.code == ErrorCode::kInternal && groups_->failure() == why);
}

Expected<void> Run::through_losses(Expected<void> done) {
  while (!done && may_survive(done.error())) {
    if (is_whole()) return {};
    const auto stays = survive(done.error());
    if (stays && !*stays) return {};
    if (!stays && is_whole()) return {};  // by now: the first rank has ended
    done = stays ? advance_all() : Expected<void>(stays.error());
  }
  return done;
}

bool Run::is_whole() const {
  const Lane& lane = lanes_.front();
  if (!lane.log || done_.steps != config().train.steps) return false;
  const auto summary = read_json(folder_.summary());
  if (!summary || !summary->contains("runs") || (*summary)["runs"].size() != 1) return false;
  return (*summary)["runs"][0].value("steps", std::int64_t{0}) == config().train.steps;
}

Expected<elastic::Survival> Run::meet_survivors(const elastic::View& before, const Error& why) {
  group_.alone = true;
  auto met = groups_->survive({.before = before,
                               .generation = std::max(done_.generation, elasticity_->tried()),
                               .replicas = static_cast<int>(config().pipeline.replicas),
                               .why = why,
                               .needs_nobody = [this] { return is_whole(); }});
  group_.alone = !met;
  return met;
}

Expected<bool> Run::survive(const Error& why) {
  reporter_.log(LogLevel::kWarning, fmt::format("step {:5}  {}", done_.steps, why.message));
  Recovery recovery{.why = why};
  if (const auto noticed = groups_->failed_at()) recovery.phase = *noticed;
  const auto start = recovery.phase;
  recovery.end_phase("rest");
  Lane& lane = lanes_.front();
  const elastic::View before = elasticity_->view();
  if (!passage_.lost) passage_.lost = Passage::Lost{.before = before, .numbered = before};
  std::unique_ptr<elastic::Leader> led = elasticity_->take_leader();
  // Nothing of the group that has ended writes into tensors any more when this returns.
  DYNMO_ASSIGN(const elastic::Survival met, meet_survivors(before, why));
  const elastic::View& view = met.view;
  reporter_.log(LogLevel::kInfo, fmt::format("step {:5}  met after the loss: ranks {}", done_.steps,
                                             fmt::join(elastic::numbers_of(view), ", ")));
  passage_.lost->spares.insert(passage_.lost->spares.end(), met.spares.begin(), met.spares.end());
  group_.grid.reset();
  passage_.take_back();
  const bool has_been_packed = elasticity_->changes().has_been_packed();
  elasticity_.emplace(*groups_, run_, passage_);
  elasticity_->changes().begin_again(has_been_packed);
  if (!view.has(groups_->self().id)) {
    lane.group.reset();
    if (lane.log) static_cast<void>(lane.log->close());
    return false;
  }
  recovery.end_phase("meet");
  enter(groups_->group());
  done_.members = std::max(done_.members, before.members.back().number + 1);
  DYNMO_TRY(elasticity_->begin_again(view, std::move(led), done_.members));
  if (world().rank() == transport::Member(0) && !group_.leads) lead();
  DYNMO_TRY(recover(lane, recovery));
  if (recovery.whole) return false;
  recovery.end_phase("commit");
  recovery.ms["all"] = 1e3 * seconds_since(start);
  // All that were lost since the run was whole: another loss may have ended a recovery.
  const Passage::Lost since = *std::exchange(passage_.lost, std::nullopt);
  note_loss(lane, since, recovery);
  losses_.will_respawn(since.before.size() - view.size());
  return true;
}

Expected<void> Run::recover(Lane& lane, Recovery& recovery) {
  const bool complete = lane.group != nullptr && lane.group->pipeline().gradients_complete();
  const auto found = checkpoint::list_checkpoints(folder_.checkpoints());
  const std::int64_t newest = found && !found->empty() ? found->front().step : -1;
  DYNMO_ASSIGN(const Reports reports,
               gather_reports(world(), state_of(lane), lane.log ? &*lane.log : nullptr,
                              {.whole = is_whole(),
                               .complete = complete,
                               .has_been_packed = elasticity_->changes().has_been_packed(),
                               .checkpoint = newest,
                               .losses = losses_.known()}));
  recovery.end_phase("report");
  recovery.whole = reports.whole;
  if (recovery.whole) return {};
  elasticity_->changes().begin_again(reports.has_been_packed);
  recovery.reached = reports.reached();
  DYNMO_TRY(losses_.note(reports.losses, recovery.why));
  elastic::Decision decision{.origin = elastic::Origin::kInitial};
  std::optional<Restored> restored;
  if (reports.have_begun) {
    DYNMO_ASSIGN(decision, decide(reports.all, restored));
  }
  if (decision.finish) DYNMO_TRY(finish_step(lane, *decision.finish));
  if (lane.group != nullptr) passage_.leave(std::move(lane.group));
  const Generation generation = std::max(elasticity_->view().generation, reports.generation + 1);
  if (decision.origin != elastic::Origin::kMemory) {
    return recover_from_files(lane, recovery, generation, std::move(restored));
  }
  DYNMO_TRY(recover_from_memory(lane, recovery, decision.step, generation));
  const bool asked = lane.group->pipeline().state().asked;
  const std::size_t self = world().rank().index();
  // The layers may be those of the next step already. Then all of this one was done.
  if (!asked) return after_step_again(lane);
  const auto validation = reports.lacked_validation(self, decision.step);
  if (validation) lane.log->note_validation(*validation);
  return {};
}

Expected<elastic::Decision> Run::decide(std::vector<elastic::Report> reports,
                                        std::optional<Restored>& restored) const {
  const elastic::Model model{.layers = static_cast<int>(run_.model().layers.size())};
  DYNMO_ASSIGN(const elastic::Decision wanted, elastic::recover(model, reports));
  if (wanted.origin != elastic::Origin::kCheckpoint) return wanted;
  Expected<Restored> found = restore_the_same(world(), config());
  if (!found && found.error().code != ErrorCode::kNoCheckpoint) return found.error();
  for (elastic::Report& report : reports) {
    report.checkpoint = found ? std::optional(found->step) : std::nullopt;
  }
  DYNMO_ASSIGN(const elastic::Decision decision, elastic::recover(model, reports));
  if (!found && decision.origin != elastic::Origin::kMemory) return found.error();
  if (!found || found->step < wanted.step) {
    say(fmt::format(
            "ALARM    the checkpoint of step {} cannot be used: {}", wanted.step,
            found ? fmt::format("{}", fmt::join(found->notes, "; ")) : found.error().message),
        LogLevel::kWarning);
  }
  if (found) restored = *std::move(found);
  return decision;
}

Expected<void> Run::recover_from_files(Lane& lane, Recovery& recovery, Generation generation,
                                       std::optional<Restored> restored) {
  if (!restored) {
    DYNMO_ASSIGN(const bool resumes, has_checkpoint());
    if (resumes) {
      DYNMO_ASSIGN(restored, restore_the_same(world(), config()));
    }
  }
  passage_.state = {};
  const auto kept = restored ? std::optional(restored->step) : std::nullopt;
  const Expected<void> again = begin_again(lane, generation, std::move(restored));
  if (!again && again.error().code == ErrorCode::kInfeasible) {
    return too_few(recovery.why, again.error().message, kept);
  }
  DYNMO_TRY(again);
  recovery.reached = std::max(recovery.reached, done_.first);  // of a resumed run
  recovery.end_phase("read");
  recovery.from = done_.first > 0 ? "checkpoint" : "initial values";
  return {};
}

Expected<void> Run::recover_from_memory(Lane& lane, Recovery& recovery, std::int64_t step,
                                        Generation generation) {
  const elastic::View& view = elasticity_->view();
  recovery.from = step == recovery.reached ? "live layers" : "snapshot";
  runtime::roll_back(passage_.state, step);
  if (passage_.state.controller) {
    passage_.state.controller->ranks_changed(
        positions_before(passage_.lost->numbered, view, grid().replicas()));
    passage_.lost->numbered = view;
  }
  recovery.end_phase("roll_back");
  DYNMO_ASSIGN(const transport::MeasuredCluster measured,
               measure_group(world(), run_, groups_->self().host, passage_.cluster));
  const cost::Cluster& cluster = measured.cluster;
  DYNMO_ASSIGN(control::AfterLoss after, plan_after_loss(step, cluster));
  after.decision.plan.generation = generation;
  // The ranks have not all measured the same steps.
  const std::string origin = "the plan after a loss";
  const Json mine = {{"plan", plan::to_json(after.decision.plan)}, {"fault", after.fault}};
  DYNMO_ASSIGN(const Json said, transport::first_json(world(), tag(), mine, origin));
  DYNMO_ASSIGN(const plan::Plan plan, plan::parse_plan(said.value("plan", Json()), origin));
  DYNMO_TRY(passage_.form(world(), run_, lane.settings, cluster, plan, step));
  DYNMO_TRY(enter_group(lane, std::move(passage_.next)));
  const auto fault = said.value("fault", "");
  if (!fault.empty()) {
    DYNMO_ASSIGN(const auto kept, keep_in_checkpoint(lane));
    return too_few(recovery.why, fault, kept);
  }
  recovery.decision = std::move(after.decision);
  // Sources are asked again: this begins the step.
  if (lane.group->pipeline().state().asked) losses_.begin_step(view.generation);
  DYNMO_TRY(lane.group->go_on());
  recovery.end_phase("regroup");
  return {};
}

// Plans before the layers are regrouped, by what this rank has measured.
Expected<control::AfterLoss> Run::plan_after_loss(std::int64_t step, const cost::Cluster& cluster) {
  runtime::RankState& held = passage_.state;
  const bool measured = held.controller || !held.controller_state.is_null();
  const runtime::PipelineOptions options =
      pipeline_options(run_, 0, runtime::Balancing::kNever, cluster);
  control::Controller controller = runtime::controller_of(held, run_.model().layers, options);
  const cost::ModelCost known = controller.profiler().known(held.frozen_layers);
  const cost::Cluster there = control::as_measured(cluster, controller.profiler().overhead(),
                                                   options.replicas, options.accumulation);
  DYNMO_ASSIGN(
      control::AfterLoss after,
      controller.after_loss({.plan = held.plan, .step = step, .known = known, .cluster = there}));
  if (measured) held.controller = std::move(controller);
  return after;
}

// Makes the update of the last step on ranks that lack only this update. They use the exchange that
// another rank has received.
Expected<void> Run::finish_step(Lane& lane, const elastic::UpdateRecord& record) {
  const runtime::RankState& state = state_of(lane);
  const bool has_it = state.last_exchange && state.step == record.step + 1;
  DYNMO_ASSIGN(
      const std::vector<std::string> texts,
      transport::gather_texts(world(), tag(), has_it ? runtime::pack(*state.last_exchange) : ""));
  if (lane.group == nullptr || !lane.group->pipeline().gradients_complete()) return {};
  if (state.step != record.step) return {};
  const auto text = std::ranges::find_if(texts, [](const auto& each) { return !each.empty(); });
  if (text == texts.end()) return make_error(ErrorCode::kInternal, "no rank has the last exchange");
  DYNMO_ASSIGN(const runtime::Exchange exchanged, runtime::parse_exchange(*text));
  const std::int64_t begin_ns = now_ns();
  DYNMO_ASSIGN(const runtime::StepReport report, lane.group->pipeline().finish_step(exchanged));
  say(lane.log->add(report, *lane.group, begin_ns));
  done_.steps = report.step + 1;
  return {};
}

Expected<std::optional<std::int64_t>> Run::keep_in_checkpoint(Lane& lane) {
  const std::int64_t step = lane.group->pipeline().next_step();
  DYNMO_ASSIGN(const bool there, has_checkpoint(step));
  if (!there) {
    DYNMO_TRY(checkpoint(lane, /*due=*/true));
    DYNMO_TRY(finish_checkpoint(lane));
    if (lane.group->checkpoints()->failure()) return std::optional<std::int64_t>();
  }
  return std::optional(step);
}

Expected<bool> Run::has_checkpoint(std::optional<std::int64_t> step) const {
  const auto found = checkpoint::list_checkpoints(folder_.checkpoints());
  const bool there = found && std::ranges::any_of(*found, [&](const auto& each) {
                       return !step || each.step == *step;
                     });
  DYNMO_ASSIGN(const Json said,
               transport::first_json(world(), tag(), Json(there), "whether there is a checkpoint"));
  return said == Json(true);
}

// Does the work after the last step again, because the loss may have come before its end.
Expected<void> Run::after_step_again(Lane& lane) {
  const std::int64_t step = lane.group->pipeline().next_step();
  if (step == 0) return {};
  DYNMO_ASSIGN(const bool is_there, has_checkpoint(step));
  const std::array mine = {lane.group->checkpoints()->writes_dropped() ? 1.0 : 0.0};
  DYNMO_ASSIGN(const auto all, transport::gather_numbers(world(), tag(), mine));
  // No rank waits here for the disk that was busy at the loss. The last checkpoint is waited for.
  const bool passes = step < config().train.steps &&
                      std::ranges::any_of(all, [](const auto& rank) { return rank[0] > 0; });
  if (passes && !is_there && config().checkpoint.every > 0 &&
      step % config().checkpoint.every == 0) {
    say(fmt::format(
            "ALARM    no checkpoint of step {}: a disk is still at the one before the loss; "
            "training goes on, the next one is tried all the same",
            step),
        LogLevel::kWarning);
  }
  losses_.begin_step(elasticity_->view().generation);  // part of one is repeated
  return after_step(lane, is_there || passes);
}

Expected<void> Run::begin_again(Lane& lane, Generation generation,
                                std::optional<Restored> restored) {
  DYNMO_ASSIGN(Start begin, begin_run(world(), run_,
                                      {.host = groups_->self().host,
                                       .after_loss = true,
                                       .restored = std::move(restored)}));
  Generation& number = begin.first.plan.generation;
  number = std::max(number, generation);
  if (!lane.log) {
    for (const std::string& note : begin.notes) say(note);
  }
  DYNMO_TRY(open_lane(lane, begin));
  std::error_code fault;
  if (!group_.leads || std::filesystem::exists(folder_.config(), fault)) return {};
  return write_file_durably(folder_.config(), to_toml(config()));
}

void Run::note_loss(Lane& lane, const Passage::Lost& since, const Recovery& recovery) {
  std::vector<int> lost;
  std::vector<int> spares;
  for (const elastic::Member& member : since.before.members) {
    if (elasticity_->view().has(member.id)) continue;
    const bool spare = std::ranges::count(since.spares, member.id) > 0;
    (spare ? spares : lost).push_back(member.number);
  }
  const std::vector<int> ranks = elastic::numbers_of(elasticity_->view());
  const std::int64_t again = recovery.reached - done_.first;
  Json loss = {{"lost", lost}, {"why", recovery.why.message}};
  if (!spares.empty()) loss["spares"] = spares;
  lane.log->event("loss", recovery.reached, loss);
  lane.log->event("recovery", done_.first,
                  {{"ranks", ranks},
                   {"from", recovery.from},
                   {"steps_again", again},
                   {"ms", recovery.ms},
                   {"plan", plan::to_json(lane.group->pipeline().plan())}});
  if (recovery.decision) {
    lane.log->event("decision", done_.first, observe::decision_event(*recovery.decision));
  }
  const std::string without =
      spares.empty() ? std::string()
                     : fmt::format(" without spare {} {}", spares.size() == 1 ? "rank" : "ranks",
                                   fmt::join(spares, ", "));
  say(fmt::format("step {:5}  {}: on with {} {}{} from step {} ({} again), in {}", recovery.reached,
                  recovery.why.message, ranks.size() == 1 ? "rank" : "ranks",
                  fmt::join(ranks, ", "), without, done_.first,
                  observe::format_count(again, "step"),
                  format_seconds(recovery.ms["all"].get<double>() / 1e3)),
      LogLevel::kWarning);
  say_start();
}

void Run::lead() {
  group_.leads = true;
  locks_.wanted = std::getenv(kLockedByLauncher) == nullptr;
  if (!lanes_.front().log) return;  // not begun as yet
  // The run goes on without the file, as it does where it cannot be written later.
  if (const auto opened = lanes_.front().log->lead(); !opened) {
    say(fmt::format("events   {}; training goes on", opened.error().message), LogLevel::kWarning);
  }
}

}  // namespace dynmo::train
