// SPDX-License-Identifier: Apache-2.0
#pragma once

// A question about a pipeline, as a file. It has the model and the machines, the source of
// dynamism, and the ranks that come and go. It also has the costs of measuring, planning and
// moving. docs/scenarios.md explains every key.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/toml.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/decoder_shape.h"
#include "dynmo/dynamism/source_options.h"

namespace dynmo::scenario {

// Ranks leave, join, fail or change their speed before step `step`. Ranks are positions in the
// pipeline, 0 the first. The replicas share one plan, so a position is in use in all of them or in
// none.
struct Event {
  std::int64_t step = 0;
  std::vector<std::int64_t> leave = {};
  std::vector<std::int64_t> join = {};
  std::int64_t replicas = 0;  // from now on; 0: as before
  bool failure = false;       // unannounced: back to the last checkpoint, and a restart
  // Ranks that compute at `speed` x their speed of the cluster from now on. No policy is told.
  std::vector<std::int64_t> slow = {};
  double speed = 1;
};

struct Scenario {
  // One of a shape, a Hugging Face config.json, and a measured profile. Sizes of 0 are the
  // family's.
  struct Model {
    std::string family = "gpt";  // gpt, llama, mixtral
    std::string config;          // path of a config.json
    std::string profile;         // path of a "dynmo-profile-1"
    // A sequence of 0 means 2048 for a shape. For a profile or a recorded load it means unknown.
    cost::DecoderShape shape = {.hidden = 1024, .blocks = 24};
    std::int64_t experts = 0;
    std::int64_t experts_per_token = 0;
    std::int64_t micro_batch_size = 1;  // sequences
    bool fused_attention = true;  // of the dense model; sparse attention's kernel is always fused
  } model;
  std::string device = "h100";
  struct Cluster {
    int pipeline_ranks = 8;
    int data_parallel = 1;
    int ranks_per_node = 8;
    std::string order = "pipeline";  // neighbours on a node: pipeline, data
    Bytes memory = {};               // of a rank; here and below 0: the device's
    double inside_latency_s = 0;
    double inside_bandwidth = 0;
    double between_latency_s = 0;
    double between_bandwidth = 0;
    double nic_bandwidth = 0;                   // shared by the ranks of a node; 0: unlimited
    std::vector<std::int64_t> slow_ranks = {};  // of all pipeline_ranks x data_parallel
    double slow_speed = 0.8;
  } cluster;
  struct Dynamism {
    std::string source = "none";
    std::string trace;  // a recorded load instead of a source
  } dynamism;
  dynamism::SourceOptions sources;
  struct Training {
    std::int64_t steps = 1000;
    int micro_batches = 32;  // of a replica
    std::string schedule = "1f1b";
    std::string recompute = "none";  // or whole, or auto: as few layers as the memory needs
    std::int64_t seed = 1;
    std::int64_t sample_every = 1;      // steps between new costs
    std::int64_t checkpoint_every = 0;  // steps; 0: a failure goes back to the start
    double restart_s = 60;              // of a job that loses ranks, or is static and changes
  } training;
  struct Policy {
    std::vector<std::string> compare = {"uniform", "time", "optimal"};
    double noise = 0.02;  // relative std of a measured layer
    int window = 5;       // measurements; their median is a layer's cost
    // Values measured on CPUs (docs/scenarios.md).
    double profile_share = 0.0003;  // relative increase of a step by measuring
    double plan_s = 0.002;          // of a plan
    double search_s = 0.3;          // of a plan of balancer search
    double move_bandwidth = 1e10;
    double move_fixed_s = 0.005;  // of a move of no bytes: agreement, new schedules
    double minimum_gain = 0.01;
    double noise_factor = 5;
    // Steps for which a gain is expected to last; 0: as long as loads lasted so far.
    std::int64_t horizon_steps = 0;
    double pack_slack = 0;            // NAME+pack: accepted increase of a step for fewer ranks
    std::int64_t release_after = 10;  // NAME+pack: steps without layers before a rank is released
    std::int64_t ranks_min = 1;       // NAME+pack: minimum ranks after a release
    std::int64_t evaluations = 0;     // of a search; 0: default of plan/search.h
  } policy;
  std::vector<Event> events;
};

// Limits, so that any file is answered in bounded memory.
inline constexpr std::int64_t kMaxRanks = std::int64_t{1} << 20;
inline constexpr std::int64_t kMaxPipelineRanks = 4096;
inline constexpr std::int64_t kMaxSteps = 10'000'000;

// Returns all keys, bound to the fields of `scenario`. This is their only list.
[[nodiscard]] std::vector<TomlKey> keys_of(Scenario& scenario);
// Reads and validates a scenario. The text may have any bytes. Names in `compare` replace
// policy.compare. A key that has no effect with them is reset to its default. Returns kBadInput
// with `origin` and line as in core/toml.h, or with key, value and range.
[[nodiscard]] Expected<Scenario> parse_scenario(std::string_view text, std::string_view origin,
                                                std::vector<std::string> compare = {});
// Like parse_scenario(), for a file, with "table.key=value" changes over it. Paths in the file are
// relative to the file's folder.
[[nodiscard]] Expected<Scenario> read_scenario(const std::filesystem::path& path,
                                               std::span<const std::string> settings = {},
                                               std::vector<std::string> compare = {});
// Returns kBadInput for a value out of range, an invalid combination, or a given key without
// effect.
[[nodiscard]] Expected<void> validate(const Scenario& scenario);
// Returns whether one of the compared policies plans again while the scenario runs.
[[nodiscard]] bool replans(const Scenario& scenario);
// Returns why the source of dynamism does nothing in so few steps or blocks. Returns "" if it does
// something, or there is none.
[[nodiscard]] std::string idle_source(const Scenario& scenario);
// Returns the resolved form, which parse_scenario() reads back to the same value.
[[nodiscard]] std::string to_toml(const Scenario& scenario);

}  // namespace dynmo::scenario
