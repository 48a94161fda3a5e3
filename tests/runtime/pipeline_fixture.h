// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs small pipelines with ranks as threads and returns everything that must be equal, bit for
// bit.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "dynmo/c10d/channel_transport.h"
#include "dynmo/core/digest.h"
#include "dynmo/core/rng.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/model/llama.h"
#include "dynmo/model/precision.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/model/tie.h"
#include "dynmo/plan/plan.h"
#include "dynmo/runtime/pieces.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/transport/in_process.h"
#include "dynmo/transport/tags.h"
#include "dynmo/transport/testing/fault.h"
#include "tests/support/tested_device.h"

namespace dynmo::runtime::testing {

constexpr int kLayers = 8;
constexpr std::array kKinds = {schedule::ScheduleKind::kGpipe, schedule::ScheduleKind::k1F1B,
                               schedule::ScheduleKind::kZbH1,  schedule::ScheduleKind::kInterleaved,
                               schedule::ScheduleKind::kZbV,   schedule::ScheduleKind::kAdaptive};

inline model::LlamaConfig small_model() {
  model::LlamaConfig config;
  config.shape.vocabulary = 61;
  config.shape.hidden = 32;
  config.shape.blocks = 3;  // kLayers with embedding and head
  config.shape.heads = 4;
  config.shape.kv_heads = 2;
  config.shape.intermediate = 48;
  config.shape.sequence = 12;
  config.dropout = 0.1;  // so that a lost random key shows
  return config;
}

// Freezes most of the layers within a run, a few steps apart.
inline dynamism::FreezingSchedule freezing() {
  return {.start = 0.2, .end = 0.8, .fraction = 0.6, .every = 3};
}

// Layers freeze by their gradients and, as the learning rate falls, train again within 30 steps.
inline dynamism::FreezingOptions norm_rule() {
  dynamism::FreezingOptions options{.rule = dynamism::FreezingRule::kNorm};
  options.bootstrap = 0.2;
  options.check_every = 1;
  options.smooth_steps = 2;
  options.tolerance = 1;
  options.patience = 1;
  options.unfreeze_below = 0.4;
  return options;
}

// The same by their outputs.
inline dynamism::FreezingOptions plasticity_rule() {
  dynamism::FreezingOptions options = norm_rule();
  options.rule = dynamism::FreezingRule::kPlasticity;
  options.check_every = 2;
  return options;
}

inline dynamism::MakeSources freezing_by(const dynamism::FreezingOptions& rule) {
  return [rule](std::int64_t steps) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_freezing_source(rule, steps));
    return sources;
  };
}

// A rank starts from this: a checkpoint's state.
struct Begin {
  LayerStates states;
  std::int64_t step = 0;
  Json sources = Json::object();  // what they remember
};

struct RunOptions {
  int steps = 20;
  int micro_batches = 4;
  int accumulation = 1;
  int replicas = 1;
  std::vector<int> cut = {};  // layers a rank, one stage each
  schedule::ScheduleKind schedule = schedule::ScheduleKind::k1F1B;
  std::optional<plan::Plan> plan = {};  // instead of the two
  std::optional<dynamism::FreezingSchedule> freezing = {};
  dynamism::MakeSources make_sources = {};  // instead of freezing
  bool imported = false;                    // PipelineOptions::imported
  Balancing balancing = Balancing::kNever;
  OnNan on_nan = OnNan::kStop;
  double learning_rate = 1e-2;  // peak
  std::vector<model::Tie> ties = {};
  at::ScalarType type = at::kFloat;  // of parameters and everything else
  model::Model layers = {};          // of another decoder of small_model()'s sizes
  std::int64_t vocabulary = small_model().shape.vocabulary;  // tokens are below it
  std::uint64_t seed = 7;
  // Instead of initial states at step 0.
  std::function<Expected<Begin>(const model::Model&, const plan::Plan&, Rank)> begin = {};
  // Before each step, on every rank.
  std::function<Expected<void>(Pipeline&, std::int64_t step)> before_step = {};
  std::vector<transport::Fault> faults = {};     // of every rank
  std::optional<transport::Member> faulty = {};  // or of this one only
  cost::Precision precision = cost::Precision::kFp32;
  plan::Recompute recompute = plan::Recompute::kNone;
  Bytes memory = cost::kUnlimitedMemory;  // of a rank
  double row_room = 1;
  Staging staging = {.device = dynmo::testing::tested_device()};
  // Makes the channels between stages, one a rank; none: the ranks' transport.
  std::function<std::unique_ptr<c10d::ChannelTransport>(transport::Transport&)> channels = {};
};

// As of an imported model: matrices with stds from a 64th of the nominal one to 4 times it.
inline Expected<Begin> unlike_matrices(const model::Model& model, const plan::Plan& plan,
                                       Rank rank) {
  Begin begin{.states = initial_states(model, plan, rank, /*seed=*/7)};
  for (auto& [id, state] : begin.states) {
    const auto specs = model[id.index()]->parameters();
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const int power = (id.value * 5 + static_cast<int>(i) * 7) % 9 - 6;
      if (specs[i].prunable) state.parameters[i].value.mul_(std::ldexp(1.0, power));
    }
    model::derive(*model[id.index()], state);
  }
  return begin;
}

inline LayerStates in_type(LayerStates states, at::ScalarType type) {
  for (auto& [id, state] : states) {
    for (model::Parameter& parameter : state.parameters) {
      for (at::Tensor* tensor : {&parameter.value, &parameter.gradient, &parameter.first_moment,
                                 &parameter.second_moment}) {
        *tensor = tensor->to(type);
      }
    }
  }
  return states;
}

struct RunResult {
  Expected<void> status;
  std::size_t layers = 0;                // of the model
  std::vector<double> losses;            // by step
  std::vector<double> gradient_norms;    // by step
  std::map<int, std::string> states;     // by layer: digest of values, moments, step count, key
  std::map<int, std::string> gradients;  // by layer: of one more batch with the final weights
  std::map<int, int> owners;             // of each layer, by how many ranks: 1 a replica
  int different = 0;                     // layers whose state or gradient differs between replicas
  std::map<int, std::vector<at::Tensor>> values;           // of `states`
  std::map<int, std::vector<at::Tensor>> gradient_values;  // of `gradients`

  // Keeps the digests of one replica; all have the same.
  void keep(std::map<int, std::string>& digests, int layer, const std::string& digest) {
    const auto [found, fresh] = digests.try_emplace(layer, digest);
    different += found->second == digest ? 0 : 1;
  }
};

inline void expect_same(const RunResult& a, const RunResult& b, const std::string& what) {
  ASSERT_TRUE(a.status.has_value()) << what << ": " << a.status.error().message;
  ASSERT_TRUE(b.status.has_value()) << what << ": " << b.status.error().message;
  EXPECT_EQ(a.losses, b.losses) << what;
  EXPECT_EQ(a.gradient_norms, b.gradient_norms) << what;
  EXPECT_EQ(a.states, b.states) << what;
  EXPECT_EQ(a.gradients, b.gradients) << what;
  EXPECT_EQ(a.states.size(), a.layers) << what;
  EXPECT_EQ(a.different + b.different, 0) << what;
}

inline MicroBatch batch(const model::LlamaConfig& config, std::uint64_t seed, std::int64_t step,
                        MicroBatchId id) {
  constexpr std::int64_t kSequences = 2;
  Rng rng(mix_key({seed, static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(id.value)}));
  at::Tensor tokens = at::empty({kSequences, config.shape.sequence + 1}, at::kLong);
  auto* data = tokens.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < tokens.numel(); ++i) {
    data[i] =
        static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(config.shape.vocabulary)));
  }
  return {tokens.narrow(1, 0, config.shape.sequence).contiguous(),
          tokens.narrow(1, 1, config.shape.sequence).contiguous()};
}

inline PipelineOptions pipeline_options(const model::LlamaConfig& config, const RunOptions& run) {
  PipelineOptions options;
  options.seed = run.seed;
  options.steps = run.steps;
  options.micro_batches = run.micro_batches;
  options.accumulation = run.accumulation;
  options.replicas = run.replicas;
  options.ties = run.ties;
  options.boundary_shape = {2, config.shape.sequence, config.shape.hidden};
  options.boundary_type =
      run.precision == cost::Precision::kFp32 ? run.type : model::scalar_type(run.precision);
  options.optimizer.learning_rate = 1e-2;
  options.learning_rate.peak = run.learning_rate;
  options.learning_rate.warmup_steps = 3;
  options.learning_rate.total_steps = run.steps;
  if (run.freezing) {
    options.make_sources = freezing_by({.schedule = *run.freezing});
  }
  if (run.make_sources) options.make_sources = run.make_sources;
  options.imported = run.imported;
  options.probed = [config, seed = run.seed] { return batch(config, seed, 0, MicroBatchId(0)); };
  options.balancing = run.balancing;
  options.on_nan = run.on_nan;
  options.recompute = run.recompute;
  options.memory = run.memory;
  options.row_room = run.row_room;
  options.staging = run.staging;
  return options;
}

// Runs `run.steps` steps on the ranks of the plan, for each replica.
inline RunResult run_pipeline(const RunOptions& run) {
  model::LlamaConfig config = small_model();
  config.shape.vocabulary = run.vocabulary;
  const model::Model layers = model::in_precision(
      run.layers.empty() ? model::make_llama(config) : run.layers, run.precision);
  const PipelineOptions options = pipeline_options(config, run);
  const plan::Plan plan = run.plan ? *run.plan : plan::make_plan(run.cut, run.schedule);
  RunResult result;
  result.layers = layers.size();
  std::mutex mutex;
  const auto batches = [&](std::int64_t step, MicroBatchId id) {
    return batch(config, run.seed, step, id);
  };
  result.status = transport::run_ranks(
      plan.ranks * run.replicas, [&](transport::Transport& inner) -> Expected<void> {
        at::set_num_threads(1);
        const bool faulty = run.faulty.value_or(inner.rank()) == inner.rank();
        const auto transport =
            transport::with_faults(inner, faulty ? run.faults : std::vector<transport::Fault>());
        const Rank rank(inner.rank().value % plan.ranks);
        const auto channels = run.channels ? run.channels(*transport) : nullptr;
        PipelineOptions own = options;
        own.channels = channels.get();
        Begin begin;
        if (run.begin) {
          DYNMO_ASSIGN(begin, run.begin(layers, plan, rank));
        } else {
          begin.states = in_type(initial_states(layers, plan, rank, run.seed, run.ties), run.type);
        }
        Pipeline pipeline(*transport, layers, own, {plan, std::move(begin.states), begin.step});
        DYNMO_TRY(dynamism::restore(pipeline.sources(), begin.sources));
        for (auto step = static_cast<int>(begin.step); step < run.steps; ++step) {
          if (run.before_step) DYNMO_TRY(run.before_step(pipeline, step));
          DYNMO_ASSIGN(const StepReport report, pipeline.step(batches));
          if (report.stop) return *report.stop;
          if (transport->rank() == transport::Member(0)) {
            const std::lock_guard lock(mutex);
            result.losses.push_back(report.loss);
            result.gradient_norms.push_back(report.gradient_norm);
          }
        }
        {
          const std::lock_guard lock(mutex);
          for (const auto& [id, state] : pipeline.states()) {
            const model::LayerState host = run.staging.to_host(state);
            result.keep(result.states, id.value, model::digest(host).hex());
            ++result.owners[id.value];
            if (pipeline.grid().replica() > 0) continue;
            for (const auto& parameter : state.parameters) {
              result.values[id.value].push_back(parameter.value.clone());
            }
          }
        }
        DYNMO_TRY(pipeline.accumulate(batches));
        if (channels != nullptr) DYNMO_TRY(channels->close());
        const std::lock_guard lock(mutex);
        for (const auto& [id, state] : pipeline.states()) {
          Digester digester;
          for (const auto& parameter : state.parameters) {
            if (!parameter.gradient.defined()) continue;
            digester.update(bytes_of(run.staging.to_host(parameter.gradient)));
            if (pipeline.grid().replica() > 0) continue;
            result.gradient_values[id.value].push_back(parameter.gradient.clone());
          }
          result.keep(result.gradients, id.value, digester.digest().hex());
        }
        return {};
      });
  return result;
}

// A random cut of `layers` into `ranks` parts of at least one layer.
inline std::vector<int> random_cut(Rng& rng, int layers, int ranks) {
  std::set<int> bounds;
  while (static_cast<int>(bounds.size()) < ranks - 1) {
    bounds.insert(1 + static_cast<int>(rng.below(static_cast<std::uint64_t>(layers - 1))));
  }
  bounds.insert(layers);
  std::vector<int> cut;
  int from = 0;
  for (const int bound : bounds) {
    cut.push_back(bound - from);
    from = bound;
  }
  return cut;
}

// A random plan of `layers` on `ranks` for a schedule: cut at random into as many stages as it
// wants; kAdaptive: any number of stages on any ranks (some may stay idle), in an order of its own.
inline plan::Plan random_plan(Rng& rng, schedule::ScheduleKind kind, int layers, int ranks,
                              int micro_batches, Generation generation = 0) {
  using schedule::ActionKind;
  using schedule::ScheduleKind;
  if (kind == ScheduleKind::kInterleaved || kind == ScheduleKind::kZbV) {
    const std::vector<Rank> placement = kind == ScheduleKind::kZbV
                                            ? schedule::wave_placement(ranks, 2)
                                            : schedule::loop_placement(ranks, 2);
    return plan::make_plan(random_cut(rng, layers, 2 * ranks), placement, ranks, kind, generation);
  }
  if (kind != ScheduleKind::kAdaptive) {
    return plan::make_plan(random_cut(rng, layers, ranks), kind, generation);
  }
  const int stages = 1 + static_cast<int>(rng.below(static_cast<std::uint64_t>(layers)));
  std::vector<Rank> placement;
  for (int s = 0; s < stages; ++s) {
    placement.emplace_back(static_cast<int>(rng.below(static_cast<std::uint64_t>(ranks))));
  }
  plan::Plan plan =
      plan::make_plan(random_cut(rng, layers, stages), placement, ranks, kind, generation);
  plan.order.resize(static_cast<std::size_t>(ranks));
  const auto run = [&](ActionKind action, std::size_t s) {
    for (int m = 0; m < micro_batches; ++m) {
      plan.order[plan.stages[s].rank.index()].push_back(
          {.kind = action, .stage = StageId(static_cast<int>(s)), .micro_batch = MicroBatchId(m)});
    }
  };
  for (std::size_t s = 0; s < plan.stages.size(); ++s) run(ActionKind::kForward, s);
  for (std::size_t s = plan.stages.size(); s-- > 0;) {
    const bool split = rng.below(2) == 0;
    run(split ? ActionKind::kInputGradient : ActionKind::kBackward, s);
    if (split) run(ActionKind::kWeightGradient, s);
  }
  return plan;
}

// Another random plan before every third step: cut, placement and schedule. Each rank says which it
// has moved to.
enum class MoveHow { kNow, kDuringStep };
using Changed = std::function<void(const Pipeline&, schedule::ScheduleKind)>;
inline std::function<Expected<void>(Pipeline&, std::int64_t)> random_plans(
    std::uint64_t seed, int ranks, int micro_batches, Changed changed = {},
    MoveHow how = MoveHow::kNow) {
  return [=](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step % 3 != 2) return {};
    Rng rng(mix_key({seed, static_cast<std::uint64_t>(step)}));
    const auto kind = kKinds[rng.below(kKinds.size())];
    const plan::Plan plan = random_plan(rng, kind, pipeline.plan().layers(), ranks, micro_batches,
                                        pipeline.plan().generation + 1);
    DYNMO_ASSIGN(const bool moved,
                 how == MoveHow::kNow ? pipeline.apply(plan) : pipeline.begin_move(plan));
    EXPECT_TRUE(moved) << pipeline.last_migration().refusal;
    if (changed) changed(pipeline, kind);
    return {};
  };
}

}  // namespace dynmo::runtime::testing
