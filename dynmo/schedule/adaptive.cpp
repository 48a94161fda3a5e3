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
constexpr std::int64_t kMaxTime = std::int64_t{1} << 52;  // so that due dates fit 62 bits
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
          stage.gradient_transfer, Nanoseconds{stage.stash.value},
          Nanoseconds{stage.restored.value}}) {
      if (time.count() >= 0) continue;
      return make_error(ErrorCode::kBadInput, "stage {} has a cost of {}; want 0 or more", s,
                        time.count());
    }
    total += static_cast<double>(stage.forward.count()) +
             static_cast<double>(stage.input_gradient.count()) +
             static_cast<double>(stage.weight_gradient.count()) +
             static_cast<double>(stage.activation_transfer.count()) +
             static_cast<double>(stage.gradient_transfer.count());
    bytes += static_cast<double>(stage.stash.value) + static_cast<double>(stage.restored.value);
  }
  total *= problem.shape.micro_batches;
  bytes *= problem.shape.micro_batches;
  // The scheduler stores a time and a rank in one number (Wakes).
  const double max_time = std::min(static_cast<double>(kMaxTime), 0x1p61 / problem.shape.ranks);
  if (total <= max_time && bytes <= 0x1p62) return {};
  return make_error(ErrorCode::kBadInput,
                    "a step of up to {:.3g} s and {:.3g} bytes; an adaptive order wants at most "
                    "{:.3g} s and 2^62 bytes, check the units of the costs",
                    total * 1e-9, bytes, max_time * 1e-9);
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
  std::vector<std::int64_t> restored(need.size(), 0);
  for (std::size_t s = 0; s < problem.stages.size(); ++s) {
    const StageShape& where = problem.shape.stages[s];
    if (where.frozen) continue;
    need[where.rank.index()] += problem.stages[s].stash.value;
    std::int64_t& largest = restored[where.rank.index()];
    largest = std::max(largest, problem.stages[s].restored.value);
  }
  for (std::size_t r = 0; r < need.size(); ++r) need[r] += restored[r];
  for (std::size_t r = 0; r < need.size(); ++r) {
    if (need[r] <= problem.stash_limit[r].value || need[r] == 0) continue;
    return make_error(ErrorCode::kInfeasible,
                      "rank {} may stash {}, one micro-batch takes {} there: give it that much, or "
                      "fewer layers, or make the micro-batch smaller",
                      r, format_bytes(problem.stash_limit[r]), format_bytes(Bytes{need[r]}));
  }
  return {};
}

// Selects `a` or `b`, in a form that compilers make without a branch.
std::int64_t either(bool first, std::int64_t a, std::int64_t b) {
  return b ^ ((a ^ b) & -std::int64_t{first});
}
std::int64_t lesser(std::int64_t a, std::int64_t b) { return b < a ? b : a; }
std::int64_t greater(std::int64_t a, std::int64_t b) { return a < b ? b : a; }

}  // namespace

void ListScheduler::load(const PipelineShape& shape, std::span<const StageTiming> stages,
                         std::span<const Bytes> stash_limit) {
  shape_ = shape;
  const std::size_t count = stages.size();
  const auto ranks = static_cast<std::size_t>(shape.ranks);
  ranks_.assign(ranks, RankState{});
  wakes_.at.resize((ranks + 3) / 4 * 4);  // first_wake() reads four at a time
  wakes_.rank_bits = static_cast<int>(std::bit_width(ranks - 1));
  slots_.assign(count + 1, Slot{});  // the last one stands for no reader
  slot_of_.resize(count);
  for (const StageShape& stage : shape.stages) ++ranks_[stage.rank.index()].end;
  int next = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    ranks_[r].limit = ranks_[r].most = stash_limit[r].value;
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
    slot.restored = where.frozen ? 0 : stages[s].restored.value;
    RankState& rank = ranks_[where.rank.index()];
    rank.limit = std::min(rank.limit, rank.most - slot.restored);
  }
  connect();
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
      actions_ += std::int64_t{slot.frozen ? 1 : 3} * shape_.micro_batches;
    }
    for (int i = rank.first; i < rank.end; ++i) {
      Slot& slot = slots_[static_cast<std::size_t>(i)];
      slot.stash_behind = before - slot.stash_before;
    }
    rank.stash = before;
    rank.left = work * shape_.micro_batches;
    period_ = std::max(period_, work);
  }
}

// Sets for every slot the sources of its inputs and the readers of its outputs.
void ListScheduler::connect() {
  const std::size_t count = slot_of_.size();
  const int none = static_cast<int>(count);
  slots_.back().head[kF] = slots_.back().head[kI] = -1;
  done_.resize(row(none, kI));
  known_due_.resize(kStride * slots_.size());
  for (std::size_t s = 0; s < count; ++s) {
    const int index = slot_of_[s];
    Slot& slot = slots_[static_cast<std::size_t>(index)];
    const bool first = s == 0;
    const bool last = s + 1 == count;
    slot.input[kF] = row(first ? none : slot_of_[s - 1], kF);
    slot.input[kI] = last ? row(index, kF) : row(slot_of_[s + 1], kI);
    slot.output[kF] = row(index, kF);
    slot.output[kI] = row(index, kI);
    slot.reader[kF] = !last ? slot_of_[s + 1] : slot.frozen ? none : index;
    slot.reads[kF] = last ? kI : kF;
    slot.reads[kI] = kI;
    slot.reader[kI] = none;
    if (first) continue;
    const int before = slot_of_[s - 1];
    if (!slots_[static_cast<std::size_t>(before)].frozen) slot.reader[kI] = before;
  }
}

void ListScheduler::start(const DuePolicy& policy) {
  wait_[kW] = policy.wait_for_weight;
  wait_[kF] = wait_[kI] = policy.wait_for_others;
  std::fill(wakes_.at.begin(), wakes_.at.end(), kNever);
  for (RankState& rank : ranks_) {
    rank.free = rank.posted = rank.held = rank.back = 0;
    rank.left = 0;
    for (int i = rank.first; i < rank.end; ++i) {
      const Slot& slot = slots_[static_cast<std::size_t>(i)];
      rank.left += slot.duration[kF] + slot.duration[kI] + slot.duration[kW];
    }
    rank.left *= shape_.micro_batches;
  }
  std::fill(done_.begin(), done_.end(), kUnknown);
  std::fill_n(done_.end() - shape_.micro_batches - 1, shape_.micro_batches, 0);
  std::int64_t reach = 0;  // time of a lone F to reach the slot
  for (std::size_t s = 0; s < slot_of_.size(); ++s) {
    Slot& slot = slots_[static_cast<std::size_t>(slot_of_[s])];
    reach += slot.transfer[kF];
    slot.due[kF] = parts_of(reach, policy.forward);
    reach += slot.duration[kF];
    slot.ready[kF] = s == 0 ? 0 : kUnknown;
    slot.ready[kI] = kUnknown;
    for (const Kind kind : {kW, kF, kI}) known_due(slot_of_[s], kind) = kNever;
    slot.ahead = 0;
    slot.head[kF] = slot.head[kI] = slot.head[kW] = 0;
  }
  const std::int64_t turn = parts_of(reach, policy.forward);
  const std::int64_t delay = parts_of(period_, policy.weight_delay);
  std::int64_t back = 0;  // time of a lone I to reach the slot
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
  const Slot& first = slots_[static_cast<std::size_t>(slot_of_[0])];
  known_due(slot_of_[0], kF) = first.due[kF];
  const auto rank = static_cast<std::size_t>(first.rank);
  wakes_.at[rank] = wakes_.value(0, rank);
}

// Applies the banker's rule. With D_k = `ahead` of slot k, the micro-batch at the head of slot k
// and all younger ones hold D_k. It still needs stash_behind of k. Between two heads D only falls,
// and the need does not change, so checking the heads suffices. An F of this slot does not affect
// heads that are not behind its own.
bool ListScheduler::admits(const RankState& rank, int index) const {
  const Slot& slot = slots_[static_cast<std::size_t>(index)];
  if (slot.stash == 0) return true;
  if (rank.held + slot.stash > rank.limit) return false;
  if (rank.held + rank.back + slot.stash > rank.most) return false;
  for (int k = index + 1; k < rank.end; ++k) {
    const Slot& later = slots_[static_cast<std::size_t>(k)];
    if (later.head[kF] == slot.head[kF]) continue;
    if (later.ahead + slot.stash + later.stash_behind > rank.limit) return false;
  }
  return true;
}

// Returns the rank's action at `now`. Without a slot, the rank waits until its wake time. The loop
// has no branch on due dates, because it would be mispredicted.
inline ListScheduler::Choice ListScheduler::choose(std::size_t index, std::int64_t now) {
  const RankState& rank = ranks_[index];
  // If there is room, the banker's rule admits every F, because a stage's `ahead` is at most what
  // is held.
  const bool roomy = rank.held + rank.stash <= lesser(rank.limit, rank.most - rank.back);
  const std::int64_t posted = rank.posted;
  std::int64_t best = -1;  // kStride x slot + kind
  std::int64_t best_due = kNever;
  std::int64_t later_due = kNever;  // earliest due date of actions whose input has yet to arrive
  std::int64_t later_arrival = kUnknown;  // arrival of that input
  const auto consider = [&](const Slot& slot, Kind kind, std::int64_t due, std::int64_t code) {
    const std::int64_t arrival = greater(slot.ready[kind], posted) + slot.transfer[kind];
    const bool here = arrival <= now;
    const std::int64_t due_here = either(here, due, kNever);
    const std::int64_t due_later = either(here, kNever, due);
    best = due_here < best_due ? code : best;
    best_due = lesser(best_due, due_here);
    later_arrival = due_later < later_due ? arrival : later_arrival;
    later_due = lesser(later_due, due_later);
  };
  const Slot* slot = &slots_[static_cast<std::size_t>(rank.first)];
  const std::int64_t* due = &known_due_[static_cast<std::size_t>(kStride * rank.first)];
  for (std::int64_t code = kStride * rank.first; code < kStride * rank.end; code += kStride) {
    best = due[kW] < best_due ? code : best;
    best_due = lesser(best_due, due[kW]);
    const bool refused =
        !roomy && due[kF] != kNever && !admits(rank, static_cast<int>(slot - slots_.data()));
    consider(*slot, kF, refused ? kNever : due[kF], code + kF);
    consider(*slot, kI, restores(rank, *slot) ? due[kI] : kNever, code + kI);
    ++slot;
    due += kStride;
  }
  if (best >= 0) {
    const Choice choice{static_cast<int>(best / kStride), static_cast<Kind>(best % kStride)};
    if (later_due >= best_due) return choice;
    const std::int64_t duration =
        slots_[static_cast<std::size_t>(choice.slot)].duration[choice.kind];
    if ((later_arrival - now) * DuePolicy::kWhole > duration * wait_[choice.kind]) return choice;
  }
  wakes_.at[index] = next_arrival(index, now);
  return {};
}

// Returns the wake time of the rank's next input that its memory admits, or kNever.
std::int64_t ListScheduler::next_arrival(std::size_t index, std::int64_t now) const {
  const RankState& rank = ranks_[index];
  std::int64_t next = kUnknown;
  for (int i = rank.first; i < rank.end; ++i) {
    const Slot& slot = slots_[static_cast<std::size_t>(i)];
    for (const Kind kind : {kF, kI}) {
      const std::int64_t arrival = greater(slot.ready[kind], rank.posted) + slot.transfer[kind];
      if (arrival <= now || arrival >= next) continue;
      if (kind == kI ? restores(rank, slot) : admits(rank, i)) next = arrival;
    }
  }
  return next < kUnknown ? wakes_.value(next, index) : kNever;
}

void ListScheduler::note(const Slot& slot, Kind kind) {
  constexpr ActionKind kActions[] = {ActionKind::kWeightGradient, ActionKind::kForward,
                                     ActionKind::kInputGradient};
  (*record_)[static_cast<std::size_t>(slot.rank)].push_back(
      {.kind = kActions[kind],
       .stage = StageId{slot.stage},
       .micro_batch = MicroBatchId{slot.head[kind]}});
}

// Notes that the output of an F or I exists from `end` on. If the next action of its reader needs
// it, wakes the reader's rank when it arrives.
inline void ListScheduler::pass_on(const Slot& slot, Kind kind, int micro_batch, std::int64_t end) {
  Slot& reader = slots_[static_cast<std::size_t>(slot.reader[kind])];
  const Kind reads = slot.reads[kind];
  if (reader.head[reads] != micro_batch) return;
  reader.ready[reads] = end;
  known_due(slot.reader[kind], reads) = reader.due[reads];
  const auto index = static_cast<std::size_t>(reader.rank);
  const RankState& rank = ranks_[index];
  const std::int64_t arrival = greater(end, rank.posted) + reader.transfer[reads];
  wakes_.at[index] = lesser(wakes_.at[index], wakes_.value(greater(rank.free, arrival), index));
}

inline void ListScheduler::place(std::size_t index, Choice choice) {
  RankState& rank = ranks_[index];
  Slot& slot = slots_[static_cast<std::size_t>(choice.slot)];
  const Kind kind = choice.kind;
  if (record_ != nullptr) note(slot, kind);
  // A rank that has waited for one action, and now runs another, starts that one at its arrival, as
  // the replay does.
  const std::int64_t arrival = greater(slot.ready[kind], rank.posted) + slot.transfer[kind];
  const std::int64_t duration = slot.duration[kind];
  const std::int64_t end = greater(rank.free, arrival) + duration;
  rank.posted = rank.free;
  rank.free = end;
  rank.left -= duration;
  const int micro_batch = slot.head[kind]++;
  slot.due[kind] += period_;
  if (kind == kW) {
    rank.held -= slot.stash;
    rank.back -= slot.restored;
    known_due(choice.slot, kW) = slot.head[kW] < slot.head[kI] ? slot.due[kW] : kNever;
  } else {
    const auto m = static_cast<std::size_t>(micro_batch);
    done_[slot.output[kind] + m] = end;
    const std::int64_t ready = done_[slot.input[kind] + m + 1];
    slot.ready[kind] = ready;
    known_due(choice.slot, kind) = ready == kUnknown ? kNever : slot.due[kind];
    if (kind == kI) {
      rank.back += slot.restored;
      known_due(choice.slot, kW) = slot.due[kW];
    } else {
      rank.held += slot.stash;
      slot.ahead -= slot.stash_before;
      for (int k = choice.slot + 1; k < rank.end; ++k) {
        slots_[static_cast<std::size_t>(k)].ahead += slot.stash;
      }
    }
    pass_on(slot, kind, micro_batch, end);
  }
  wakes_.at[index] = wakes_.value(end, index);  // the rank chooses again then
}

// Returns the least value of Wakes. Four minima are independent of one another, and no comparison
// is a branch.
inline std::int64_t ListScheduler::first_wake() const {
  std::int64_t min[4] = {kNever, kNever, kNever, kNever};
  for (std::size_t r = 0; r < wakes_.at.size(); r += 4) {
    for (std::size_t i = 0; i < 4; ++i) min[i] = lesser(min[i], wakes_.at[r + i]);
  }
  return lesser(lesser(min[0], min[1]), lesser(min[2], min[3]));
}

std::int64_t ListScheduler::run(const DuePolicy& policy, std::int64_t bound) {
  start(policy);
  for (std::int64_t placed = 0; placed < actions_;) {
    const std::int64_t wake = first_wake();
    DYNMO_CHECK(wake != kNever, "an order that goes on, got a deadlock after {} of {} actions",
                placed, actions_);
    const std::int64_t now = wake >> wakes_.rank_bits;
    const auto rank = static_cast<std::size_t>(wake - (now << wakes_.rank_bits));
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
