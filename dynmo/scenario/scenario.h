// SPDX-License-Identifier: Apache-2.0
#pragma once

// A question about a pipeline, as a file: which model on which machines, what makes its layers
// unequal while it trains, which ranks come and go, and what measuring, planning and moving cost.
// docs/scenarios.md explains every key.

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

// Ranks leave, join or fail before step `step`. Ranks are positions in the pipeline, 0 the first:
// the replicas share one plan, so a position is in use in all of them or in none.
struct Event {
  std::int64_t step = 0;
  std::vector<std::int64_t> leave = {};
  std::vector<std::int64_t> join = {};
  std::int64_t replicas = 0;  // from now on; 0: as before
  bool failure = false;       // unannounced: back to the last checkpoint, and a restart
};

struct Scenario {
  // One of: a shape, a Hugging Face config.json, a measured profile. Sizes of 0 are the family's.
  struct Model {
    std::string family = "gpt";  // gpt, llama, mixtral
    std::string config;          // path of a config.json
    std::string profile;         // path of a "dynmo-profile-1"
    // sequence 0: 2048 for a shape, and not known of a profile or a recorded load.
    cost::DecoderShape shape = {.hidden = 1024, .blocks = 24};
    std::int64_t experts = 0;
    std::int64_t experts_per_token = 0;
    std::int64_t micro_batch_size = 1;  // sequences
    bool fused_attention = true;        // of the dense model; sparse attention's kernel always is
  } model;
  std::string device = "h100";
  struct Cluster {
    int pipeline_ranks = 8;
    int data_parallel = 1;
    int ranks_per_node = 8;
    std::string order = "pipeline";  // which ranks are neighbours on a node: pipeline, data
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
    std::int64_t sample_every = 1;      // costs are taken anew every so many steps
    std::int64_t checkpoint_every = 0;  // steps; 0: only the start can be gone back to
    double restart_s = 60;              // of a job that has lost ranks, or is static and changes
  } training;
  struct Policy {
    std::vector<std::string> compare = {"uniform", "time", "optimal"};
    double noise = 0.02;  // relative std of a measured layer
    int window = 5;       // measurements whose median is a layer's cost
    // As measured on CPUs (docs/scenarios.md).
    double profile_share = 0.0003;  // by which measuring lengthens a step
    double plan_s = 0.002;          // of a plan ...
    double search_s = 0.3;          // ... and of one of balancer search
    double move_bandwidth = 1e10;
    double move_fixed_s = 0.005;  // of a move of no bytes: agreeing on it, new schedules
    double minimum_gain = 0.01;
    double noise_factor = 5;
    std::int64_t horizon_steps = 0;   // a gain is expected to last; 0: as long as loads did so far
    double pack_slack = 0;            // of NAME+pack: growth of a step accepted for fewer ranks
    std::int64_t release_after = 10;  // ... steps that a rank has no layers before it is released
    std::int64_t ranks_min = 1;       // ... none is released below it
    std::int64_t evaluations = 0;     // of a search; 0: plan/search.h says
  } policy;
  std::vector<Event> events;
};

// Bounds, so that any file is answered in bounded memory.
inline constexpr std::int64_t kMaxRanks = std::int64_t{1} << 20;
inline constexpr std::int64_t kMaxPipelineRanks = 4096;
inline constexpr std::int64_t kMaxSteps = 10'000'000;

// The one list of keys, over the fields of `scenario`.
[[nodiscard]] std::vector<TomlKey> keys_of(Scenario& scenario);
// Reads and validates. Takes any bytes; kBadInput with `origin` and line as core/toml.h says, or
// with key, value and range.
// Names in `compare` take the place of policy.compare; a key that they leave without its effect
// goes back to its default.
[[nodiscard]] Expected<Scenario> parse_scenario(std::string_view text, std::string_view origin,
                                                std::vector<std::string> compare = {});
// The same of a file, with "table.key=value" changes over it. Paths in the file are relative to the
// file's folder.
[[nodiscard]] Expected<Scenario> read_scenario(const std::filesystem::path& path,
                                               std::span<const std::string> settings = {},
                                               std::vector<std::string> compare = {});
// Ranges and combinations that no scenario can have, and keys that are given and have no effect.
[[nodiscard]] Expected<void> validate(const Scenario& scenario);
// Whether a policy that is compared re-plans while the scenario runs.
[[nodiscard]] bool replans(const Scenario& scenario);
// Why the source of dynamism does nothing in so few steps or blocks; "": it does something, or
// there is none.
[[nodiscard]] std::string idle_source(const Scenario& scenario);
// The resolved form; parse_scenario reads it back to the same value.
[[nodiscard]] std::string to_toml(const Scenario& scenario);

}  // namespace dynmo::scenario
