// SPDX-License-Identifier: Apache-2.0
// The loop that decides is one: what the caller of the controller in a training decides, also where
// ranks come and go, the simulator decides again from what was written down. (Trainings that do so
// are in tests/train/simulated_decisions_test.cpp.)
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dynmo/control/decisions.h"
#include "dynmo/core/rng.h"
#include "dynmo/dynamism/load_log.h"
#include "dynmo/plan/pack.h"
#include "dynmo/scenario/run.h"
#include "tests/plan/cuts.h"

namespace dynmo::scenario {
namespace {

// The parts of a decision that must be equal. Ranks of the plan are positions of the scenario.
using Decided = std::tuple<std::int64_t, bool, plan::Plan, std::string, std::string>;

// A run that never was: the pipeline's caller of the controller, fed with drawn measurements. Its
// ranks have positions of the scenario, ascending as in a group, where who comes is the last.
class Drawn {
 public:
  // At most so many ranks more than at the start.
  static constexpr int kJoiners = 3;

  Drawn(std::uint64_t seed, bool sizes, bool losses = false)
      : rng_(mix_key({0xDEC1, seed})), sizes_(sizes), losses_(losses) {
    const int ranks = plan::pick(rng_, 2, 4);
    for (int i = 0; i < ranks; ++i) there_.push_back(i);
    positions_ = ranks + (sizes ? kJoiners : 0);
    control::ControllerOptions& options = options_.controller;
    options.steps = plan::pick(rng_, 20, 40);
    options.micro_batches = plan::pick(rng_, 1, 8);
    options.accumulation = plan::pick(rng_, 1, 3);
    options.window = plan::pick(rng_, 3, 6);
    options_.replicas = plan::pick(rng_, 1, 2);
    if (sizes && rng_.uniform() < 0.5) {
      options.policy.rank_use = control::RankUse::kFewest;
      options.policy.pack_slack = rng_.uniform();
      options.release_after = plan::pick(rng_, 1, 6);
      options.min_ranks = plan::pick(rng_, 1, 2);
    }
    const int layers = plan::pick(rng_, ranks + kJoiners, 12);
    for (int i = 0; i < layers; ++i) {
      known_.layers.push_back({.name = fmt::format("layer{}", i),
                               .parameter_bytes = Bytes{plan::pick(rng_, 0, 1 << 20)},
                               .gradient_bytes = Bytes{plan::pick(rng_, 0, 1 << 20)},
                               .optimizer_bytes = Bytes{plan::pick(rng_, 0, 1 << 20)},
                               .copy_bytes = {},
                               .activation_bytes = Bytes{plan::pick(rng_, 1, 1 << 16)},
                               .boundary_bytes = Bytes{plan::pick(rng_, 1, 1 << 16)}});
      seconds_.push_back(1e-3 * (0.2 + rng_.uniform()));
    }
    if (!sizes && seed % 3 == 1) recompute();
    noise_ = 0.1 * rng_.uniform();
    counted_ = seed % 4 == 0;
    std::vector<int> cut(static_cast<std::size_t>(ranks), 1);
    for (int i = ranks; i < layers; ++i) ++cut[rng_.below(cut.size())];
    plan_ = plan::make_plan(cut, schedule::ScheduleKind::k1F1B);
    if (sizes) {
      Event& first = events_.emplace_back();
      for (int i = ranks; i < positions_; ++i) first.leave.push_back(i);
    }
  }

  // Runs it; its load trace.
  Expected<std::string> trace() {
    control::Decisions measuring(control::Controller(known_, options_.controller), ranks(),
                                 options_);
    dynamism::RunStart start{.plan = plan_,
                             .measured_under = plan_,
                             .measured = {},
                             .replicas = options_.replicas,
                             .accumulation = options_.controller.accumulation};
    for (int i = plan::pick(rng_, 1, 4); i > 0; --i) measuring.observe(exchanged(), plan_, 0);
    start.measured = measuring.profiler().observations();
    decisions_.emplace(control::Controller(known_, options_.controller), ranks(), options_);
    decisions_->use(measuring.profiler());
    DYNMO_TRY(choose_recomputed());
    dynamism::TraceLines lines;
    lines.start(std::move(start));
    std::string text;
    for (std::int64_t step = 0; step < options_.controller.steps; ++step) {
      if (coming_) plan_ = *std::exchange(coming_, std::nullopt);
      const int frozen = frozen_layers_;
      if (step > 0 && sizes_) DYNMO_TRY(change_ranks(step));
      if (step > 0) {
        const cost::Announced announced = change();
        decisions_->know(known_);
        decisions_->announce(announced, step);
      }
      if (frozen_layers_ != frozen) DYNMO_TRY(choose_recomputed());
      DYNMO_ASSIGN(auto decision, decisions_->decide(now(step)));
      const plan::Plan before = plan_;
      if (decision) carry_out(step, *decision);
      if (decision && decision->migrate) {
        DYNMO_TRY(choose_recomputed());
        EXPECT_EQ(recomputed_, decision->recomputed);
      } else if (decision) {
        recomputed_ = decision->recomputed;
      }
      // Layers may move while the step runs, so that the new plan is that of the next one.
      if (decision && decision->migrate && rng_.uniform() < 0.5) {
        coming_ = std::exchange(plan_, before);
      }
      decisions_->observe(exchanged(), plan_, frozen_layers_);
      const dynamism::TraceLines::Measured measured{decisions_->observed(), coming_.has_value()};
      DYNMO_ASSIGN(const std::string line,
                   lines.add(step, step > 0 ? decisions_->announced() : cost::Announced::kNothing,
                             *decisions_->costs(frozen_layers_), &measured));
      text += line;
    }
    return text;
  }

  // The same job for the simulator.
  [[nodiscard]] Job job(std::unique_ptr<dynamism::LoadModel> load) const {
    Job job;
    const control::ControllerOptions& options = options_.controller;
    job.scenario.cluster.pipeline_ranks = positions_;
    job.scenario.cluster.data_parallel = options_.replicas;
    job.scenario.training.steps = options.steps;
    job.scenario.training.micro_batches = options.micro_batches;
    if (options.policy.recompute == plan::Recompute::kAuto) {
      job.scenario.training.recompute = "auto";
      job.scenario.cluster.memory = options_.memory;
    }
    job.scenario.policy.minimum_gain = options.policy.minimum_gain;
    job.scenario.policy.noise_factor = options.policy.noise_factor;
    job.scenario.policy.window = options.window;
    job.scenario.policy.pack_slack = options.policy.pack_slack;
    job.scenario.policy.release_after = options.release_after;
    job.scenario.policy.ranks_min = options.min_ranks;
    job.scenario.events = events_;
    if (losses_) job.scenario.training.checkpoint_every = 1;  // no step is taken back
    job.device = cost::find_device("h100").value();
    job.load = std::move(load);
    return job;
  }
  [[nodiscard]] bool packs() const {
    return options_.controller.policy.rank_use == control::RankUse::kFewest;
  }

  std::vector<Decided> told;
  int moves = 0;
  int joins = 0;     // events
  int vacated = 0;   // moves off ranks that leave
  int released = 0;  // ranks
  int lost = 0;      // events
  int chosen = 0;    // sets of recomputed layers

 private:
  [[nodiscard]] int ranks() const { return static_cast<int>(there_.size()); }
  [[nodiscard]] control::Decisions::Now now(std::int64_t step) const {
    return {plan_, step, frozen_layers_, recomputed_};
  }

  // Memory asks for recomputation, and is enough for all layers recomputed.
  void recompute() {
    Bytes largest;
    Bytes all;
    for (cost::LayerCost& layer : known_.layers) {
      layer.parameter_bytes = layer.gradient_bytes = layer.optimizer_bytes = Bytes{16};
      layer.boundary_bytes = Bytes{64};
      largest = std::max(largest, layer.activation_bytes);
      all += layer.activation_bytes;
    }
    options_.memory = std::max(largest + Bytes{1 << 13}, Bytes{all.value * 6 / 10});
    options_.controller.policy.recompute = plan::Recompute::kAuto;
  }
  Expected<void> choose_recomputed() {
    DYNMO_ASSIGN(recomputed_, decisions_->recomputed_under(plan_, frozen_layers_));
    if (!recomputed_.empty()) ++chosen;
    return {};
  }

  void carry_out(std::int64_t step, const control::Decision& decision) {
    plan::Plan in_scenario = decision.plan;
    in_scenario.ranks = positions_;
    for (plan::PlanStage& stage : in_scenario.stages) {
      stage.rank = Rank(there_[stage.rank.index()]);
    }
    told.emplace_back(step, decision.migrate, in_scenario, decision.why, decision.reason);
    if (!decision.migrate) return;
    decisions_->moved(decision.migration.bytes());
    plan_ = decision.plan;
    ++moves;
  }

  // Ranks are drained, packed, or come; both at once; or those without layers are released.
  Expected<void> change_ranks(std::int64_t step) {
    std::vector<Rank> kept;
    for (int i = 0; i < ranks(); ++i) kept.emplace_back(i);
    int joining = 0;
    if (rng_.uniform() < 0.05 && kept.size() > 1) {
      kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(rng_.below(kept.size())));
    } else if (rng_.uniform() < 0.03 && kept.size() > 2) {
      kept.resize(kept.size() - 2);
    }
    if (rng_.uniform() < 0.08)
      joining = std::min(plan::pick(rng_, 1, 2), positions_ - next_position());
    if (std::ssize(kept) == ranks() && joining == 0) {
      if (!packs()) return {};
      const auto release = decisions_->release(plan_, step);
      if (!release) return {};
      released += ranks() - static_cast<int>(release->kept.size());
      regroup(release->kept, 0);
      return {};
    }
    Event event{.step = step};
    for (int i = 0; i < ranks(); ++i) {
      const bool stays = std::binary_search(kept.begin(), kept.end(), Rank(i));
      if (!stays) event.leave.push_back(there_[static_cast<std::size_t>(i)]);
    }
    for (int i = 0; i < joining; ++i) event.join.push_back(next_position() + i);
    joins += joining > 0 ? 1 : 0;
    const bool stranded = !std::ranges::includes(kept, plan::ranks_at_work(plan_));
    if (stranded && losses_ && rng_.uniform() < 0.5) {
      event.failure = true;
      ++lost;
      return lose(step, kept, joining, std::move(event));
    }
    if (stranded) {
      DYNMO_ASSIGN(const control::Decision decision, decisions_->vacate(now(step), kept));
      carry_out(step, decision);
      ++vacated;
    }
    regroup(kept, joining);
    events_.push_back(std::move(event));
    return {};
  }

  // The others continue. The lost ranks send no message.
  Expected<void> lose(std::int64_t step, const std::vector<Rank>& kept, int joining, Event event) {
    const plan::Plan before = plan_;
    renumber(kept, joining);
    control::Controller controller = decisions_->take_controller();
    const cost::ModelCost known = controller.profiler().known(frozen_layers_);
    const cost::Cluster there = control::as_measured(
        cost::equal_ranks(ranks(), options_.memory), controller.profiler().overhead(),
        options_.replicas, options_.controller.accumulation);
    DYNMO_ASSIGN(
        const control::AfterLoss after,
        controller.after_loss({.plan = before, .step = step, .known = known, .cluster = there}));
    EXPECT_EQ(after.fault, "");
    decisions_.emplace(std::move(controller), ranks(), options_);
    carry_out(step, after.decision);
    events_.push_back(std::move(event));
    return {};
  }

  // The next group, whose ranks were all given what one of the last one knew.
  void regroup(const std::vector<Rank>& kept, int joining) {
    const int count = static_cast<int>(kept.size()) + joining;
    plan_ = plan::with_more_ranks(plan::without_others(plan_, kept), count);
    ++plan_.generation;
    renumber(kept, joining);
  }
  void renumber(const std::vector<Rank>& kept, int joining) {
    std::vector<std::optional<Rank>> before(kept.begin(), kept.end());
    before.resize(before.size() + static_cast<std::size_t>(joining));
    const int first = next_position();
    std::vector<int> there;
    for (const Rank rank : kept) there.push_back(there_[rank.index()]);
    for (int i = 0; i < joining; ++i) there.push_back(first + i);
    came_ += joining;
    there_ = std::move(there);
    control::Controller controller = decisions_->take_controller();
    controller.ranks_changed(before);
    control::Controller newcomers(known_, options_.controller);
    const auto state = parse_json(controller.state().dump(), "state");
    EXPECT_TRUE(state && newcomers.restore(*state));
    decisions_.emplace(std::move(newcomers), ranks(), options_);
  }
  // The position of the next rank that comes.
  [[nodiscard]] int next_position() const { return positions_ - kJoiners + came_; }

  control::ExchangedStep exchanged() {
    control::ExchangedStep step;
    for (std::size_t i = 0; i < seconds_.size(); ++i) {
      const double time = seconds_[i] * std::max(0.1, 1 + noise_ * rng_.normal());
      const bool frozen = i < static_cast<std::size_t>(frozen_layers_);
      step.layers.push_back({.time = {time, frozen ? 0 : time, frozen ? 0 : time},
                             .update_s = frozen ? 0 : 0.1 * time,
                             .stash_bytes = {}});
      if (counted_) step.layers.back().work = 100 * seconds_[i];
    }
    step.stats.overhead = {.overhead_s = 1e-4 * rng_.uniform(),
                           .action_s = 1e-6 * rng_.uniform(),
                           .message_s = 1e-6 * rng_.uniform(),
                           .reduction_bytes_per_s = {}};
    if (options_.replicas > 1)
      step.stats.overhead.reduction_bytes_per_s = 1e9 * (1 + rng_.uniform());
    step.stats.plan_s = 1e-4 * rng_.uniform();
    step.stats.migrate_s = 1e-3 * rng_.uniform();
    return step;
  }

  // Layers freeze, train again, change silently or announced, are pruned, or nothing happens.
  cost::Announced change() {
    const double drawn = rng_.uniform();
    if (drawn < 0.05 && frozen_layers_ + 1 < known_.size()) {
      ++frozen_layers_;
      return cost::Announced::kKnown;
    }
    if (drawn > 0.97 && frozen_layers_ > 0) {
      frozen_layers_ = 0;
      return cost::Announced::kKnown;
    }
    if (drawn > 0.2) return cost::Announced::kNothing;
    const bool predicted = drawn > 0.15;
    for (std::size_t i = 0; i < seconds_.size(); ++i) {
      if (rng_.uniform() >= 0.3) continue;
      const double factor = 0.5 + rng_.uniform();
      seconds_[i] *= factor;
      if (predicted) known_.layers[i].product_time *= std::min(1.0, factor);
    }
    if (predicted) return cost::Announced::kPredicted;
    return drawn < 0.1 ? cost::Announced::kWork : cost::Announced::kNothing;
  }

  Rng rng_;
  bool sizes_;
  bool losses_;
  control::DecisionsOptions options_;
  int positions_ = 0;       // of the scenario
  int came_ = 0;            // ranks that have come
  std::vector<int> there_;  // positions, by rank
  cost::ModelCost known_;
  std::vector<double> seconds_;
  double noise_ = 0;
  bool counted_ = false;  // sources count the work of layers
  plan::Plan plan_;
  std::optional<plan::Plan> coming_ = {};  // of the next step
  int frozen_layers_ = 0;
  plan::LayerSet recomputed_;
  std::optional<control::Decisions> decisions_;
  std::vector<Event> events_;
};

// Decides again from the trace alone.
void expect_the_same(Drawn& run, const std::string& what) {
  SCOPED_TRACE(what);
  const auto text = run.trace();
  ASSERT_TRUE(text) << text.error().message;
  auto load = dynamism::parse_trace(*text, "drawn");
  ASSERT_TRUE(load) << load.error().message;
  ASSERT_NE((*load)->recording(), nullptr);
  const Job job = run.job(std::move(*load));
  const auto again =
      scenario::run(job, *job.load, parse_policy(run.packs() ? "optimal+pack" : "optimal").value());
  ASSERT_TRUE(again) << again.error().message;
  ASSERT_EQ(again->decisions.size(), run.told.size());
  for (std::size_t i = 0; i < run.told.size(); ++i) {
    const auto& [step, decision] = again->decisions[i];
    ASSERT_EQ(Decided(step, decision.migrate, decision.plan, decision.why, decision.reason),
              run.told[i])
        << "step " << std::get<0>(run.told[i]) << ": " << std::get<4>(run.told[i])
        << "\nagain step " << step << ": " << decision.reason;
  }
}

// Under sanitizers a run costs ten times as much.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kRuns = 50;
#else
constexpr int kRuns = 1000;
#endif

TEST(SimulatedDecisions, OfAThousandDrawnTracesAreThoseOfThePipelinesCaller) {
  int decisions = 0;
  int moves = 0;
  int chosen = 0;
  for (std::uint64_t seed = 1; seed <= static_cast<std::uint64_t>(kRuns); ++seed) {
    Drawn run(seed, /*sizes=*/false);
    ASSERT_NO_FATAL_FAILURE(expect_the_same(run, fmt::format("seed {}", seed)));
    decisions += static_cast<int>(run.told.size());
    chosen += run.chosen;
    moves += run.moves;
  }
  EXPECT_GT(decisions, 3 * kRuns);
  EXPECT_GT(moves, kRuns * 3 / 10);
  EXPECT_GT(chosen, kRuns / 5);
}

// Ranks are drained, packed by a command or by the policy, released, and come, with replicas, too.
TEST(SimulatedDecisions, OfAThousandRunsWhoseRanksComeAndGoAreThoseOfThePipelinesCaller) {
  int joins = 0;
  int vacated = 0;
  int released = 0;
  int moves = 0;
  for (std::uint64_t seed = 1; seed <= static_cast<std::uint64_t>(kRuns); ++seed) {
    Drawn run(seed, /*sizes=*/true);
    ASSERT_NO_FATAL_FAILURE(expect_the_same(run, fmt::format("seed {}", seed)));
    joins += run.joins;
    vacated += run.vacated;
    released += run.released;
    moves += run.moves;
  }
  EXPECT_GT(joins, kRuns / 2);
  EXPECT_GT(vacated, kRuns / 2);
  EXPECT_GT(released, kRuns / 5);
  EXPECT_GT(moves, kRuns * 3 / 2);
}

// After a loss the controller plans for the ranks that are left.
TEST(SimulatedDecisions, OfAThousandRunsThatLoseRanksAreThoseOfThePipelinesCaller) {
  int lost = 0;
  int vacated = 0;
  for (std::uint64_t seed = 1; seed <= static_cast<std::uint64_t>(kRuns); ++seed) {
    Drawn run(seed, /*sizes=*/true, /*losses=*/true);
    ASSERT_NO_FATAL_FAILURE(expect_the_same(run, fmt::format("seed {}", seed)));
    lost += run.lost;
    vacated += run.vacated;
  }
  EXPECT_GT(lost, kRuns / 4);
  EXPECT_GT(vacated, kRuns / 4);
}

}  // namespace
}  // namespace dynmo::scenario
