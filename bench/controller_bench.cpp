// SPDX-License-Identifier: Apache-2.0
// How well the controller decides: six load models x four
// noises of measuring x SEEDS, 8 ranks, 300 steps in which a load goes through the 10,000 of its
// whole run. Pruning comes twice: one that training announces and one (hidden) that has to be
// found.
//
//   controller_bench [SEEDS [FIRST]]     (20 seeds from 1 on)
//
// It is compared with an oracle that knows the true costs of all steps, past and to come, pays the
// same for moving and nothing for planning: the best sequence, by dynamic programming, of plans of
// which each is the optimal cut of some step. And with never moving. All three begin with the
// optimal cut of the first step; a step takes what the replay of its plan with the true costs says.
//
//   regret    time of all steps, moves and plans over the oracle's, less 1
//   never     the same over that of never moving, largest of any run
//   moves     of all runs of the line; and over the oracle's
//   layers    that a move of the controller's takes along, mean; there are 64
//   reaction  median steps from a change, announced or hidden, to the first move behind it, of the
//             changes that the oracle answers before the next one; no move: the steps to the next
//             change. Loads that only drift have none.
//   lag       median steps from any move of the oracle's, which knows what comes, to the next of
//   the
//             controller (0: up to 3 before); no move: the steps to the oracle's next
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dynmo/control/controller.h"
#include "dynmo/core/check.h"
#include "dynmo/core/median.h"
#include "dynmo/core/rng.h"
#include "dynmo/cost/device.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/propose.h"
#include "tests/dynamism/default_loads.h"

namespace dynmo::control {
namespace {

constexpr int kRanks = 8;
constexpr int kMicroBatches = 32;
constexpr std::int64_t kSteps = 300;
constexpr std::int64_t kLoadSteps = 10'000;
constexpr std::size_t kOraclePlans = 48;
constexpr cost::Charges kCharges = {.plan_s = 0.5e-3, .move_fixed_s = 5e-3, .bytes_per_s = 1e10};

struct Noise {
  std::string name;
  double of_layers = 0;
  double of_ranks = 0;
  bool bursts = false;
};

const std::vector<Noise> kNoises = {
    {"none"}, {"layers 5 %", 0.05}, {"ranks 15 %", 0, 0.15}, {"bursts 2 x", 0, 0, true}};

cost::Cluster ranks() { return cost::equal_ranks(kRanks); }

// The true costs of a load.
struct Truth {
  std::string name;
  std::vector<cost::ModelCost> costs;    // by step
  std::vector<cost::Announced> changes;  // by step
  bool hidden = false;                   // they are not announced
  bool counted = false;                  // training counts the work of layers
};

Truth truth_of(const dynamism::NamedLoad& named) {
  Truth truth{.name = named.name, .costs = {}, .changes = {}};
  truth.counted = named.load->counts_work();
  std::int64_t before = 0;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const std::int64_t now = step * kLoadSteps / kSteps;
    truth.costs.push_back(named.load->at(now));
    auto change = cost::Announced::kNothing;
    for (std::int64_t i = before + 1; i <= now; ++i) {
      const cost::Announced next = named.load->announced_at(i);
      if (change != cost::Announced::kWork && next != cost::Announced::kNothing) change = next;
    }
    truth.changes.push_back(change);
    before = now;
  }
  return truth;
}

plan::Plan optimal_plan(const cost::ModelCost& model) {
  const auto found = plan::propose(plan::Balancer::kOptimal, {model, ranks(), kMicroBatches});
  DYNMO_CHECK(found.has_value(), "a plan, got: {}", found.error().message);
  return found->plan;
}

double step_s(const plan::Plan& plan, const cost::ModelCost& model) {
  const auto evaluation = plan::evaluate(plan, {model, ranks(), kMicroBatches});
  DYNMO_CHECK(evaluation.has_value(), "a replay, got: {}", evaluation.error().message);
  return evaluation->step_time_s;
}

double move_s(const plan::Plan& from, const plan::Plan& to, const cost::ModelCost& model) {
  const auto bytes = static_cast<double>(plan::difference(from, to, model).bytes().value);
  return bytes / kCharges.bytes_per_s + kCharges.move_fixed_s;
}

struct Course {
  double total_s = 0;
  std::size_t layers = 0;                // moved, in all moves
  std::vector<std::int64_t> moves = {};  // steps before which layers moved
};

Course never(const Truth& truth) {
  Course course;
  const plan::Plan plan = optimal_plan(truth.costs.front());
  for (const cost::ModelCost& costs : truth.costs) course.total_s += step_s(plan, costs);
  return course;
}

Course oracle(const Truth& truth) {
  std::vector<plan::Plan> plans = {optimal_plan(truth.costs.front())};
  for (const cost::ModelCost& costs : truth.costs) {
    plan::Plan plan = optimal_plan(costs);
    const bool known = std::any_of(plans.begin(), plans.end(),
                                   [&](const plan::Plan& p) { return p.stages == plan.stages; });
    if (!known) plans.push_back(std::move(plan));
  }
  while (plans.size() > kOraclePlans) {  // every second one goes
    std::vector<plan::Plan> fewer;
    for (std::size_t i = 0; i < plans.size(); i += 2) fewer.push_back(std::move(plans[i]));
    plans = std::move(fewer);
  }
  // For each plan: least time of the steps so far that end under it, and the plan before, by step.
  std::vector<double> best(plans.size(), 1e300);
  best[0] = 0;
  std::vector<std::vector<std::size_t>> before;
  for (const cost::ModelCost& costs : truth.costs) {
    std::vector<double> next(plans.size());
    std::vector<std::size_t>& from = before.emplace_back(plans.size());
    for (std::size_t to = 0; to < plans.size(); ++to) {
      next[to] = best[to];
      from[to] = to;
      for (std::size_t p = 0; p < plans.size(); ++p) {
        // A move takes the fixed time at least: most pairs need no closer look.
        if (p == to || best[p] + kCharges.move_fixed_s >= next[to]) continue;
        const double moved = best[p] + move_s(plans[p], plans[to], costs);
        if (moved >= next[to]) continue;
        next[to] = moved;
        from[to] = p;
      }
      next[to] += step_s(plans[to], costs);
    }
    best = std::move(next);
  }
  auto at = static_cast<std::size_t>(std::min_element(best.begin(), best.end()) - best.begin());
  Course course{.total_s = best[at]};
  for (std::size_t step = before.size(); step-- > 0;) {
    if (before[step][at] != at) {
      course.moves.insert(course.moves.begin(), static_cast<std::int64_t>(step));
    }
    at = before[step][at];
  }
  return course;
}

// Turns the true times of a step into measured ones.
class Measuring {
 public:
  Measuring(const Noise& noise, std::uint64_t seed) : noise_(noise), rng_(seed) {}

  cost::Observation step(const cost::ModelCost& truth, const plan::Plan& plan, bool counted) {
    if (noise_.bursts && --pause_ < 0 && rng_.uniform() < 1.0 / 15) {
      left_ = 3;
      pause_ = 13;  // ten steps of peace
      slow_ = Rank(static_cast<std::int32_t>(rng_.uniform() * kRanks));
    }
    std::vector<double> of_rank;
    for (int r = 0; r < kRanks; ++r) {
      const double burst = left_ > 0 && slow_ == Rank(r) ? 2 : 1;
      of_rank.push_back(burst * std::max(0.1, 1 + noise_.of_ranks * rng_.normal()));
    }
    left_ = std::max(0, left_ - 1);
    cost::Observation seen{.layers = {}, .charges = kCharges};
    for (std::int32_t i = 0; i < truth.size(); ++i) {
      const cost::LayerCost& layer = truth.layers[LayerId(i).index()];
      const double factor = of_rank[plan.owner(LayerId(i)).index()] *
                            std::max(0.1, 1 + noise_.of_layers * rng_.normal());
      seen.layers.push_back(cost::sample_of(layer, factor));
      if (counted) {
        seen.layers.back().work =
            layer.forward_s + layer.backward_input_s + layer.backward_weight_s;
      }
    }
    return seen;
  }

 private:
  const Noise& noise_;
  Rng rng_;
  int left_ = 0;   // steps of a burst
  int pause_ = 0;  // before the next one may begin
  Rank slow_;
};

Course controlled(const Truth& truth, const Noise& noise, std::uint64_t seed, bool verbose) {
  Course course;
  plan::Plan plan = optimal_plan(truth.costs.front());
  Controller controller(truth.costs.front(), {.micro_batches = kMicroBatches, .steps = kSteps});
  Measuring measuring(noise, seed);
  const cost::Cluster cluster = ranks();
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const auto i = static_cast<std::size_t>(step);
    const cost::ModelCost& costs = truth.costs[i];
    controller.know(costs);
    if (!truth.hidden) controller.announce(truth.changes[i], step);
    auto decision =
        controller.decide({.plan = plan, .step = step, .known = costs, .cluster = cluster});
    DYNMO_CHECK(decision.has_value(), "a decision, got: {}", decision.error().message);
    if (*decision) {
      course.total_s += kCharges.plan_s;
      if (verbose) fmt::print("  step {} {}: {}\n", step, (*decision)->why, (*decision)->reason);
      if ((*decision)->migrate) {
        course.total_s += move_s(plan, (*decision)->plan, costs);
        course.moves.push_back(step);
        course.layers += plan::difference(plan, (*decision)->plan, costs).moves.size();
        plan = std::move((*decision)->plan);
      }
    }
    course.total_s += step_s(plan, costs);
    controller.observe(measuring.step(costs, plan, truth.counted), plan, costs.frozen_layers());
  }
  return course;
}

// The first move of `course` from `from` on, at most `next`.
std::int64_t answer(const Course& course, std::int64_t from, std::int64_t next) {
  const auto found = std::lower_bound(course.moves.begin(), course.moves.end(), from);
  return found == course.moves.end() ? next : std::min(*found, next);
}

std::vector<double> lags(const Course& oracle, const Course& course) {
  std::vector<double> result;
  for (std::size_t i = 0; i < oracle.moves.size(); ++i) {
    const std::int64_t at = oracle.moves[i];
    const std::int64_t next = i + 1 < oracle.moves.size() ? oracle.moves[i + 1] : kSteps;
    const std::int64_t lag = answer(course, at - 3, next) - at;
    result.push_back(static_cast<double>(std::max<std::int64_t>(0, lag)));
  }
  return result;
}

std::vector<double> reactions(const Truth& truth, const Course& oracle, const Course& course) {
  std::vector<double> result;
  std::int64_t next = kSteps;
  for (std::int64_t step = kSteps; step-- > 0;) {
    if (truth.changes[static_cast<std::size_t>(step)] == cost::Announced::kNothing) continue;
    if (answer(oracle, step, next) < next) {
      result.push_back(static_cast<double>(answer(course, step, next) - step));
    }
    next = step;
  }
  return result;
}

struct Line {
  std::vector<double> regrets;
  double never = -1;
  double moves = 0;
  double layers = 0;
  double oracle_moves = 0;
  std::vector<double> reactions;
  std::vector<double> lags;

  void add(const Truth& truth, const Course& never_moving, const Course& best,
           const Course& course) {
    regrets.push_back(course.total_s / best.total_s - 1);
    never = std::max(never, course.total_s / never_moving.total_s - 1);
    moves += static_cast<double>(course.moves.size());
    layers += static_cast<double>(course.layers);
    oracle_moves += static_cast<double>(best.moves.size());
    append(reactions, control::reactions(truth, best, course));
    append(lags, control::lags(best, course));
  }
  void add(const Line& other) {
    append(regrets, other.regrets);
    append(reactions, other.reactions);
    append(lags, other.lags);
    never = std::max(never, other.never);
    moves += other.moves;
    layers += other.layers;
    oracle_moves += other.oracle_moves;
  }
  static void append(std::vector<double>& to, const std::vector<double>& more) {
    to.insert(to.end(), more.begin(), more.end());
  }
  double regret() const {
    double sum = 0;
    for (const double r : regrets) sum += r;
    return sum / static_cast<double>(regrets.size());
  }
  void print(const std::string& noise, const std::string& load) const {
    const auto steps = [](const std::vector<double>& values) {
      return values.empty() ? std::string("-") : fmt::format("{:.1f}", median(values));
    };
    fmt::print(
        "{:<12} {:<18} {:>7.2f} %  {:>7.2f} %  {:>7.2f} %  {:>5}  {:>6.2f}  {:>6.1f}  {:>8}  "
        "{:>6}\n",
        noise, load, 100 * regret(), 100 * *std::max_element(regrets.begin(), regrets.end()),
        100 * never, moves, oracle_moves > 0 ? moves / oracle_moves : moves,
        moves > 0 ? layers / moves : 0, steps(reactions), steps(lags));
  }
};

std::vector<Truth> truths(std::uint64_t seed) {
  const auto loads =
      dynamism::default_loads(cost::find_device("h100").value(), seed, dynamism::Ends::kLeftOut);
  DYNMO_CHECK(loads.has_value(), "loads, got: {}", loads.error().message);
  std::vector<Truth> result;
  for (const dynamism::NamedLoad& named : *loads) {
    result.push_back(truth_of(named));
    if (named.name != "pruning") continue;
    Truth& hidden = result.emplace_back(result.back());
    hidden.name += ", hidden";
    hidden.hidden = true;
  }
  return result;
}

void run(std::uint64_t seeds, std::uint64_t first, bool verbose) {
  std::map<std::string, std::map<std::string, Line>> table;  // noise, load
  for (std::uint64_t seed = first; seed < first + seeds; ++seed) {
    for (const Truth& truth : truths(seed)) {
      const Course stays = never(truth);
      const Course best = oracle(truth);
      for (const Noise& noise : kNoises) {
        if (verbose) fmt::print("{} {} seed {}\n", noise.name, truth.name, seed);
        const Course course = controlled(truth, noise, mix_key({seed, 0xC0}), verbose);
        table[noise.name][truth.name].add(truth, stays, best, course);
      }
    }
  }
  fmt::print("{:<12} {:<18} {:>9}  {:>9}  {:>9}  {:>5}  {:>6}  {:>6}  {:>8}  {:>6}\n", "noise",
             "load", "regret", "worst", "never", "moves", "oracle", "layers", "reaction", "lag");
  Line whole;
  for (const Noise& noise : kNoises) {
    Line all;
    for (const auto& [load, line] : table[noise.name]) {
      line.print(noise.name, load);
      all.add(line);
    }
    all.print(noise.name, "all");
    whole.add(all);
  }
  whole.print("all", "all");
}

}  // namespace
}  // namespace dynmo::control

int main(int argc, char** argv) {
  const std::uint64_t seeds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20;
  const std::uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  dynmo::control::run(std::max<std::uint64_t>(seeds, 1), first, argc > 3);
  return 0;
}
