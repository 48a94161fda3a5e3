// SPDX-License-Identifier: Apache-2.0
#include "dynmo/schedule/adaptive.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::schedule {
namespace {

__extension__ typedef __int128 Wide;

constexpr std::int64_t kNever = ListScheduler::kStopped;
constexpr std::int64_t kMaxTime = std::int64_t{1} << 52;  // due dates then stay inside 62 bits
constexpr int kMaxParts = 1 << 18;

std::int64_t parts_of(std::int64_t time, int parts) {
  return static_cast<std::int64_t>(Wide{time} * parts / DuePolicy::kWhole);
}

Expected<void> check_counts(const AdaptiveProblem& problem) {
  if (problem.stages.size() != problem.shape.stages.size()) {
    return make_error(ErrorCode::kBadInput, "costs of {} stages for a shape of {}; want as many",
                      problem.stages.size(), problem.shape.stages.size());
  }
  if (std::cmp_not_equal(problem.stash_limit.size(), problem.shape.ranks)) {
    return make_error(ErrorCode::kBadInput, "limits of {} ranks for a shape of {}; want as many",
                      problem.stash_limit.size(), problem.shape.ranks);
  }
  return {};
}

Expected<void> check_costs(const AdaptiveProblem& problem) {
  double total = 0;
  double bytes = 0;
  for (std::size_t s = 0; s < problem.stages.size(); ++s) {
    const StageTiming& stage = problem.stages[s];
    for (const Nanoseconds time :
         {stage.forward, stage.input_gradient, stage.weight_gradient, stage.activation_transfer,
          stage.gradient_transfer, Nanoseconds{stage.stash.value}}) {
      if (time.count() >= 0) continue;
      return make_error(ErrorCode::kBadInput, "stage {} has a cost of {}; want 0 or more", s,
                        time.count());
    }
    total += static_cast<double>(stage.forward.count()) +
             static_cast<double>(stage.input_gradient.count()) +
             static_cast<double>(stage.weight_gradient.count()) +
             static_cast<double>(stage.activation_transfer.count()) +
             static_cast<double>(stage.gradient_transfer.count());
    bytes += static_cast<double>(stage.stash.value);
  }
  total *= problem.shape.micro_batches;
  bytes *= problem.shape.micro_batches;
  if (total <= static_cast<double>(kMaxTime) && bytes <= 0x1p62) return {};
  return make_error(ErrorCode::kBadInput,
                    "a step of up to {:.3g} s and {:.3g} bytes; an adaptive order wants at most "
                    "{:.3g} s and 2^62 bytes, check the units of the costs",
                    total * 1e-9, bytes, static_cast<double>(kMaxTime) * 1e-9);
}

Expected<void> check_policy(const DuePolicy& policy, std::size_t stages) {
  if (!policy.offsets.empty() && policy.offsets.size() != stages) {
    return make_error(ErrorCode::kBadInput, "offsets of {} stages for {}; want as many or none",
                      policy.offsets.size(), stages);
  }
  const auto outside = [](int parts) { return parts < -kMaxParts || parts > kMaxParts; };
  bool bad = outside(policy.forward) || outside(policy.gradient) || outside(policy.weight_delay);
  for (const int wait : {policy.wait_for_weight, policy.wait_for_others}) {
    bad = bad || wait < 0 || wait > DuePolicy::kWhole;
  }
  for (const DuePolicy::Offset& offset : policy.offsets) {
    bad = bad || outside(offset.forward) || outside(offset.input_gradient) ||
          outside(offset.weight_gradient);
  }
  if (!bad) return {};
  return make_error(ErrorCode::kBadInput,
                    "a due policy with a wait outside 0..{} or another number outside -{}..{}",
                    DuePolicy::kWhole, kMaxParts, kMaxParts);
}

Expected<void> check_limits(const AdaptiveProblem& problem) {
  std::vector<std::int64_t> need(problem.stash_limit.size(), 0);
  for (std::size_t s = 0; s < problem.stages.size(); ++s) {
    const StageShape& where = problem.shape.stages[s];
    if (!where.frozen) need[where.rank.index()] += problem.stages[s].stash.value;
  }
  for (std::size_t r = 0; r < need.size(); ++r) {
    if (need[r] <= problem.stash_limit[r].value || need[r] == 0) continue;
    return make_error(ErrorCode::kInfeasible,
                      "rank {} may stash {}, one micro-batch takes {} there: give it that much, or "
                      "fewer layers, or make the micro-batch smaller",
                      r, format_bytes(problem.stash_limit[r]), format_bytes(Bytes{need[r]}));
  }
  return {};
}

}  // namespace

void ListScheduler::load(const PipelineShape& shape, std::span<const StageTiming> stages,
                         std::span<const Bytes> stash_limit) {
  shape_ = shape;
  micro_batches_ = shape.micro_batches;
  const std::size_t count = stages.size();
  const auto ranks = static_cast<std::size_t>(shape.ranks);
  ranks_.assign(ranks, RankState{});
  wake_.resize((ranks + 3) / 4 * 4);  // next_rank() takes four at a time
  slots_.assign(count, Slot{});
  slot_of_.resize(count);
  for (const StageShape& stage : shape.stages) ++ranks_[stage.rank.index()].end;
  int next = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    ranks_[r].limit = stash_limit[r].value;
    ranks_[r].first = next;
    next += ranks_[r].end;
    ranks_[r].end = ranks_[r].first;
  }
  for (std::size_t s = 0; s < count; ++s) {
    const StageShape& where = shape.stages[s];
    const int index = ranks_[where.rank.index()].end++;
    slot_of_[s] = index;
    Slot& slot = slots_[static_cast<std::size_t>(index)];
    slot.stage = static_cast<int>(s);
    slot.rank = where.rank.value;
    slot.frozen = where.frozen;
    slot.duration[kF] = stages[s].forward.count();
    slot.duration[kI] = where.frozen ? 0 : stages[s].input_gradient.count();
    slot.duration[kW] = where.frozen ? 0 : stages[s].weight_gradient.count();
    slot.transfer[kF] = stages[s].activation_transfer.count();
    slot.transfer[kI] = stages[s].gradient_transfer.count();
    slot.stash = where.frozen ? 0 : stages[s].stash.value;
  }
  for (std::size_t s = 0; s < count; ++s) {
    Slot& slot = slots_[static_cast<std::size_t>(slot_of_[s])];
    if (s > 0) slot.before = slot_of_[s - 1];
    if (s + 1 < count) slot.behind = slot_of_[s + 1];
  }
  period_ = 0;
  actions_ = 0;
  for (RankState& rank : ranks_) {
    std::int64_t before = 0;
    std::int64_t work = 0;
    for (int i = rank.first; i < rank.end; ++i) {
      Slot& slot = slots_[static_cast<std::size_t>(i)];
      slot.stash_before = before;
      before += slot.stash;
      work += slot.duration[kF] + slot.duration[kI] + slot.duration[kW];
      actions_ += std::int64_t{slot.frozen ? 1 : 3} * micro_batches_;
    }
    for (int i = rank.first; i < rank.end; ++i) {
      Slot& slot = slots_[static_cast<std::size_t>(i)];
      slot.stash_behind = before - slot.stash_before;
    }
    rank.stash = before;
    rank.left = work * micro_batches_;
    period_ = std::max(period_, work);
  }
  done_.resize(count * 2 * static_cast<std::size_t>(micro_batches_));
}

void ListScheduler::start(const DuePolicy& policy) {
  wait_[kW] = policy.wait_for_weight;
  wait_[kF] = wait_[kI] = policy.wait_for_others;
  std::fill(wake_.begin(), wake_.end(), kNever);
  for (RankState& rank : ranks_) {
    rank.free = rank.posted = rank.held = 0;
    rank.left = 0;
    for (int i = rank.first; i < rank.end; ++i) {
      const Slot& slot = slots_[static_cast<std::size_t>(i)];
      rank.left += slot.duration[kF] + slot.duration[kI] + slot.duration[kW];
    }
    rank.left *= micro_batches_;
  }
  std::int64_t reach = 0;  // of a lone F
  for (std::size_t s = 0; s < slot_of_.size(); ++s) {
    Slot& slot = slots_[static_cast<std::size_t>(slot_of_[s])];
    reach += slot.transfer[kF];
    slot.due[kF] = parts_of(reach, policy.forward);
    reach += slot.duration[kF];
    slot.ready[kF] = s == 0 ? 0 : kNever;
    slot.ready[kI] = kNever;
    slot.ahead = 0;
    slot.head[kF] = slot.head[kI] = slot.head[kW] = 0;
  }
  const std::int64_t turn = parts_of(reach, policy.forward);
  const std::int64_t delay = parts_of(period_, policy.weight_delay);
  std::int64_t back = 0;  // of a lone I
  for (std::size_t s = slot_of_.size(); s-- > 0;) {
    Slot& slot = slots_[static_cast<std::size_t>(slot_of_[s])];
    if (!slot.frozen) back += slot.transfer[kI];
    slot.due[kI] = turn + parts_of(back, policy.gradient);
    slot.due[kW] = slot.due[kI] + delay;
    back += slot.duration[kI];
    if (policy.offsets.empty()) continue;
    const DuePolicy::Offset& offset = policy.offsets[s];
    slot.due[kF] += parts_of(period_, offset.forward);
    slot.due[kI] += parts_of(period_, offset.input_gradient);
    slot.due[kW] += parts_of(period_, offset.weight_gradient);
  }
  wake_[static_cast<std::size_t>(slots_[static_cast<std::size_t>(slot_of_[0])].rank)] = 0;
}

// With D_k = `ahead` of slot k, the micro-batch i at the head of slot k holds with all younger ones
// D_k, and still needs stash_behind of k. Between two heads D only falls while the need stays, so
// the heads are all there is to check; heads not behind this one's are not touched by its F.
bool ListScheduler::admits(const RankState& rank, int index) const {
  const Slot& slot = slots_[static_cast<std::size_t>(index)];
  if (slot.stash == 0) return true;
  if (rank.held + slot.stash > rank.limit) return false;
  for (int k = index + 1; k < rank.end; ++k) {
    const Slot& later = slots_[static_cast<std::size_t>(k)];
    if (later.head[kF] == slot.head[kF]) continue;
    if (later.ahead + slot.stash + later.stash_behind > rank.limit) return false;
  }
  return true;
}

// Chooses what the rank does at `now`. No slot: the rank waits until its wake.
ListScheduler::Choice ListScheduler::choose(std::size_t index, std::int64_t now) {
  const RankState& rank = ranks_[index];
  // Then the banker has nothing to refuse: what is ahead of a stage is held.
  const bool roomy = rank.held + rank.stash <= rank.limit;
  Choice best;
  std::int64_t best_due = kNever;
  std::int64_t later_due = kNever;      // earliest due date of what is still on its way
  std::int64_t later_arrival = kNever;  // when it arrives
  std::int64_t next_arrival = kNever;   // of anything
  const auto take = [&](int slot, Kind kind, std::int64_t due) {
    best = {slot, kind};
    best_due = due;
  };
  const auto consider = [&](const Slot& slot, int i, Kind kind) {
    if (slot.ready[kind] == kNever) return;
    const std::int64_t due = slot.due[kind];
    const std::int64_t arrival = std::max(slot.ready[kind], rank.posted) + slot.transfer[kind];
    if (arrival <= now && due >= best_due) return;
    if (kind == kF && !roomy && !admits(rank, i)) return;
    if (arrival <= now) return take(i, kind, due);
    next_arrival = std::min(next_arrival, arrival);
    if (due >= later_due) return;
    later_due = due;
    later_arrival = arrival;
  };
  for (int i = rank.first; i < rank.end; ++i) {
    const Slot& slot = slots_[static_cast<std::size_t>(i)];
    if (slot.head[kW] < slot.head[kI] && slot.due[kW] < best_due) take(i, kW, slot.due[kW]);
    consider(slot, i, kF);  // a loop over both would read the kind from memory, every time
    consider(slot, i, kI);
  }
  wake_[index] = next_arrival;
  if (best.slot < 0 || later_due >= best_due) return best;
  const std::int64_t duration = slots_[static_cast<std::size_t>(best.slot)].duration[best.kind];
  if ((later_arrival - now) * DuePolicy::kWhole > duration * wait_[best.kind]) return best;
  return {};
}

// The input of the next action of a slot exists from `sent` on.
void ListScheduler::arrive(Slot& slot, Kind kind, std::int64_t sent) {
  slot.ready[kind] = sent;
  const RankState& rank = ranks_[static_cast<std::size_t>(slot.rank)];
  const std::int64_t arrival = std::max(sent, rank.posted) + slot.transfer[kind];
  std::int64_t& wake = wake_[static_cast<std::size_t>(slot.rank)];
  wake = std::min(wake, std::max(rank.free, arrival));
}

void ListScheduler::finish_forward(RankState& rank, Slot& slot, int index, std::int64_t end) {
  const int micro_batch = slot.head[kF]++;
  done(index, kF, micro_batch) = end;
  rank.held += slot.stash;
  slot.ahead -= slot.stash_before;
  for (int k = index + 1; k < rank.end; ++k) {
    slots_[static_cast<std::size_t>(k)].ahead += slot.stash;
  }
  slot.ready[kF] = kNever;
  if (slot.head[kF] < micro_batches_) {
    if (slot.before < 0) {
      slot.ready[kF] = 0;
    } else if (slots_[static_cast<std::size_t>(slot.before)].head[kF] > slot.head[kF]) {
      slot.ready[kF] = done(slot.before, kF, slot.head[kF]);
    }
  }
  if (slot.behind >= 0) {
    Slot& behind = slots_[static_cast<std::size_t>(slot.behind)];
    if (behind.head[kF] == micro_batch) arrive(behind, kF, end);
  } else if (!slot.frozen && slot.head[kI] == micro_batch) {
    slot.ready[kI] = end;
  }
}

void ListScheduler::finish_gradient(Slot& slot, int index, std::int64_t end) {
  const int micro_batch = slot.head[kI]++;
  done(index, kI, micro_batch) = end;
  slot.ready[kI] = kNever;
  const int next = slot.head[kI];
  if (next < micro_batches_) {
    if (slot.behind < 0) {
      if (slot.head[kF] > next) slot.ready[kI] = done(index, kF, next);
    } else if (slots_[static_cast<std::size_t>(slot.behind)].head[kI] > next) {
      slot.ready[kI] = done(slot.behind, kI, next);
    }
  }
  if (slot.before < 0) return;
  Slot& before = slots_[static_cast<std::size_t>(slot.before)];
  if (!before.frozen && before.head[kI] == micro_batch) arrive(before, kI, end);
}

void ListScheduler::place(std::size_t index, Choice choice) {
  RankState& rank = ranks_[index];
  Slot& slot = slots_[static_cast<std::size_t>(choice.slot)];
  if (record_ != nullptr) {
    constexpr ActionKind kKinds[] = {ActionKind::kForward, ActionKind::kInputGradient,
                                     ActionKind::kWeightGradient};
    (*record_)[static_cast<std::size_t>(slot.rank)].push_back(
        {.kind = kKinds[choice.kind],
         .stage = StageId{slot.stage},
         .micro_batch = MicroBatchId{slot.head[choice.kind]}});
  }
  // A rank that has waited for one action and now takes another could have begun that earlier, and
  // in the replay it does.
  std::int64_t start = rank.free;
  if (choice.kind != kW) {
    start = std::max(start,
                     std::max(slot.ready[choice.kind], rank.posted) + slot.transfer[choice.kind]);
  }
  const std::int64_t duration = slot.duration[choice.kind];
  const std::int64_t end = start + duration;
  rank.posted = rank.free;
  rank.free = end;
  rank.left -= duration;
  slot.due[choice.kind] += period_;
  if (choice.kind == kF) {
    finish_forward(rank, slot, choice.slot, end);
  } else if (choice.kind == kI) {
    finish_gradient(slot, choice.slot, end);
  } else {
    ++slot.head[kW];
    rank.held -= slot.stash;
  }
  wake_[index] = end;  // another look; what there is to run decides then
}

// The rank that wakes first, the lowest one among equals. Four minima do not wait for one another,
// and a bit for every rank that has the least of them says which is the lowest; no comparison of
// times is a branch.
std::size_t ListScheduler::next_rank() const {
  std::int64_t min[4] = {kNever, kNever, kNever, kNever};
  for (std::size_t r = 0; r < wake_.size(); r += 4) {
    for (std::size_t i = 0; i < 4; ++i) min[i] = std::min(min[i], wake_[r + i]);
  }
  const std::int64_t first = std::min(std::min(min[0], min[1]), std::min(min[2], min[3]));
  for (std::size_t r = 0;; r += 64) {
    const std::size_t count = std::min<std::size_t>(wake_.size() - r, 64);
    std::uint64_t has = 0;
    for (std::size_t i = 0; i < count; i += 4) {
      const std::int64_t* wake = &wake_[r + i];
      const unsigned bits = unsigned{wake[0] == first} | unsigned{wake[1] == first} << 1U |
                            unsigned{wake[2] == first} << 2U | unsigned{wake[3] == first} << 3U;
      has |= std::uint64_t{bits} << i;
    }
    if (has != 0) return r + static_cast<std::size_t>(std::countr_zero(has));
  }
}

std::int64_t ListScheduler::run(const DuePolicy& policy, std::int64_t bound) {
  start(policy);
  for (std::int64_t placed = 0; placed < actions_;) {
    const std::size_t rank = next_rank();
    const std::int64_t now = wake_[rank];
    DYNMO_CHECK(now != kNever, "an order that goes on, got a deadlock after {} of {} actions",
                placed, actions_);
    if (now + ranks_[rank].left > bound) return kStopped;
    const Choice choice = choose(rank, now);
    if (choice.slot < 0) continue;
    place(rank, choice);
    ++placed;
    ++placed_;
  }
  std::int64_t makespan = 0;
  for (const RankState& rank : ranks_) makespan = std::max(makespan, rank.free);
  return makespan;
}

AdaptiveSchedule ListScheduler::record(const DuePolicy& policy) {
  AdaptiveSchedule made;
  made.schedule.shape = shape_;
  made.schedule.ranks.resize(ranks_.size());
  record_ = &made.schedule.ranks;
  made.makespan = Nanoseconds{run(policy, kStopped)};
  record_ = nullptr;
  return made;
}

Expected<AdaptiveSchedule> make_adaptive(const AdaptiveProblem& problem, const DuePolicy& policy) {
  DYNMO_TRY(validate(problem.shape));
  DYNMO_TRY(check_counts(problem));
  DYNMO_TRY(check_costs(problem));
  DYNMO_TRY(check_policy(policy, problem.stages.size()));
  DYNMO_TRY(check_limits(problem));
  ListScheduler scheduler;
  scheduler.load(problem.shape, problem.stages, problem.stash_limit);
  return scheduler.record(policy);
}

}  // namespace dynmo::schedule
