// SPDX-License-Identifier: Apache-2.0
#pragma once

// The loop that decides: observe a step, decide at a boundary between two. `dynmo train` runs it on
// every rank, `dynmo simulate` on loads; window, noise, gates, horizon and the costs of deciding
// and moving are here and nowhere else. Deterministic: ranks that are fed alike decide alike.
//
// It plans for one of seven causes (Cause in policy.h):
//   known      the work has changed and training says so: once its new costs are known, which is
//              at once where they follow from `Boundary::known` and after one step otherwise;
//              predicted ones are not certain: they need as much evidence as confirmed ones. Ranks
//              that have come are a known change, too.
//   lost       ranks were lost: after_loss() plans for those that are left
//   confirmed  three steps later, of a change whose costs had to be measured
//   found      the newest steps are of other work than the older ones (find_change.h)
//   waited     a move was too expensive, and the time lost since then now exceeds its cost
//   counted    sources count other work (LayerSample::work) than at the last plan, and what the
//              busiest rank has gained by it costs more over the horizon than a plan
//   drift      looks 1, 2, 4, ... steps apart, where a rank's share of the work has changed since
//              the last plan
// Found changes and drift may spend a two-hundredth of the time of training on plans that lead to
// no move; more where the busiest rank's growth since the last plan costs more than another plan.
// All counts are of steps, also where only every so many are observed (Observation::steps).
//
// It outlives the group of ranks that it decides for: ranks_changed() renumbers what it remembers,
// and a rank that comes new restores the state() of one that was there.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dynmo/control/policy.h"
#include "dynmo/control/profiler.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/cost/layer_sample.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/recompute.h"

namespace dynmo::control {

struct ControllerOptions {
  PolicyOptions policy = {};
  int window = 5;                   // least steps
  int micro_batches = 1;            // of one replay of the schedule
  int accumulation = 1;             // replays a step
  std::int64_t steps = 0;           // of the run
  std::int64_t horizon_steps = 0;   // a gain is expected to last; 0: as long as loads did so far
  std::int64_t release_after = 10;  // steps that a rank has no layers before it is released
  int min_ranks = 1;                // none is released below it
};

// Between two steps.
struct Boundary {
  const plan::Plan& plan;  // in force
  std::int64_t step = 0;   // the one that comes
  // Names, bytes and what is frozen; its times are not used.
  const cost::ModelCost& known;
  const cost::Cluster& cluster;  // the plan's ranks
  plan::LayerSet recomputed = {};
  std::span<const std::string> names = {};  // of the ranks, for people; none: "rank 0", ...
};

// Ranks are given back.
struct Release {
  std::vector<Rank> kept;       // those that stay, ascending; the first rank is among them
  std::int64_t idle_steps = 0;  // in which the others had no layers
};

// The plan for the ranks that are left after a loss.
struct AfterLoss {
  Decision decision;  // a move
  // Why no plan fits the memory, or empty. The decision then has an even cut, under which the ranks
  // can hold the layers long enough to save them.
  std::string fault = {};
};

class Controller {
 public:
  // `known` as Profiler's. The run, or its part, begins at `first_step`.
  Controller(cost::ModelCost known, ControllerOptions options, std::int64_t first_step = 0);

  // Goes on from what another one has measured, of the same model.
  // The plan in force need not follow from it, so that one is made at the next boundary.
  void use(const Profiler& measured);
  // Names and bytes of the layers are others now.
  void know(const cost::ModelCost& known) { profiler_.know(known); }
  // One more step under `plan`, with so many frozen layers.
  void observe(const cost::Observation& step, const plan::Plan& plan, int frozen_layers = 0);
  // Before step `step`.
  void announce(cost::Announced what, std::int64_t step);
  void forget_times() { profiler_.forget_times(); }

  // Decides what to do before step `now.step`; nullopt where there is nothing to plan for (no plan
  // was made). Times are of a step. The caller carries a decision to migrate out, or says
  // not_moved().
  [[nodiscard]] Expected<std::optional<Decision>> decide(const Boundary& now);
  void not_moved() { budget_.moved = false; }

  // The decision that takes all layers from ranks that are to leave, whatever it costs. `kept`, the
  // others, ascending. kInfeasible: no plan on them fits the memory. kBadInput: nothing was
  // measured yet.
  [[nodiscard]] Expected<Decision> vacate(const Boundary& now, const std::vector<Rank>& kept);
  // Returns the plan for the ranks of `now.cluster`, all that are left after a loss. `now.plan` is
  // that of the group before. Call ranks_changed() first. If nothing was measured, the cut is even.
  // A better plan than this quick one is looked for at the next boundary.
  [[nodiscard]] Expected<AfterLoss> after_loss(const Boundary& now);
  // Whether ranks that have had no layers for `release_after` boundaries are released now. Asked at
  // every boundary where ranks may be released at all; of ranks that are refused, again after as
  // many.
  [[nodiscard]] std::optional<Release> release(const plan::Plan& plan, std::int64_t step);
  // Ranks have come or gone, and what is said from now on numbers them anew: rank i was `before[i]`
  // until now, or has come.
  void ranks_changed(const std::vector<std::optional<Rank>>& before);

  // Returns the state from which restore() makes another controller, of equal options, continue as
  // this one would: a new rank then decides as the others do.
  [[nodiscard]] Json state() const;
  // kInternal where `state` is not of such a controller; then this one is not to be used.
  [[nodiscard]] Expected<void> restore(const Json& state);

  // Costs under which `accumulation` replays of the schedule take as long as a step: the update,
  // once a step, is shared out over them. nullopt before anything was measured.
  [[nodiscard]] std::optional<cost::ModelCost> costs(const cost::ModelCost& known,
                                                     const plan::LayerSet& recomputed = {}) const;
  [[nodiscard]] const Profiler& profiler() const { return profiler_; }
  [[nodiscard]] const cost::Charges& charges() const { return charges_; }  // newest

 private:
  // The reasons to plan that are pending.
  struct Pending {
    bool known = false;          // a change that training has announced, and ...
    bool measured_anew = false;  // ... that has to be measured, ...
    bool waiting = false;        // ... before a plan is made for it
    bool first = false;          // the change is that costs are known for the first time
    bool ranks = false;          // the change is that ranks have come or gone
    std::optional<FoundChange> found = {};
    std::optional<std::int64_t> confirm_at = {};  // as observed_ counts

    template <typename Self, typename Visit>
    static void fields(Self& self, Visit visit) {
      visit("known", self.known);
      visit("measured_anew", self.measured_anew);
      visit("waiting", self.waiting);
      visit("first", self.first);
      visit("ranks", self.ranks);
      visit("found", self.found);
      visit("confirm_at", self.confirm_at);
    }
  };
  // How long loads last.
  struct Lasting {
    std::int64_t changed_step = 0;  // of the newest change that was known ...
    std::int64_t interval = 0;      // ... and steps since the one before; 0: there was none
    std::int64_t since = 0;         // of the newest move, or the first step
    bool known = false;             // the newest change was, not found
    std::int64_t ranks = 0;         // the most at a decision

    template <typename Self, typename Visit>
    static void fields(Self& self, Visit visit) {
      visit("ranks", self.ranks);
      visit("changed_step", self.changed_step);
      visit("interval", self.interval);
      visit("since", self.since);
      visit("known", self.known);
    }
  };
  // When to look for drift, and from what: the last plan and what it was made for. Counts as
  // observed_ does.
  struct Drift {
    std::int64_t look_at = 0;
    std::int64_t wait = 1;  // between two looks
    std::int64_t decided_at = 0;
    std::vector<double> shares = {};           // of the work, by stage; empty: no plan yet
    std::vector<plan::PlanStage> stages = {};  // of that plan
    std::vector<double> work = {};             // counted then, by layer; before it, at first
    int noisy_window = 0;  // its steps where the noise forbade a move; 0: it did not
    double gain_s = 0;     // that the plan promised and that was not taken, a step
    int fruitless = 0;     // plans since the newest move that would have gained too little

    template <typename Self, typename Visit>
    static void fields(Self& self, Visit visit) {
      visit("look_at", self.look_at);
      visit("wait", self.wait);
      visit("decided_at", self.decided_at);
      visit("shares", self.shares);
      visit("stages", self.stages);
      visit("work", self.work);
      visit("noisy_window", self.noisy_window);
      visit("gain_s", self.gain_s);
      visit("fruitless", self.fruitless);
    }
  };
  // A move that was too expensive.
  struct Forgone {
    double a_step_s = 0;  // lost in a step, for want of it; 0: there is none
    double sum_s = 0;     // in all steps since
    double cost_s = 0;    // of the move

    template <typename Self, typename Visit>
    static void fields(Self& self, Visit visit) {
      visit("a_step_s", self.a_step_s);
      visit("sum_s", self.sum_s);
      visit("cost_s", self.cost_s);
    }
  };
  // Plans that led to no move, against the time of training.
  struct Budget {
    bool planned = false;  // since the last observation, and ...
    bool moved = false;    // ... it led to a move
    double fruitless_s = 0;
    double trained_s = 0;

    template <typename Self, typename Visit>
    static void fields(Self& self, Visit visit) {
      visit("planned", self.planned);
      visit("moved", self.moved);
      visit("fruitless_s", self.fruitless_s);
      visit("trained_s", self.trained_s);
    }
  };
  // Ranks without layers.
  struct Idle {
    std::vector<Rank> at_work = {};          // the others
    std::optional<std::int64_t> since = {};  // step before which the same ones were seen first

    template <typename Self, typename Visit>
    static void fields(Self& self, Visit visit) {
      visit("at_work", self.at_work);
      visit("since", self.since);
    }
  };
  // All but the profiler and the options.
  template <typename Self, typename Visit>
  static void fields(Self& self, Visit visit);

  [[nodiscard]] std::optional<Cause> cause(std::int64_t step) const;
  struct RankWork;
  [[nodiscard]] std::map<Rank, RankWork> rank_work(const Boundary& now,
                                                   const std::vector<double>& work) const;
  [[nodiscard]] double noise_of(const RankWork& work) const;
  [[nodiscard]] bool affords(Cause cause, const Boundary& now, const cost::ModelCost& costs) const;
  [[nodiscard]] bool counted(const Boundary& now, const cost::ModelCost& costs) const;
  [[nodiscard]] bool drifted(const Boundary& now, const cost::ModelCost& costs) const;
  [[nodiscard]] Cause evidence(Cause cause) const;
  [[nodiscard]] double horizon_steps(Cause cause, std::int64_t step) const;
  // `costs` without recomputation, here and below.
  [[nodiscard]] PolicyInput input(Cause cause, const Boundary& now,
                                  const cost::ModelCost& costs) const;
  // Completes a decision of the policy, and takes it as what was done.
  void remember(Cause cause, const Boundary& now, const cost::ModelCost& costs, Decision& decision);
  [[nodiscard]] std::string why(Cause cause, const Boundary& now) const;

  static constexpr const char* kRanksLost = "ranks were lost";

  ControllerOptions options_;
  Profiler profiler_;
  cost::Charges charges_;
  std::int64_t observed_ = 0;  // steps
  Pending pending_;
  Lasting lasting_;
  Drift drift_;
  Forgone forgone_;
  Budget budget_;
  Idle idle_;
};

// `cluster` as the measurements beside the layers have it: overhead of an action, where all ranks
// share a node latency of a message, and of several replicas the bandwidth of their reduction, of
// which `accumulation` replays have one.
[[nodiscard]] cost::Cluster as_measured(cost::Cluster cluster, const cost::StepSample& overhead,
                                        int replicas, int accumulation);

}  // namespace dynmo::control
