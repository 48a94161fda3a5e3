// SPDX-License-Identifier: Apache-2.0
#pragma once

// The sources that train, alone and with others, as tests of small pipelines draw them: all change
// a model within kSourcesSteps steps.

#include <string>
#include <utility>
#include <vector>

#include "dynmo/dynamism/training/sources.h"
#include "tests/runtime/blinking_source.h"
#include "tests/runtime/pipeline_fixture.h"

namespace dynmo::runtime::testing {

inline constexpr int kSourcesSteps = 60;

inline dynamism::PruningOptions pruned_within_sixty_steps() {
  dynamism::PruningOptions options;
  options.start = 4;
  options.end = 44;
  options.every = 8;
  options.sparse_above = 0.6;
  return options;
}

inline dynamism::PruningOptions units_within_sixty_steps() {
  dynamism::PruningOptions options = pruned_within_sixty_steps();
  options.form = dynamism::PruningForm::kUnits;
  options.final_sparsity = 0.7;
  options.unit_multiple = 2;
  return options;
}

inline dynamism::MoeOptions few_experts(dynamism::MoeRouter router = dynamism::MoeRouter::kTopK) {
  dynamism::MoeOptions options;
  options.experts = 4;
  options.router = router;
  options.bias_rate = 0.01;
  options.expert_hidden = 24;
  options.capacity_factor = 1.1;
  options.z_loss = 0.001;
  return options;
}

inline dynamism::EarlyExitOptions exits_within_sixty_steps() {
  dynamism::EarlyExitOptions options;
  options.survivors = 0.3;
  options.exit_every = 1;
  options.warm_up = 5;
  options.ramp_steps = 10;
  return options;
}

struct NamedSources {
  const char* name;
  dynamism::Sources (*make)(std::int64_t steps);
  int blocks = 3;  // that make kLayers layers
  bool imported = false;
};

template <typename... One>
dynamism::Sources sources_of(One... one) {
  dynamism::Sources sources;
  (sources.push_back(std::move(one)), ...);
  return sources;
}

inline const std::vector<NamedSources> kSources = {
    {"freezing by schedule",
     [](std::int64_t steps) {
       return sources_of(dynamism::make_freezing_source({.schedule = freezing()}, steps));
     }},
    {"freezing by norm",
     [](std::int64_t steps) {
       return sources_of(dynamism::make_freezing_source(norm_rule(), steps));
     }},
    {"freezing by plasticity",
     [](std::int64_t steps) {
       return sources_of(dynamism::make_freezing_source(plasticity_rule(), steps));
     }},
    {"pruning",
     [](std::int64_t) {
       return sources_of(dynamism::make_pruning_source(pruned_within_sixty_steps()));
     }},
    {"pruning of an imported model",
     [](std::int64_t) {
       return sources_of(dynamism::make_pruning_source(pruned_within_sixty_steps()));
     },
     3, true},
    {"pruning and freezing",
     [](std::int64_t steps) {
       return sources_of(dynamism::make_pruning_source(pruned_within_sixty_steps()),
                         dynamism::make_freezing_source({.schedule = freezing()}, steps));
     }},
    {"pruning of units of an imported model",
     [](std::int64_t) {
       return sources_of(dynamism::make_pruning_source(units_within_sixty_steps()));
     },
     3, true},
    {"sparse attention by hashes",
     [](std::int64_t) {
       return sources_of(dynamism::make_sparse_attention_source({.buckets = 4}));
     }},
    {"sparse attention by drops",
     [](std::int64_t) {
       return sources_of(
           dynamism::make_sparse_attention_source({.rule = dynamism::SparseRule::kDrop}));
     }},
    {"early exit",
     [](std::int64_t) {
       return sources_of(dynamism::make_early_exit_source(exits_within_sixty_steps()));
     }},
    {"early exit, pruning and freezing by plasticity",
     [](std::int64_t steps) {
       return sources_of(dynamism::make_pruning_source(pruned_within_sixty_steps()),
                         dynamism::make_freezing_source(plasticity_rule(), steps),
                         dynamism::make_early_exit_source(exits_within_sixty_steps()));
     }},
    {"sparse attention, pruning and freezing by plasticity",
     [](std::int64_t steps) {
       return sources_of(dynamism::make_pruning_source(pruned_within_sixty_steps()),
                         dynamism::make_freezing_source(plasticity_rule(), steps),
                         dynamism::make_sparse_attention_source({.buckets = 4}));
     }},
    {"mixture of depths",
     [](std::int64_t) {
       return sources_of(dynamism::make_mixture_of_depths_source({.capacity = 0.25}));
     },
     4},
    {"mixture of depths, pruning and freezing by plasticity",
     [](std::int64_t steps) {
       return sources_of(dynamism::make_pruning_source(pruned_within_sixty_steps()),
                         dynamism::make_freezing_source(plasticity_rule(), steps),
                         dynamism::make_mixture_of_depths_source({.capacity = 0.25}));
     },
     4},
    {"early exit of experts by scores, with drops",
     [](std::int64_t) {
       return sources_of(dynamism::make_moe_source(few_experts()),
                         dynamism::make_early_exit_source(exits_within_sixty_steps()));
     }},
    {"early exit of experts by a bias, pruning and freezing by plasticity",
     [](std::int64_t steps) {
       return sources_of(dynamism::make_moe_source(few_experts(dynamism::MoeRouter::kBias)),
                         dynamism::make_pruning_source(pruned_within_sixty_steps()),
                         dynamism::make_freezing_source(plasticity_rule(), steps),
                         dynamism::make_early_exit_source(exits_within_sixty_steps()));
     }},
    {"early exit of experts that choose",
     [](std::int64_t) {
       return sources_of(dynamism::make_moe_source(few_experts(dynamism::MoeRouter::kExpertChoice)),
                         dynamism::make_early_exit_source(exits_within_sixty_steps()));
     }},
    {"mixture of depths of experts by a bias, pruning and freezing by plasticity",
     [](std::int64_t steps) {
       return sources_of(dynamism::make_moe_source(few_experts(dynamism::MoeRouter::kBias)),
                         dynamism::make_pruning_source(pruned_within_sixty_steps()),
                         dynamism::make_freezing_source(plasticity_rule(), steps),
                         dynamism::make_mixture_of_depths_source({.capacity = 0.25}));
     },
     4},
    {"mixture of depths of experts, pruning of units and freezing by plasticity",
     [](std::int64_t steps) {
       return sources_of(dynamism::make_moe_source(few_experts()),
                         dynamism::make_pruning_source(units_within_sixty_steps()),
                         dynamism::make_freezing_source(plasticity_rule(), steps),
                         dynamism::make_mixture_of_depths_source({.capacity = 0.25}));
     },
     4},
    {"early exit, pruning of units and freezing by schedule",
     [](std::int64_t steps) {
       return sources_of(dynamism::make_pruning_source(units_within_sixty_steps()),
                         dynamism::make_freezing_source({.schedule = freezing()}, steps),
                         dynamism::make_early_exit_source(exits_within_sixty_steps()));
     }},
    {"sparse attention and pruning of units",
     [](std::int64_t) {
       return sources_of(dynamism::make_pruning_source(units_within_sixty_steps()),
                         dynamism::make_sparse_attention_source({.buckets = 4}));
     }},
    {"experts by scores, with drops",
     [](std::int64_t) { return sources_of(dynamism::make_moe_source(few_experts())); }},
    {"balanced experts, pruning and freezing by plasticity",
     [](std::int64_t steps) {
       return sources_of(dynamism::make_moe_source(few_experts(dynamism::MoeRouter::kBalanced)),
                         dynamism::make_pruning_source(pruned_within_sixty_steps()),
                         dynamism::make_freezing_source(plasticity_rule(), steps));
     }},
    {"experts by a bias, freezing by schedule and sparse attention", [](std::int64_t steps) {
       dynamism::MoeOptions options = few_experts(dynamism::MoeRouter::kBias);
       options.capacity_factor = 0;
       return sources_of(dynamism::make_moe_source(options),
                         dynamism::make_freezing_source({.schedule = freezing()}, steps),
                         dynamism::make_sparse_attention_source({.buckets = 4}));
     }}};

}  // namespace dynmo::runtime::testing
