// SPDX-License-Identifier: Apache-2.0
#pragma once

// The control loop: observe a step, decide at a boundary between two. `dynmo train` runs it on
// every rank, and `dynmo simulate` on loads. Window, noise, gates, horizon and the costs of
// deciding and moving are only here. Deterministic: ranks with the same inputs make the same
// decisions.
//
// A plan has one of seven causes (Cause in policy.h):
// - known: training has announced that the work has changed. The new costs follow from
//   `Boundary::known` at once, or are measured after one step. Unless they are certain
//   (Announced::kKnown), a move needs the evidence of a confirmed change. New ranks are a known
//   change, too.
// - lost: ranks were lost. after_loss() plans for the ranks that are left.
// - confirmed: a change whose costs had to be measured, three steps later.
// - found: the work of the newest steps differs from that of the older ones (find_change.h), or
//   the speed of a rank (rank_speeds.h).
// - waited: a move was too expensive. The time lost since then, and expected over the horizon, now
//   exceeds its cost.
// - counted: sources count other work (LayerSample::work) than at the last plan. The busiest rank's
//   growth by it costs more over the horizon than a plan does.
// - drift: a rank's share of the work has changed since the last plan. It is checked 1, 2, 4, ...
//   steps apart.
//
// Found changes and drift may spend a two-hundredth of the training time on plans that lead to no
// move. They may spend more if the busiest rank's growth since the last plan costs more than
// another plan. Counts are in steps, whether or not each is observed (Observation::steps).
//
// It outlives the group of ranks for which it decides. Its data are renumbered by ranks_changed().
// A new rank restores the state() of an older one.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dynmo/control/policy.h"
#include "dynmo/control/profiler.h"
#include "dynmo/control/rank_speeds.h"
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
  int window = 5;                  // minimum steps
  int micro_batches = 1;           // of one replay of the schedule
  int accumulation = 1;            // replays a step
  std::int64_t steps = 0;          // of the run
  std::int64_t horizon_steps = 0;  // expected duration of a gain; 0: as long as loads lasted so far
  std::int64_t release_after = 10;  // steps without layers before a rank is released
  int min_ranks = 1;                // minimum after a release
};

// The state between two steps.
struct Boundary {
  const plan::Plan& plan;  // in force
  std::int64_t step = 0;   // next one
  // Names, bytes and frozen layers. Its times are not used.
  const cost::ModelCost& known;
  const cost::Cluster& cluster;  // the plan's ranks
  plan::LayerSet recomputed = {};
  std::span<const std::string> names = {};  // of the ranks, for the user; none: "rank 0", ...
};

struct Release {
  std::vector<Rank> kept;       // ranks that stay, ascending, with the first rank
  std::int64_t idle_steps = 0;  // steps in which the others had no layers
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
  // Begins at step `first_step` of a run. `known` is as for Profiler.
  Controller(cost::ModelCost known, ControllerOptions options, std::int64_t first_step = 0);

  // Continues from the measurements of another profiler, of the same model. The current plan need
  // not follow from them, so a plan is made at the next boundary.
  void use(const Profiler& measured);
  // Sets new names and bytes of the layers.
  void know(const cost::ModelCost& known) { profiler_.know(known); }
  // Adds a step under `plan` with `frozen_layers` frozen layers.
  void observe(const cost::Observation& step, const plan::Plan& plan, int frozen_layers = 0);
  // Announces a change before step `step`.
  void announce(cost::Announced what, std::int64_t step);
  void forget_times() {
    profiler_.forget_times();
    speeds_.forget_times();
  }

  // Decides what to do before step `now.step`. Returns nullopt if there is no cause for a plan. The
  // times in the decision are those of one step. The caller carries out a decision to migrate, or
  // calls not_moved().
  [[nodiscard]] Expected<std::optional<Decision>> decide(const Boundary& now);
  void not_moved() { budget_.moved = false; }

  // Returns the decision that moves all layers away from leaving ranks at any cost. `kept` are the
  // other ranks, ascending. Returns kInfeasible if no plan on them fits the memory, and kBadInput
  // if nothing was measured yet.
  [[nodiscard]] Expected<Decision> vacate(const Boundary& now, const std::vector<Rank>& kept);
  // Returns the plan for the ranks of `now.cluster`, which are those left after a loss. `now.plan`
  // is the plan of the group before. Call ranks_changed() first. If nothing was measured, the cut
  // is even. This plan is made quickly, and the next boundary looks for a better one if the options
  // ask for that.
  [[nodiscard]] Expected<AfterLoss> after_loss(const Boundary& now);
  // Returns the release of ranks that have had no layers for `release_after` boundaries. Call it at
  // every boundary where ranks may be released. If a release is refused, it is returned again after
  // the same number of boundaries.
  [[nodiscard]] std::optional<Release> release(const plan::Plan& plan, std::int64_t step);
  // Renumbers the ranks after some have joined or left. Rank i was `before[i]`, or is new.
  void ranks_changed(const std::vector<std::optional<Rank>>& before);

  // Returns the state from which restore() makes an equal controller, with equal options. So a new
  // rank decides like the others.
  [[nodiscard]] Json state() const;
  // Restores a state(). Returns kInternal for any other JSON. Then this object must not be used.
  [[nodiscard]] Expected<void> restore(const Json& state);

  // Returns costs with which `accumulation` replays of the schedule take as long as a step. The
  // update, once a step, is divided among them. Returns nullopt before the first measurement.
  [[nodiscard]] std::optional<cost::ModelCost> costs(const cost::ModelCost& known,
                                                     const plan::LayerSet& recomputed = {}) const;
  [[nodiscard]] const Profiler& profiler() const { return profiler_; }
  // Returns the speeds of the ranks. Costs are those at full speed.
  [[nodiscard]] const RankSpeeds& speeds() const { return speeds_; }
  [[nodiscard]] const cost::Charges& charges() const { return charges_; }  // newest

 private:
  // The causes of a plan that are pending.
  struct Pending {
    bool known = false;          // training has announced a change
    bool measured_anew = false;  // the change must be measured
    bool waiting = false;        // ... before its plan is made
    bool first = false;          // costs are known for the first time
    bool ranks = false;          // ranks have joined or left
    std::optional<FoundChange> found = {};
    std::optional<SpeedChange> speed = {};
    std::optional<std::int64_t> confirm_at = {};  // in steps of observed_

    template <typename Self, typename Visit>
    static void fields(Self& self, Visit visit) {
      visit("known", self.known);
      visit("measured_anew", self.measured_anew);
      visit("waiting", self.waiting);
      visit("first", self.first);
      visit("ranks", self.ranks);
      visit("found", self.found);
      visit("speed", self.speed);
      visit("confirm_at", self.confirm_at);
    }
  };
  // The times since the newest changes, from which the duration of a load is estimated.
  struct Lasting {
    std::int64_t changed_step = 0;  // step of the newest known change
    std::int64_t interval = 0;      // steps from the previous one to it; 0: none
    std::int64_t since = 0;         // step of the newest move, or the first step
    bool known = false;             // the newest change was known, not found
    std::int64_t ranks = 0;         // maximum at a decision

    template <typename Self, typename Visit>
    static void fields(Self& self, Visit visit) {
      visit("ranks", self.ranks);
      visit("changed_step", self.changed_step);
      visit("interval", self.interval);
      visit("since", self.since);
      visit("known", self.known);
    }
  };
  // The next check for drift, and its reference: the last plan and its costs. Steps are those of
  // observed_.
  struct Drift {
    std::int64_t look_at = 0;
    std::int64_t wait = 1;  // between two checks
    std::int64_t decided_at = 0;
    std::vector<double> shares = {};           // of the work, by stage; empty: no plan yet
    std::vector<plan::PlanStage> stages = {};  // of that plan
    std::vector<double> work = {};  // counted at that plan, by layer; before one, at the first step
    int noisy_window = 0;           // its steps when noise prevented a move; 0: it did not
    double gain_s = 0;              // a step, predicted by the plan but not taken
    int fruitless = 0;              // plans since the newest move with too little gain

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
    double a_step_s = 0;  // lost in a step without it; 0: none
    double sum_s = 0;     // in all steps since
    double cost_s = 0;    // of the move

    template <typename Self, typename Visit>
    static void fields(Self& self, Visit visit) {
      visit("a_step_s", self.a_step_s);
      visit("sum_s", self.sum_s);
      visit("cost_s", self.cost_s);
    }
  };
  // The time of plans that led to no move, and the training time of which it may be a share.
  struct Budget {
    bool planned = false;  // since the last observation
    bool moved = false;    // that plan led to a move
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
    std::vector<Rank> at_work = {};          // ranks with layers
    std::optional<std::int64_t> since = {};  // step before which this was seen first

    template <typename Self, typename Visit>
    static void fields(Self& self, Visit visit) {
      visit("at_work", self.at_work);
      visit("since", self.since);
    }
  };
  // Calls visit(name, member) for all members except the profiler and the options.
  template <typename Self, typename Visit>
  static void fields(Self& self, Visit visit);

  void note_speeds(const std::vector<SpeedChange>& changes);
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
  // Returns the input of the policy. `ranks` are those of `now` at their present speeds. Here and
  // below, `costs` are without recomputation.
  [[nodiscard]] PolicyInput input(Cause cause, const Boundary& now, const cost::Cluster& ranks,
                                  const cost::ModelCost& costs) const;
  // Completes a decision of the policy, and records it as done.
  void remember(Cause cause, const Boundary& now, const cost::ModelCost& costs, Decision& decision);
  [[nodiscard]] std::string why(Cause cause, const Boundary& now) const;

  static constexpr const char* kRanksLost = "ranks were lost";

  ControllerOptions options_;
  Profiler profiler_;
  RankSpeeds speeds_;
  cost::Charges charges_;
  std::int64_t observed_ = 0;  // steps
  Pending pending_;
  Lasting lasting_;
  Drift drift_;
  Forgone forgone_;
  Budget budget_;
  Idle idle_;
};

// Returns `cluster` with the measured overhead of an action. If all ranks share a node, it also has
// the measured latency of a message, and with several replicas the bandwidth of a reduction. This
// bandwidth is multiplied by `accumulation`, the replays in a step, because a step has one
// reduction.
[[nodiscard]] cost::Cluster as_measured(cost::Cluster cluster, const cost::StepSample& overhead,
                                        int replicas, int accumulation);

}  // namespace dynmo::control
