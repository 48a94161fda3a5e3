// SPDX-License-Identifier: Apache-2.0
#pragma once

// The config of a run is one tree with defaults for everything. It is read from TOML, then changed
// by `--set a.b=c`. An unknown key is an error with the nearest known one. The resolved form is
// saved with the run.

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/toml.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/decoder_shape.h"
#include "dynmo/cost/rotary.h"
#include "dynmo/cost/transformer.h"
#include "dynmo/dynamism/source_options.h"

namespace dynmo::config {

// The severity of a message in the log of a rank, ascending.
enum class LogLevel { kDebug, kInfo, kWarning, kError };
inline constexpr std::array<std::string_view, 4> kLogLevelNames = {"debug", "info", "warning",
                                                                   "error"};

struct Config {
  struct Model {
    std::string family = "llama";  // or gpt2
    // vocabulary 0 means the data's. A larger one has tokens that the data does not use. For llama,
    // positions are the longest input that an export names. Only llama has kv_heads.
    cost::DecoderShape shape = {.vocabulary = 0,
                                .hidden = 256,
                                .blocks = 8,
                                .heads = 4,
                                .kv_heads = 2,
                                .intermediate = 688,
                                .sequence = 128,
                                .positions = 0};
    double dropout = 0;
    cost::Rotary rope = {};  // llama
    bool qkv_bias = false;   // llama: of queries, keys and values, as in Qwen2
    double norm_epsilon = 1e-5;
    std::optional<bool> tied_embeddings = {};  // default: of the family, true for gpt2 only
    std::string precision = "fp32";            // or bf16: computes in it, keeps parameters in fp32
  } model;
  struct Data {
    // Folder made by `dynmo data prepare`. Or token shards without a description, such as
    // Megatron's: PREFIX of PREFIX.bin and .idx, or a folder of such pairs.
    std::string path;
    std::string validation_path;  // held-out shards, for such a path
    // Prepared folders with their shares (data/blend.h), such as "0.3 FOLDER", instead of `path`.
    std::vector<std::string> blend = {};
    std::int64_t vocabulary = 0;  // of such shards: all tokens are below it
  } data;
  struct Batch {
    std::int64_t micro_batches = 8;
    std::int64_t micro_batch_size = 4;  // sequences
    std::int64_t accumulation = 1;      // rounds of micro_batches before an update
  } batch;
  struct Optimizer {
    double learning_rate = 1e-3;
    double minimum_learning_rate = 1e-4;
    std::int64_t warmup_steps = 20;
    std::string decay = "cosine";  // or linear, or wsd (the peak, then a line down)
    double decay_share = 0.2;      // wsd: decaying part of the steps after warm-up
    double beta1 = 0.9;
    double beta2 = 0.95;
    double epsilon = 1e-8;
    double weight_decay = 0.1;
    double clip_norm = 1;
  } optimizer;
  struct Train {
    std::int64_t steps = 200;
    std::int64_t seed = 1;
    // A run, a checkpoint or a Hugging Face folder with the initial weights. The optimizer is new.
    // Its decoder must be that of [model].
    std::string init;
    std::string on_nan = "stop";         // or skip: no update in a step of NaN or Inf
    std::int64_t validation_every = 50;  // 0: never
    std::int64_t validation_steps = 2;   // number of steps whose micro-batches are held out
  } train;
  struct Pipeline {
    std::int64_t ranks = 0;            // of one replica; 0: min(4, usable cores), at least 2
    std::int64_t replicas = 1;         // pipelines that train on different micro-batches
    std::string schedule = "1f1b";     // or auto: best of all for the first plan, by replay
    std::int64_t stages_per_rank = 2;  // of interleaved
    std::string balancer = "optimal";  // of the first plan, on costs measured before the first step
    std::vector<std::int64_t> cut;     // layers of each rank; if given, it is the first plan
    std::string place = "hosts";       // or given: ranks keep their original order
    std::int64_t measure_steps = 4;    // forward and backward without update, for the first plan
    bool pin = true;                   // each rank to a separate core, if there are enough
    std::string recompute = "none";    // or whole, or auto: as few layers as pipeline.memory needs
    Bytes memory;                      // of a rank, for plans; 0: unlimited
    double timeout_s = 300;            // of one message; a lost rank is noticed in seconds
  } pipeline;
  struct Balance {
    bool enabled = true;
    std::string balancer = "optimal";
    double minimum_gain = 0.01;
    double noise_factor = 5;
    std::int64_t window = 5;  // minimum steps in the median of a layer's share
  } balance;
  // Tables of the sources. A source is found by the type of its options.
  dynamism::SourceOptions sources;
  struct Checkpoint {
    std::int64_t every = 0;               // steps; 0: none
    std::int64_t keep = 2;                // newest ones kept
    bool asynchronous = true;             // written while training continues
    Bytes memory{std::int64_t{2} << 30};  // for copies of a rank; the rest is written at once
  } checkpoint;
  // Costs of layers for run.device = "emulated" (model/emulated). One of the two files is set.
  struct Emulated {
    std::string profile;                        // "dynmo-profile-1": the same costs in every step
    std::string trace;                          // "dynmo-load-trace-1": costs by step
    double memory_scale = 1;                    // bytes held for each byte of a parameter
    double time_scale = 1;                      // seconds slept for each second of a layer
    std::vector<std::int64_t> slow_ranks = {};  // positions of the ranks with slow_speed
    double slow_speed = 0.5;
    std::int64_t slow_from = 0;   // first step
    std::int64_t slow_until = 0;  // first step at full speed again; 0: none
  } emulated;
  // The keys of [elastic]: changes of the ranks during a run (docs/elasticity.md).
  struct Elastic {
    bool enabled = false;             // ranks may leave and join while it trains
    std::string pack = "never";       // or auto: onto fewer ranks if that costs no tokens/s
    double pack_slack = 0;            // auto: accepted growth of the step time
    std::int64_t pack_ranks = 0;      // size of a replica after packing; 0: not packed
    std::int64_t release_after = 10;  // steps without layers before a rank is released
    std::int64_t ranks_min = 1;       // minimum ranks of a replica after a release
    bool respawn = false;             // `dynmo train` starts a rank for each lost one
    double silence_s = 3;             // a rank without a heartbeat for longer is lost
    // "auto" or "never". With never, a lost rank costs the steps since a checkpoint.
    std::string snapshots = "auto";
    double snapshot_cost = 0.01;    // auto: maximum share of a step's time
    std::string release_command;    // called after released ranks have ended; empty: none
    double release_timeout_s = 60;  // for one call of it
    // The leader's address: auto (where the ranks meet), loopback, or an address of this host.
    // Ranks that `dynmo train` starts then meet at that address.
    std::string listen = "auto";
  } elastic;
  struct Run {
    std::string directory = "runs/default";
    std::string device = "cpu";     // or "emulated", or of device_names()
    bool deterministic = true;      // equal bits on a device; false: the fastest operations
    bool fused_kernels = true;      // of our own, on a device (kernels/device)
    std::int64_t trace_steps = 4;   // last steps in the trace
    std::int64_t load_trace = 10;   // steps between two lines of the load trace; 0: none
    bool tensorboard = false;       // event files in RUN/tensorboard
    bool prometheus = false;        // metrics in RUN/metrics
    std::int64_t metrics_port = 0;  // of the leader on 127.0.0.1, for Prometheus; 0: none
    double peak_flops = 0;          // FLOP/s of a rank's device, for MFU; 0: not given
    std::string log;                // folder of the log of each rank; empty: none
    LogLevel log_level = LogLevel::kInfo;
  } run;
};

// Returns all keys, bound to the fields of `config`. This is their only list: reading, changing,
// checking, saving and messages use it.
[[nodiscard]] std::vector<TomlKey> keys_of(Config& config);
// Applies a TOML file. Returns kBadInput with file and line for an unknown key or a wrong type.
[[nodiscard]] Expected<void> apply_file(Config& config, const std::filesystem::path& path);
// Like apply_file(), for its text. `origin` names it in messages.
[[nodiscard]] Expected<void> apply_text(Config& config, std::string_view text,
                                        std::string_view origin);
// Applies "a.b=c" texts. The value is TOML, or a string without quotes. If a setting makes another
// key idle, that key is reset to its default, unless a setting names it. Fails with kBadInput.
[[nodiscard]] Expected<void> apply_settings(Config& config, std::span<const std::string> settings);
// Returns all keys, such as "train.steps", in the order of the resolved form.
[[nodiscard]] std::vector<std::string> key_names();
// Returns kBadInput for a value out of range, an invalid combination, or a given key without
// effect. Also returns it for a source that has nothing to do in the run.
[[nodiscard]] Expected<void> validate(const Config& config);
// Returns the address in elastic.listen, or "" for `auto` and `loopback`.
[[nodiscard]] std::string own_meeting_address(const Config& config);
// Returns whether the layers are emulated. All outputs of such a run say so.
[[nodiscard]] bool emulates(const Config& config);
// Returns whether ranks compute on devices with memory of their own (c10d/device_kinds.h).
[[nodiscard]] bool on_device(const Config& config);
// Returns the resolved form, which apply_file() reads back to the same value. Keys without effect
// have their defaults there.
[[nodiscard]] std::string to_toml(const Config& config);
// Returns the shape of a valid config for the formulas of cost/transformer.h: its sizes, ties,
// experts and micro-batch. `vocabulary` is that of the data, used unless model.vocabulary is set.
[[nodiscard]] cost::TransformerShape transformer_shape(const Config& config,
                                                       std::int64_t vocabulary);
// Returns the FLOPs of F, I and W in a step, for the products of the dense model, over all replicas
// and without recomputation. Returns 0 if layers are emulated.
[[nodiscard]] double step_flops(const Config& config, std::int64_t vocabulary);
// Returns the tables of enabled sources for which a step computes less than step_flops().
[[nodiscard]] std::vector<std::string_view> sparse_sources(const Config& config);
// Returns the micro-batches of a step: replicas x accumulation x micro_batches.
[[nodiscard]] std::int64_t step_micro_batches(const Config& config);
// Returns kBadInput if elastic.ranks_min or elastic.pack_ranks exceeds `ranks`, the ranks of a
// replica at the start.
[[nodiscard]] Expected<void> check_ranks(const Config& config, int ranks);
// Returns the number of ranks of one replica if `world` ranks were started. Returns kBadInput if
// pipeline.replicas does not divide `world`.
[[nodiscard]] Expected<int> pipeline_ranks(const Config& config, int world);
// Returns a digest, as text, of all settings that determine the numbers of a run. A checkpoint
// continues only a run with an equal identity. The settings are model, data, micro-batches of a
// step and their size, optimizer, train.seed/steps, and tables of the enabled sources.
//
// The number of ranks, cuts and balancing are not included. Settings that change only the last bits
// are not, either. These are the CPU or a device, run.deterministic, and the grouping of a step's
// micro-batches in replicas.
[[nodiscard]] std::string identity(const Config& config);
// Returns the first difference between the identities of a config and of the saved one, "train.seed
// is 4, the run's is 3", or "".
[[nodiscard]] std::string first_difference(const Config& given, const Config& saved);

}  // namespace dynmo::config
