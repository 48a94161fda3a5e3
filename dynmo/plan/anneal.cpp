// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/plan/anneal_impl.h"

namespace dynmo::plan::internal {
namespace {

__extension__ typedef __int128 SignedWide;

using schedule::DuePolicy;
constexpr int kWhole = DuePolicy::kWhole;
constexpr int kMaxOffset = 40 * kWhole;

std::int64_t slowed(std::int64_t parts, double speed) {
  const std::int64_t time =
      (parts + (std::int64_t{1} << (Prefixes::kPartBits - 1))) >> Prefixes::kPartBits;
  return speed == 1 ? time : std::llround(static_cast<double>(time) / speed);
}

Nanoseconds transfer(const cost::Cluster& cluster, int from, int to, Bytes bytes) {
  const cost::Link& link = cluster.link(Rank{from}, Rank{to});
  return to_nanoseconds(link.latency_s +
                        static_cast<double>(bytes.value) / link.bandwidth_bytes_per_s);
}

// Draws -ln of a uniform number from (0, 1], in parts of kWhole. It sums reciprocals, because the
// last bit of a logarithm differs between libraries.
class Exponential {
 public:
  Exponential() {
    double sum = 0;
    for (int k = kSteps; k-- > 0;) {
      sum += 1 / (k + 0.5);
      table_[static_cast<std::size_t>(k)] = static_cast<std::int64_t>(sum * kWhole);
    }
  }
  [[nodiscard]] std::int64_t draw(Rng& rng) const { return table_[rng.below(kSteps)]; }

 private:
  static constexpr int kSteps = 256;
  std::array<std::int64_t, kSteps> table_{};
};

// Returns `first` after the given part of all steps. It is halved `halvings` times in all steps,
// and is linear between two halvings.
std::int64_t cooled(std::int64_t first, int halvings, std::int64_t step, std::int64_t steps) {
  const auto x = static_cast<std::int64_t>(SignedWide{halvings} * kWhole * step / steps);
  return first / (2 * kWhole) * (2 * kWhole - x % kWhole) >> (x / kWhole);
}

void delay_gradients(DuePolicy& policy, int delay) {
  for (DuePolicy::Offset& offset : policy.offsets) {
    for (int* value : {&offset.input_gradient, &offset.weight_gradient}) {
      *value = std::clamp(*value + delay, -kMaxOffset, kMaxOffset);
    }
  }
}

}  // namespace

Annealer::Annealer(std::string name, const Prefixes& model, const cost::Cluster& cluster,
                   int micro_batches, std::vector<Rank> placement, Starts starts,
                   std::uint64_t seed, std::int64_t actions)
    : name_(std::move(name)),
      problem_{.model = model, .cluster = cluster, .micro_batches = micro_batches},
      starts_(starts),
      rng_(seed) {
  const auto stages = static_cast<int>(placement.size());
  now_.layout.placement = std::move(placement);
  now_.layout.bounds.resize(static_cast<std::size_t>(stages) + 1, 0);
  now_.layout.policy.offsets.resize(static_cast<std::size_t>(stages));
  now_.layout.again.resize(static_cast<std::size_t>(stages), model.layers());
  const auto work = [&](int layer) {
    const auto i = static_cast<std::size_t>(layer);
    return problem_.model.forward[i] + problem_.model.input_gradient[i] +
           problem_.model.weight_gradient[i];
  };
  const int layers = problem_.model.layers();
  int layer = 0;
  for (int s = 1; s <= stages; ++s) {
    const auto target = static_cast<std::int64_t>(SignedWide{work(layers)} * s / stages);
    while (layer < layers && work(layer) + work(layer + 1) < 2 * target) ++layer;
    now_.layout.bounds[static_cast<std::size_t>(s)] = s == stages ? layers : layer;
  }
  const std::vector<int> even = now_.layout.bounds;
  try_grid(actions);
  const auto attempt = [&](Balance balance) {
    if (spent_ > actions && best_.time != kInfeasible) return;
    now_.layout.bounds = even;
    balance_cut(balance);
    try_grid(actions);
  };
  if (starts_ == Starts::kFilled) {
    for (const int evenness : {100, 30, 10, 3}) attempt({evenness, true});
  }
  for (const int evenness : {100, 30, 3}) attempt({evenness, false});
}

// Adds the idle time of every rank to its load, as a share of a micro-batch. It is idle before the
// first micro-batch arrives. It is also idle after its last input gradient, if its weight gradients
// do not fill that time.
void Annealer::add_filling(const std::vector<int>& bounds) {
  scratch_.filler.assign(static_cast<std::size_t>(problem_.cluster.size()), -1);
  const auto layers_of = [&](std::size_t s, const std::vector<std::int64_t>& sums) {
    return slowed(
        sums[static_cast<std::size_t>(bounds[s + 1])] - sums[static_cast<std::size_t>(bounds[s])],
        problem_.cluster.ranks[now_.layout.placement[s].index()].speed);
  };
  for (std::size_t s = 0; s < now_.layout.placement.size(); ++s) {
    std::int64_t& filler = scratch_.filler[now_.layout.placement[s].index()];
    if (bounds[s] < bounds[s + 1]) {
      filler = std::max<std::int64_t>(filler, 0) + layers_of(s, problem_.model.weight_gradient);
    }
  }
  std::int64_t reach = 0;  // of the first F
  std::int64_t back = 0;   // of the last I, to the first stage
  int before = -1;         // rank
  for (std::size_t s = 0; s < now_.layout.placement.size(); ++s) {
    if (bounds[s] == bounds[s + 1]) continue;
    const std::size_t rank = now_.layout.placement[s].index();
    if (before >= 0) {
      const Bytes bytes = problem_.model.boundary[static_cast<std::size_t>(bounds[s]) - 1];
      const std::int64_t message =
          transfer(problem_.cluster, before, now_.layout.placement[s].value, bytes).count();
      reach += message;
      back += message;
    }
    if (scratch_.filler[rank] >= 0) {
      const std::int64_t drain =
          std::max<std::int64_t>(0, back - scratch_.filler[rank] * problem_.micro_batches);
      scratch_.load[rank] += (reach + drain) / problem_.micro_batches;
      scratch_.filler[rank] = -1;
    }
    before = now_.layout.placement[s].value;
    reach += layers_of(s, problem_.model.forward);
    back += layers_of(s, problem_.model.input_gradient);
  }
}

// Returns the largest load of a rank in nanoseconds, plus two terms. One is the relative variance
// of the stages' work, times balance.evenness percent of the mean load of a rank. The other is
// large, for memory that overflows.
std::int64_t Annealer::balance_score(const std::vector<int>& bounds, Balance balance) {
  const auto ranks = static_cast<std::size_t>(problem_.cluster.size());
  scratch_.load.assign(ranks, 0);
  scratch_.need.assign(ranks, 0);
  const auto stages = static_cast<std::int64_t>(now_.layout.placement.size());
  std::int64_t total = 0;
  SignedWide squares = 0;
  for (std::size_t s = 0; s < now_.layout.placement.size(); ++s) {
    const auto i = static_cast<std::size_t>(bounds[s]);
    const auto j = static_cast<std::size_t>(bounds[s + 1]);
    const std::size_t rank = now_.layout.placement[s].index();
    const std::int64_t work = slowed(
        problem_.model.forward[j] - problem_.model.forward[i] + problem_.model.input_gradient[j] -
            problem_.model.input_gradient[i] + problem_.model.weight_gradient[j] -
            problem_.model.weight_gradient[i] + problem_.model.again[j] - problem_.model.again[i],
        problem_.cluster.ranks[rank].speed);
    scratch_.load[rank] += work;
    scratch_.need[rank] += problem_.model.state[j] - problem_.model.state[i] +
                           problem_.model.stash[j] - problem_.model.stash[i] -
                           problem_.model.saved[j] + problem_.model.saved[i];
    total += work;
    squares += SignedWide{work} * work;
  }
  if (balance.filled) add_filling(bounds);
  SignedWide score = *std::max_element(scratch_.load.begin(), scratch_.load.end());
  if (total > 0) {
    const SignedWide mean_load = total / static_cast<std::int64_t>(ranks);
    score += balance.evenness * mean_load * (squares * stages / total - total) / total / 100;
  }
  SignedWide overflow = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    overflow += std::max<SignedWide>(
        0, SignedWide{scratch_.need[r]} - problem_.cluster.ranks[r].memory.value);
  }
  if (overflow > 0) {
    const SignedWide whole = SignedWide{problem_.model.state.back()} + problem_.model.stash.back();
    score += total / 8 + SignedWide{total} * 16 * overflow / whole;
  }
  return static_cast<std::int64_t>(std::min<SignedWide>(score, kInfeasible / 4));
}

void Annealer::balance_cut(Balance balance) {
  constexpr int kSteps = 8000;
  if (now_.layout.placement.size() < 2) return;
  const Exponential exponential;
  std::vector<int> bounds = now_.layout.bounds;
  std::int64_t score = balance_score(bounds, balance);
  std::int64_t best = score;
  const std::int64_t mean = score;
  for (int i = 0; i < kSteps; ++i) {
    std::vector<int> trial = bounds;
    move_bounds(trial);
    const std::int64_t heat = cooled(mean / 32, 10, i, kSteps);
    const std::int64_t next = balance_score(trial, balance);
    if (next - score >
        static_cast<std::int64_t>(SignedWide{heat} * exponential.draw(rng_) / kWhole)) {
      continue;
    }
    bounds = std::move(trial);
    score = next;
    if (score >= best) continue;
    best = score;
    now_.layout.bounds = bounds;
  }
}

// Loads the layout into the scheduler. Returns false if a rank's memory cannot hold its layers and
// one micro-batch.
bool Annealer::load(const Layout& layout) {
  load_stages(layout);
  load_timings();
  if (!load_limits()) return false;
  load_policy(layout.policy);
  scheduler_.load(loaded_.shape, loaded_.timings, loaded_.limits);
  return true;
}

void Annealer::load_stages(const Layout& layout) {
  loaded_.stages.clear();
  for (std::size_t s = 0; s < layout.placement.size(); ++s) {
    const int first = layout.bounds[s];
    const int end = layout.bounds[s + 1];
    if (first == end) continue;
    if (!loaded_.stages.empty() && loaded_.stages.back().rank == layout.placement[s].value) {
      loaded_.stages.back().end = end;
    } else {
      loaded_.stages.push_back({layout.placement[s].value, first, end, static_cast<int>(s)});
    }
    const auto i = static_cast<std::size_t>(first);
    const auto j = static_cast<std::size_t>(std::min(end, first + layout.again[s]));
    loaded_.stages.back().again += problem_.model.again[j] - problem_.model.again[i];
    loaded_.stages.back().saved += problem_.model.saved[j] - problem_.model.saved[i];
  }
  loaded_.shape.ranks = problem_.cluster.size();
  loaded_.shape.micro_batches = problem_.micro_batches;
  loaded_.shape.stages.clear();
  for (const Stage& stage : loaded_.stages) {
    loaded_.shape.stages.push_back({Rank{stage.rank}, stage.end <= problem_.model.frozen_layers});
  }
}

// Times the loaded stages, and sums up what they ask of each rank.
void Annealer::load_timings() {
  const auto ranks = static_cast<std::size_t>(problem_.cluster.size());
  loaded_.timings.clear();
  scratch_.state.assign(ranks, 0);
  scratch_.need.assign(ranks, 0);
  scratch_.restored.assign(ranks, 0);
  scratch_.load.assign(ranks, 0);
  for (std::size_t s = 0; s < loaded_.stages.size(); ++s) {
    const Stage& stage = loaded_.stages[s];
    const auto i = static_cast<std::size_t>(stage.first);
    const auto j = static_cast<std::size_t>(stage.end);
    const auto rank = static_cast<std::size_t>(stage.rank);
    const double speed = problem_.cluster.ranks[rank].speed;
    const auto time = [&](const std::vector<std::int64_t>& sums, std::int64_t more = 0) {
      return slowed(sums[j] - sums[i] + more, speed);
    };
    schedule::StageTiming timing{
        .forward = Nanoseconds{time(problem_.model.forward)},
        .input_gradient = Nanoseconds{time(problem_.model.input_gradient, stage.again)},
        .weight_gradient = Nanoseconds{time(problem_.model.weight_gradient)},
        .stash = Bytes{problem_.model.stash[j] - problem_.model.stash[i] - stage.saved},
        .restored = Bytes{std::max<std::int64_t>(stage.saved, 0)}};
    if (s > 0) {
      timing.activation_transfer = transfer(problem_.cluster, loaded_.stages[s - 1].rank,
                                            stage.rank, problem_.model.boundary[i - 1]);
    }
    if (s + 1 < loaded_.stages.size()) {
      timing.gradient_transfer = transfer(problem_.cluster, loaded_.stages[s + 1].rank, stage.rank,
                                          problem_.model.boundary[j - 1]);
    }
    loaded_.timings.push_back(timing);
    scratch_.load[rank] += time(problem_.model.update);
    scratch_.state[rank] += problem_.model.state[j] - problem_.model.state[i];
    scratch_.need[rank] += timing.stash.value;
    scratch_.restored[rank] = std::max(scratch_.restored[rank], timing.restored.value);
  }
  loaded_.update = *std::max_element(scratch_.load.begin(), scratch_.load.end());
}

// Returns false if a rank's memory cannot hold one micro-batch.
bool Annealer::load_limits() {
  loaded_.limits.clear();
  for (std::size_t r = 0; r < scratch_.state.size(); ++r) {
    loaded_.limits.push_back(problem_.cluster.ranks[r].memory - Bytes{scratch_.state[r]});
    if (scratch_.need[r] + scratch_.restored[r] > loaded_.limits[r].value) return false;
  }
  return true;
}

// Loads the policy, with the offsets of the loaded stages only.
void Annealer::load_policy(const schedule::DuePolicy& policy) {
  loaded_.policy.offsets.clear();
  for (const Stage& stage : loaded_.stages) {
    loaded_.policy.offsets.push_back(policy.offsets[static_cast<std::size_t>(stage.origin)]);
  }
  loaded_.policy.forward = policy.forward;
  loaded_.policy.gradient = policy.gradient;
  loaded_.policy.weight_delay = policy.weight_delay;
  loaded_.policy.wait_for_weight = policy.wait_for_weight;
  loaded_.policy.wait_for_others = policy.wait_for_others;
}

std::int64_t Annealer::time_of(const Layout& layout, std::int64_t bound) {
  spent_ += 4 * static_cast<std::int64_t>(layout.placement.size());
  if (!load(layout)) return kInfeasible;
  // A move that only touches stages without layers, or finds no room, changes nothing that runs. It
  // is charged as if it had been run again, so that the search goes the same way.
  if (done_.time <= bound && done_.stages == loaded_.stages && done_.policy == loaded_.policy) {
    spent_ += done_.actions;
    return done_.time;
  }
  const std::int64_t before = scheduler_.placed();
  const std::int64_t time =
      scheduler_.run(loaded_.policy, bound == kInfeasible ? bound : bound - loaded_.update);
  const std::int64_t actions = scheduler_.placed() - before;
  spent_ += actions;
  if (time == schedule::ListScheduler::kStopped) return kInfeasible;
  done_.stages = loaded_.stages;
  done_.policy = loaded_.policy;
  done_.time = time + loaded_.update;
  done_.actions = actions;
  return done_.time;
}

void Annealer::try_policy(const DuePolicy& policy, std::int64_t actions) {
  if (spent_ > actions && best_.time != kInfeasible) return;
  now_.layout.policy = policy;
  const std::int64_t bound = best_.time == kInfeasible ? best_.time : best_.time - 1;
  const std::int64_t time = time_of(now_.layout, bound);
  if (time >= best_.time) return;
  best_.time = time;
  best_.layout = now_.layout;
}

void Annealer::try_grid(std::int64_t actions) {
  constexpr int kShort = 3 * kWhole / 10;
  constexpr int kLong = 9 * kWhole / 10;
  DuePolicy policy{.offsets = std::vector<DuePolicy::Offset>(now_.layout.placement.size())};
  const auto attempt = [&](int wait, int wait_for_others) {
    policy.wait_for_weight = wait;
    policy.wait_for_others = wait_for_others;
    try_policy(policy, actions);
  };
  if (starts_ == Starts::kFilled) {
    for (const int delay : {0, problem_.micro_batches / 4 * kWhole}) {
      policy.offsets.assign(policy.offsets.size(), {});
      delay_gradients(policy, delay);
      for (const int forward : {kWhole / 2, 18 * kWhole / 10}) {
        for (const int gradient : {0, kWhole}) {
          for (const int weight_delay : {100, 1}) {
            policy.forward = forward;
            policy.gradient = gradient;
            policy.weight_delay = weight_delay * kWhole;
            attempt(kLong, kShort);
            attempt(kShort, 0);
          }
        }
      }
    }
    return;
  }
  for (const int forward : {kWhole / 2, 0, kWhole, 18 * kWhole / 10}) {
    for (const int gradient : {0, kWhole}) {
      for (const int weight_delay : {1, 0, 3, 100}) {
        policy.forward = forward;
        policy.gradient = gradient;
        policy.weight_delay = weight_delay * kWhole;
        attempt(kShort, kShort);
        attempt(kLong, kShort);
        attempt(kShort, 0);
      }
    }
  }
}

void Annealer::move_bounds(std::vector<int>& bounds) {
  const int stages = static_cast<int>(bounds.size()) - 1;
  if (stages < 2) return;
  const int step = pick(0, 1) == 0 ? 1 : -1;
  const int first = pick(1, stages - 1);
  const int run = pick(0, 7) == 0 ? pick(1, 8) : 1;
  const int end = std::min(stages, first + run);
  for (int i = first; i < end; ++i) bounds[static_cast<std::size_t>(i)] += step;
  // Restores the order of the bounds, from the side they moved to.
  for (int i = first; i < end; ++i) {
    int& bound = bounds[static_cast<std::size_t>(i)];
    bound = std::clamp(bound, bounds[static_cast<std::size_t>(first) - 1],
                       bounds[static_cast<std::size_t>(end)]);
  }
}

void Annealer::move_policy(DuePolicy& policy) {
  if (starts_ == Starts::kFilled && pick(0, 4) == 0) {
    delay_gradients(policy, pick(-2 * kWhole, 2 * kWhole));
    return;
  }
  switch (pick(0, 4)) {
    case 0:
      policy.forward = std::clamp(policy.forward + pick(-300, 300), -kWhole, 4 * kWhole);
      return;
    case 1:
      policy.gradient = std::clamp(policy.gradient + pick(-300, 300), -kWhole, 4 * kWhole);
      return;
    case 2:
      policy.weight_delay =
          std::clamp(policy.weight_delay + pick(-kWhole, kWhole), -kWhole, 100 * kWhole);
      return;
    case 3:
      policy.wait_for_weight = std::clamp(policy.wait_for_weight + pick(-300, 300), 0, kWhole);
      return;
    default:
      policy.wait_for_others = std::clamp(policy.wait_for_others + pick(-300, 300), 0, kWhole);
      return;
  }
}

void Annealer::move_offset(DuePolicy& policy) {
  const auto stages = static_cast<int>(policy.offsets.size());
  DuePolicy::Offset& offset = policy.offsets[static_cast<std::size_t>(pick(0, stages - 1))];
  const int kind = pick(0, 2);
  int& value = kind == 0   ? offset.forward
               : kind == 1 ? offset.input_gradient
                           : offset.weight_gradient;
  value = std::clamp(value + pick(-kWhole, kWhole), -kMaxOffset, kMaxOffset);
}

// Recomputes one or two layers more or fewer, of one stage or now and then of all.
void Annealer::move_again(Layout& layout) {
  const auto stages = static_cast<int>(layout.again.size());
  const int only = pick(0, 7) == 0 ? -1 : pick(0, stages - 1);
  const int step = pick(0, 1) == 0 ? pick(1, 2) : -pick(1, 2);
  for (int s = 0; s < stages; ++s) {
    if (only >= 0 && s != only) continue;
    const auto i = static_cast<std::size_t>(s);
    const int layers = layout.bounds[i + 1] - layout.bounds[i];
    const int next = std::clamp(std::min(layout.again[i], layers) + step, 0, layers);
    // A stage that recomputes all of its layers also recomputes those that it gets later.
    layout.again[i] = next == layers ? problem_.model.layers() : next;
  }
}

void Annealer::anneal(std::int64_t actions, std::int64_t heat) {
  const Exponential exponential;
  const std::int64_t start = spent_;
  now_.layout = best_.layout;
  now_.time = best_.time;
  if (now_.time == kInfeasible) return;
  const auto first_heat = static_cast<std::int64_t>(SignedWide{best_.time} * heat >> 20);
  Layout trial = now_.layout;
  while (spent_ - start < actions) {
    trial = now_.layout;
    const bool chooses = problem_.model.recompute == Recompute::kAuto && pick(0, 4) == 0;
    const int move = chooses ? 100 : pick(0, 99);
    if (chooses) {
      move_again(trial);
    } else if (move < 65) {
      move_bounds(trial.bounds);
    } else if (move < 80) {
      move_policy(trial.policy);
    } else {
      move_offset(trial.policy);
    }
    const std::int64_t warm = cooled(first_heat, 6, spent_ - start, actions);
    const std::int64_t bound =
        now_.time + static_cast<std::int64_t>(SignedWide{warm} * exponential.draw(rng_) / kWhole);
    const std::int64_t time = time_of(trial, bound);
    if (time > bound) continue;
    std::swap(now_.layout, trial);
    now_.time = time;
    if (now_.time >= best_.time) continue;
    best_.time = now_.time;
    best_.layout = now_.layout;
  }
}

Plan Annealer::plan() {
  DYNMO_CHECK(best_.time != kInfeasible && load(best_.layout), "a layout that fits memory");
  Plan plan{.ranks = problem_.cluster.size(),
            .stages = {},
            .schedule = schedule::ScheduleKind::kAdaptive,
            .generation = 0};
  for (const Stage& stage : loaded_.stages) {
    plan.stages.push_back({Rank{stage.rank}, {LayerId{stage.first}, stage.end - stage.first}});
  }
  plan.order = scheduler_.record(loaded_.policy).schedule.ranks;
  return plan;
}

}  // namespace dynmo::plan::internal
