// SPDX-License-Identifier: Apache-2.0
#pragma once

// Anneals cut and order of the adaptive schedule for one placement (docs/planner.md). It uses only
// integers, so every machine makes the same decisions.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/core/rng.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/schedule/adaptive.h"

namespace dynmo::plan::internal {

// A model as prefix sums over its layers (layers + 1 of each). Times are in 1/1024 ns at speed 1,
// so that the sums round as those of the replay do.
struct Prefixes {
  static constexpr int kPartBits = 10;
  std::vector<std::int64_t> forward;
  std::vector<std::int64_t> input_gradient;
  std::vector<std::int64_t> weight_gradient;
  std::vector<std::int64_t> update;
  std::vector<std::int64_t> stash;
  std::vector<std::int64_t> state;
  // Forward time and saved bytes of the layers that may be recomputed.
  std::vector<std::int64_t> again;
  std::vector<std::int64_t> saved;
  std::vector<Bytes> boundary;  // by layer
  int frozen_layers = 0;
  Recompute recompute = Recompute::kNone;

  // Sums up a model. With kWhole all layers are recomputed. With kAuto annealing chooses their
  // number for each stage.
  Prefixes(const cost::ModelCost& model, Recompute recompute);
  [[nodiscard]] int layers() const { return static_cast<int>(boundary.size()); }
};

// The state that annealing changes. Stage s has layers [bounds[s], bounds[s + 1]), which may be
// none, and is on placement[s].
struct Layout {
  std::vector<int> bounds;
  std::vector<Rank> placement;
  schedule::DuePolicy policy;  // with an offset for every stage
  std::vector<int> again;      // number of first layers of each stage that are recomputed
};

// The cuts and orders from which annealing starts.
// - kLevel: ranks of equal work, under many due policies.
// - kFilled: also ranks that have less work the longer they wait for the first micro-batch and for
//   the last gradients. They are tried under few due policies, with and without gradients delayed
//   by a quarter of all micro-batches. This helps pipelines that are long relative to the number of
//   micro-batches, and problems with few affordable runs.
enum class Starts { kLevel, kFilled };

class Annealer {
 public:
  static constexpr std::int64_t kInfeasible = schedule::ListScheduler::kStopped;

  // Starts from the best of a few cuts that were balanced without simulation. Each is tried under a
  // grid of due policies, for up to `actions` placed actions.
  Annealer(std::string name, const Prefixes& model, const cost::Cluster& cluster, int micro_batches,
           std::vector<Rank> placement, Starts starts, std::uint64_t seed, std::int64_t actions);

  // Anneals from the best result so far, for `actions` placed actions. The start temperature is
  // `heat` / 2^20 of its step time.
  void anneal(std::int64_t actions, std::int64_t heat);

  [[nodiscard]] const std::string& name() const { return name_; }
  // Returns the step time in nanoseconds of the best result so far. It equals that of the replay up
  // to rounding. Returns the constant kInfeasible of this class if no cut fits memory yet.
  [[nodiscard]] std::int64_t best() const { return best_.time; }
  [[nodiscard]] Plan plan();  // requires best() to be feasible
  [[nodiscard]] std::int64_t spent() const { return spent_; }

 private:
  struct Problem {
    const Prefixes& model;
    const cost::Cluster& cluster;
    int micro_batches;
  };
  struct Stage {  // non-empty stage, neighbours on one rank merged
    int rank = 0;
    int first = 0;
    int end = 0;
    int origin = 0;          // index in the layout
    std::int64_t again = 0;  // forward time that recomputation adds
    std::int64_t saved = 0;  // bytes that it saves
    friend bool operator==(const Stage& a, const Stage& b) {
      return a.rank == b.rank && a.first == b.first && a.end == b.end && a.again == b.again &&
             a.saved == b.saved;
    }
  };
  struct Done {  // the last run that was not stopped
    std::vector<Stage> stages;
    schedule::DuePolicy policy;
    std::int64_t time = kInfeasible;
    std::int64_t actions = 0;
  };

  struct Candidate {
    Layout layout;
    std::int64_t time = kInfeasible;
  };
  struct Loaded {  // belongs to the layout loaded last
    std::int64_t update = 0;
    std::vector<Stage> stages;
    schedule::PipelineShape shape;
    std::vector<schedule::StageTiming> timings;
    std::vector<Bytes> limits;
    schedule::DuePolicy policy;
  };
  struct Scratch {  // kept to save allocations
    std::vector<std::int64_t> state;
    std::vector<std::int64_t> need;
    std::vector<std::int64_t> restored;
    std::vector<std::int64_t> load;
    std::vector<std::int64_t> filler;
  };

  struct Balance {
    int evenness = 0;     // percent
    bool filled = false;  // the time of filling and draining counts as work
  };

  void balance_cut(Balance balance);
  [[nodiscard]] std::int64_t balance_score(const std::vector<int>& bounds, Balance balance);
  void add_filling(const std::vector<int>& bounds);
  void try_grid(std::int64_t actions);
  void try_policy(const schedule::DuePolicy& policy, std::int64_t actions);
  [[nodiscard]] std::int64_t time_of(const Layout& layout, std::int64_t bound);
  [[nodiscard]] bool load(const Layout& layout);
  void load_stages(const Layout& layout);
  void load_timings();
  [[nodiscard]] bool load_limits();
  void load_policy(const schedule::DuePolicy& policy);
  void move_bounds(std::vector<int>& bounds);
  void move_policy(schedule::DuePolicy& policy);
  void move_offset(schedule::DuePolicy& policy);
  void move_again(Layout& layout);
  [[nodiscard]] int pick(int low, int high) {
    return low + static_cast<int>(rng_.below(static_cast<std::uint64_t>(high - low + 1)));
  }

  std::string name_;
  Problem problem_;
  Starts starts_;
  Rng rng_;
  schedule::ListScheduler scheduler_;
  Candidate now_;
  Candidate best_;
  std::int64_t spent_ = 0;
  Done done_;
  Loaded loaded_;
  Scratch scratch_;
};

}  // namespace dynmo::plan::internal
