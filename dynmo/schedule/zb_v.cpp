// SPDX-License-Identifier: Apache-2.0
// ZB-V (Qi et al. 2024, "Pipeline parallelism with controllable memory"), the handcrafted order.
#include <algorithm>
#include <optional>
#include <string_view>

#include "dynmo/schedule/generate_impl.h"

namespace dynmo::schedule {
namespace {

// The stages of a rank: `there` before the middle of the V, `back` after it. One of them may be
// missing. A single stage in the middle is `back`.
struct Pair {
  std::optional<int> there;
  std::optional<int> back;
};

Error no_v(std::string_view problem) {
  return make_error(ErrorCode::kBadInput,
                    "{}; zb-v wants the stages there and back over the ranks: 0 1 2 2 1 0",
                    problem);
}

Expected<std::vector<Pair>> stages_by_rank(const PipelineShape& shape) {
  std::vector<Pair> pairs(static_cast<std::size_t>(shape.ranks));
  for (int s = 0; s < static_cast<int>(shape.stages.size()); ++s) {
    const Rank rank = shape.stages[static_cast<std::size_t>(s)].rank;
    Pair& pair = pairs[rank.index()];
    if (pair.back) {
      return no_v(
          fmt::format("stages {}, {} and {} are on rank {}", *pair.there, *pair.back, s, rank));
    }
    (pair.there ? pair.back : pair.there) = s;
  }
  return pairs;
}

// Returns the pairs from the ends of the V to its middle. The pairs of ranks with two stages must
// nest. A rank with one stage comes where its stage lies between theirs.
Expected<std::vector<Pair>> v_of(const PipelineShape& shape) {
  DYNMO_ASSIGN(const std::vector<Pair> by_rank, stages_by_rank(shape));
  const auto pair_of = [&](int stage) -> const Pair& {
    return by_rank[shape.stages[static_cast<std::size_t>(stage)].rank.index()];
  };
  std::vector<Pair> v;
  int first = 0;
  int last = static_cast<int>(shape.stages.size()) - 1;
  while (first < last) {
    const Pair& near = pair_of(first);
    const Pair& far = pair_of(last);
    if (near.back == last) {
      v.push_back({.there = first++, .back = last--});
    } else if (!near.back) {
      v.push_back({.there = first++, .back = {}});
    } else if (!far.back) {
      v.push_back({.there = {}, .back = last--});
    } else {
      return no_v(fmt::format("stages {} and {} on one rank and {} and {} on another do not nest",
                              first, *near.back, *far.there, last));
    }
  }
  if (first == last) v.push_back({.there = {}, .back = first});
  const bool turns =
      std::any_of(v.begin(), v.end(), [](const Pair& pair) { return pair.there && pair.back; });
  if (!turns && v.size() > 1) return no_v("no rank holds two stages");
  return v;
}

// Appends actions of one of a rank's stages. Ignores micro-batches from M on, so the same loops
// serve a small M. A missing stage ignores all.
class Way {
 public:
  Way(Schedule& schedule, std::optional<int> stage)
      : micro_batches_(stage ? schedule.shape.micro_batches : 0),
        order_(schedule, stage.value_or(0)) {}
  void forward(int m) {
    if (exists(m)) order_.forward(m);
  }
  void input_gradient(int m) {
    if (exists(m)) order_.input_gradient(m);
  }
  void weight_gradient(int m) {
    if (exists(m)) order_.weight_gradient(m);
  }
  void gradients(int m) {
    input_gradient(m);
    weight_gradient(m);
  }

 private:
  [[nodiscard]] bool exists(int m) const { return m < micro_batches_; }
  int micro_batches_;
  StageOrder order_;
};

// Appends the actions of rank r = `place` of the V. With stage a there and b back, P ranks, and
// n = max(2P-1, M) they are:
//   2(P-r)-1 times F(a);  r times F(b) F(a);  P-r times F(b) I(b) W(b);
//   n-P times F(a) if left, I(a) W(a) F(b) I(b) W(b);
//   r times I(a) I(b);  P-r times I(a) W(a);  the remaining W(b), then W(a).
// All micro-batches of a phase's i-th round are at least i, so rounds from M on do nothing.
void append_rank(Schedule& schedule, const Pair& stages, int ranks, int place) {
  const int micro_batches = schedule.shape.micro_batches;
  const int behind = ranks - place;  // with this one
  const int all = std::max(2 * ranks - 1, micro_batches);
  Way there(schedule, stages.there);
  Way back(schedule, stages.back);
  const auto rounds = [&](int count, auto&& round) {
    for (int i = 0; i < std::min(count, micro_batches); ++i) round(i);
  };
  rounds(2 * behind - 1, [&](int i) { there.forward(i); });
  rounds(place, [&](int i) {
    back.forward(i);
    there.forward(2 * behind - 1 + i);
  });
  rounds(behind, [&](int i) {
    back.forward(place + i);
    back.gradients(i);
  });
  rounds(all - ranks, [&](int i) {
    there.forward(ranks + behind - 1 + i);
    there.gradients(i);
    back.forward(ranks + i);
    back.gradients(behind + i);
  });
  rounds(place, [&](int i) {
    there.input_gradient(all - ranks + i);
    back.input_gradient(all - place + i);
  });
  rounds(behind, [&](int i) {
    there.input_gradient(all - behind + i);
    there.weight_gradient(all - ranks + i);
  });
  rounds(place, [&](int i) { back.weight_gradient(all - place + i); });
  rounds(place, [&](int i) { there.weight_gradient(all - place + i); });
}

}  // namespace

Expected<void> append_zb_v(Schedule& schedule) {
  DYNMO_ASSIGN(const std::vector<Pair> v, v_of(schedule.shape));
  const int ranks = static_cast<int>(v.size());
  for (int place = 0; place < ranks; ++place) {
    append_rank(schedule, v[static_cast<std::size_t>(place)], ranks, place);
  }
  return {};
}

}  // namespace dynmo::schedule
