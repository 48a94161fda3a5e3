// SPDX-License-Identifier: Apache-2.0
#pragma once

// A training that goes on while its group changes: 4 -> 2 -> 4 -> 3 ranks, again and again, in
// processes or threads that live on. The one rank that never changes is the oracle.

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/runtime/regroup.h"
#include "dynmo/transport/gather.h"
#include "tests/runtime/pipeline_fixture.h"

namespace dynmo::runtime::testing {

inline constexpr std::array kGroupSizes = {4, 2, 4, 3};
inline constexpr int kMembers = 4;

// The results of a training: equal however its groups were.
struct History {
  std::vector<double> losses;         // by step, of ranks that saw it
  std::map<int, std::string> states;  // by layer: digest
  friend bool operator==(const History&, const History&) = default;
};

// A cut of all layers into `ranks` parts that differs from one generation to the next.
inline std::vector<int> uneven_cut(int ranks, Generation generation) {
  Rng rng(static_cast<std::uint64_t>(generation));
  return random_cut(rng, kLayers, ranks);
}

// Gathers the states of the ranks of the newest group.
inline Expected<std::map<int, std::string>> gather_states(transport::Transport& group,
                                                          const LayerStates& layers,
                                                          const Staging& staging) {
  std::string mine;
  for (const auto& [id, state] : layers) {
    mine += fmt::format("{} {}\n", id, model::digest(staging.to_host(state)).hex());
  }
  DYNMO_ASSIGN(
      const auto texts,
      transport::gather_texts(group, transport::control_tag(transport::Control::kUser), mine));
  std::map<int, std::string> states;
  for (const std::string& text : texts) {
    std::istringstream lines(text);
    int id = 0;
    for (std::string digest; lines >> id >> digest;) states[id] = digest;
  }
  return states;
}

// One member of a training of `groups` groups. `join` gives its rank's end of a group of so many
// members, the first ones; `changed` is called between two groups, by all members.
using Join = std::function<Expected<std::unique_ptr<transport::Transport>>(Generation, int size)>;
struct Member {
  int number = 0;
  int groups = 0;
  int steps_of_a_group = 2;
  std::vector<int> sizes = {kGroupSizes.begin(), kGroupSizes.end()};  // in turn
  RunOptions run = {};
  Join join = {};
  std::function<Expected<void>(std::unique_ptr<transport::Transport>)> leave =
      [](std::unique_ptr<transport::Transport>) { return Expected<void>(); };
  std::function<void(int group)> changed = [](int) {};
};

inline model::Model layers_of(const RunOptions& run) {
  return model::in_precision(run.layers.empty() ? model::make_llama(small_model()) : run.layers,
                             run.precision);
}

// The steps of one group, in which `next` ranks keep layers at the end.
inline Expected<void> train_in(transport::Transport& group, const Member& member, int next,
                               RankState& state, History& history) {
  const model::LlamaConfig config = small_model();
  const model::Model layers = layers_of(member.run);
  const int replicas = member.run.replicas;
  const int positions = group.size() / replicas;
  Pipeline pipeline(group, layers, pipeline_options(config, member.run), std::move(state));
  if (pipeline.costs()) DYNMO_TRY(pipeline.go_on());
  for (int i = 0; i < member.steps_of_a_group; ++i) {
    const auto report = pipeline.step([&](std::int64_t step, MicroBatchId id) {
      return batch(config, member.run.seed, step, id);
    });
    if (!report) return report.error();
    history.losses.resize(static_cast<std::size_t>(report->step) + 1);
    history.losses.back() = report->loss;
  }
  if (next < positions) {
    std::vector<int> packed = uneven_cut(next, pipeline.plan().generation + 1);
    packed.resize(static_cast<std::size_t>(positions), 0);
    DYNMO_ASSIGN(const bool moved,
                 pipeline.apply(plan::make_plan(packed, schedule::ScheduleKind::k1F1B,
                                                pipeline.plan().generation + 1)));
    DYNMO_CHECK(moved, "a move that nobody refuses");
  }
  DYNMO_ASSIGN(history.states, gather_states(group, pipeline.states(), member.run.staging));
  state = pipeline.take_state();
  // All ranks know the same, also those that came new to this group.
  DYNMO_ASSIGN(const auto minds,
               transport::gather_texts(group, transport::control_tag(transport::Control::kUser),
                                       state.controller->state().dump()));
  for (const std::string& mind : minds) {
    DYNMO_CHECK(mind == minds.front(), "equal controllers, got {} and {}", mind, minds.front());
  }
  std::vector<std::optional<Rank>> before;
  for (int i = 0; i < next; ++i) {
    before.push_back(i < positions ? std::optional(Rank(i)) : std::nullopt);
  }
  state.controller->ranks_changed(before);
  return {};
}

inline Expected<History> live(const Member& member) {
  at::set_num_threads(1);
  const model::Model layers = layers_of(member.run);
  const int replicas = member.run.replicas;
  const auto size_of = [&](int group) {
    return member.sizes[static_cast<std::size_t>(group) % member.sizes.size()];
  };
  History history;
  RankState state;
  for (int i = 0; i < member.groups; ++i) {
    const int size = size_of(i);
    if (member.number < size) {
      // Packing and what the ranks decide take numbers, too.
      const Generation generation = std::int64_t{100} * i + 1;
      DYNMO_ASSIGN(std::unique_ptr<transport::Transport> group, member.join(generation, size));
      const transport::Grid grid(*group, replicas);
      const plan::Plan plan = plan::make_plan(uneven_cut(size / replicas, generation),
                                              schedule::ScheduleKind::k1F1B, generation);
      if (i == 0) {
        state = {.plan = plan,
                 .layers = initial_states(layers, plan, grid.position(), member.run.seed)};
      } else {
        DYNMO_TRY(regroup(grid, layers, plan, state, member.run.staging));
      }
      const int next = i + 1 < member.groups ? size_of(i + 1) : size;
      DYNMO_TRY(train_in(*group, member, next / replicas, state, history));
      // A position that packing freed has no layer. A rank that leaves one of the others holds a
      // copy of what stays in the first replica.
      const bool freed = grid.position().value >= next / replicas;
      const bool copied = !freed && grid.replica() > 0;
      DYNMO_TRY(member.leave(std::move(group)));
      if (member.number >= next) {
        DYNMO_CHECK(state.layers.empty() || copied, "a rank that leaves takes no layer away");
        state = {};
      }
    }
    member.changed(i);
  }
  return history;
}

// The same training in one group of `replicas` ranks.
inline Expected<History> live_alone(int steps, const RunOptions& run) {
  RunOptions alone = run;
  alone.steps = steps;
  alone.cut = {kLayers};
  const RunResult result = run_pipeline(alone);
  if (!result.status) return result.status.error();
  return History{.losses = result.losses, .states = result.states};
}

}  // namespace dynmo::runtime::testing
