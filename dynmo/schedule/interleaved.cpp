// SPDX-License-Identifier: Apache-2.0
// Interleaved 1F1B as Megatron-LM runs it (Narayanan et al. 2021): 1F1B over P x v stages, where
// groups of micro-batches take turns on the v stages of a rank.
#include <algorithm>

#include "dynmo/schedule/generate_impl.h"

namespace dynmo::schedule {
namespace {

struct Turn {
  int lap = 0;  // index among the rank's stages
  int micro_batch = 0;
};

// Returns the order of the forwards, equal on every rank. Backwards use it with the laps reversed.
std::vector<Turn> turns(int micro_batches, int laps, int group_size) {
  std::vector<Turn> order;
  order.reserve(static_cast<std::size_t>(micro_batches) * static_cast<std::size_t>(laps));
  for (int first = 0; first < micro_batches; first += group_size) {
    const int count = std::min(group_size, micro_batches - first);
    for (int lap = 0; lap < laps; ++lap) {
      for (int m = first; m < first + count; ++m) order.push_back({lap, m});
    }
  }
  return order;
}

Expected<void> check_loop(const PipelineShape& shape, int ranks) {
  const std::vector<StageShape>& stages = shape.stages;
  if (stages.size() % static_cast<std::size_t>(ranks) != 0) {
    return make_error(ErrorCode::kBadInput,
                      "{} stages on {} ranks; interleaved wants as many stages on every rank that "
                      "has any, none of them empty",
                      stages.size(), ranks);
  }
  std::vector<int> place(static_cast<std::size_t>(shape.ranks), -1);
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const auto turn = static_cast<int>(s) % ranks;
    int& of_rank = place[stages[s].rank.index()];
    if (of_rank < 0) of_rank = turn;
    if (of_rank != turn) {
      return make_error(ErrorCode::kBadInput,
                        "stage {} is on rank {}; interleaved wants it on rank {}, stages in a loop "
                        "over the {} ranks",
                        s, stages[s].rank, stages[s % static_cast<std::size_t>(ranks)].rank, ranks);
    }
  }
  return {};
}

Expected<void> check_groups(int ranks, int micro_batches, int group_size) {
  if (group_size < ranks) {
    return make_error(ErrorCode::kBadInput,
                      "interleaved in groups of {} micro-batches over {} ranks; want groups of at "
                      "least {}",
                      group_size, ranks, ranks);
  }
  const int rest = micro_batches % group_size;
  if (micro_batches >= group_size && (rest == 0 || rest >= ranks)) return {};
  const std::int64_t below = micro_batches - rest;
  const std::int64_t above =
      below < group_size || group_size == ranks ? below + group_size : below + ranks;
  return make_error(ErrorCode::kBadInput,
                    "interleaved takes no {} micro-batches in groups of {} over {} ranks; want {}{}"
                    " micro-batches",
                    micro_batches, group_size, ranks, below > 0 ? fmt::format("{} or ", below) : "",
                    above);
}

// Appends the actions of the rank that holds stage `place` of each lap. They are 1F1B over turns:
// `ahead` forwards, then forwards and backwards alternately.
void append_rank(Schedule& schedule, const std::vector<Turn>& order, int ranks, int place,
                 int ahead) {
  const int laps = static_cast<int>(schedule.shape.stages.size()) / ranks;
  const auto count = static_cast<int>(order.size());
  const auto turn = [&](int k) { return order[static_cast<std::size_t>(k)]; };
  const auto forward = [&](int k) {
    StageOrder(schedule, turn(k).lap * ranks + place).forward(turn(k).micro_batch);
  };
  const auto backward = [&](int k) {
    StageOrder(schedule, (laps - 1 - turn(k).lap) * ranks + place).backward(turn(k).micro_batch);
  };
  for (int k = 0; k < ahead; ++k) forward(k);
  for (int k = ahead; k < count; ++k) {
    forward(k);
    backward(k - ahead);
  }
  for (int k = count - ahead; k < count; ++k) backward(k);
}

}  // namespace

Expected<void> append_interleaved(Schedule& schedule, int group_size) {
  const PipelineShape& shape = schedule.shape;
  const int ranks = ranks_in_use(shape);
  DYNMO_TRY(check_loop(shape, ranks));
  const int laps = static_cast<int>(shape.stages.size()) / ranks;
  // With one stage a rank the group size does not matter.
  const int group = group_size == 0 || laps == 1 ? ranks : group_size;
  if (laps > 1) DYNMO_TRY(check_groups(ranks, shape.micro_batches, group));
  const std::vector<Turn> order = turns(shape.micro_batches, laps, group);
  for (int place = 0; place < ranks; ++place) {
    const std::int64_t behind = ranks - 1 - place;
    // One lap is 1F1B, which needs half as many forwards ahead.
    const std::int64_t ahead =
        laps == 1 ? behind : 2 * behind + static_cast<std::int64_t>(laps - 1) * group;
    append_rank(schedule, order, ranks, place,
                static_cast<int>(std::min(ahead, static_cast<std::int64_t>(order.size()))));
  }
  return {};
}

}  // namespace dynmo::schedule
