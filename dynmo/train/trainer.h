// SPDX-License-Identifier: Apache-2.0
#pragma once

// A whole training run as one rank sees it: data, first plan, steps, validation, records,
// checkpoints, summary. With `compare` it advances several runs of the same training in turn, step
// by step, so that a noisy machine treats them alike.

#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/model/layer.h"
#include "dynmo/runtime/channel_transport.h"
#include "dynmo/train/config.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// Where text for people goes; called on rank 0 only. A progress text replaces the one before it.
struct Reporter {
  std::function<void(std::string_view)> line = [](std::string_view) {};
  std::function<void(std::string_view)> progress = [](std::string_view) {};
};

struct TrainOptions {
  Config config;  // valid
  // Names among "static" (the first plan, never changed) and "balanced"; empty: one run as the
  // config says. The first is the baseline.
  std::vector<std::string> compare;
  bool resume = false;  // continue from the newest checkpoint that verifies, in run.directory
  // The layers of the model for a vocabulary; default: the decoder of the config's [model] table.
  std::function<Expected<model::Model>(const Config&, std::int64_t vocabulary)> make_model;
  // Where this rank computes, and how bytes in the memory of its device get to the others (null:
  // through host memory). run_rank (rank_process.h) fills it in for run.device = cuda.
  struct RankDevice {
    at::Device device = at::kCPU;
    runtime::ChannelTransport* channels = nullptr;
    std::string text;  // for people
  };
  RankDevice rank_device = {};
};

// What can be known before any rank starts: config, data, names, ranks (of a replica) against
// layers, weights to start from. kBadInput.
[[nodiscard]] Expected<void> check_inputs(const TrainOptions& options, int ranks);

// Whether this host has the memory for the states of all layers, as many times as there are
// replicas: to be asked where all ranks run on it. kBadInput.
[[nodiscard]] Expected<void> check_host_memory(const TrainOptions& options);

// What the run would be, in lines of text (dry_run.h). Starts no rank and writes no file.
[[nodiscard]] Expected<std::string> dry_run(const TrainOptions& options, int ranks);

// Called by all ranks of the group with equal options. Requires at::set_num_threads(1) or the same
// number on all.
[[nodiscard]] Expected<void> train(transport::Transport& transport, const TrainOptions& options,
                                   const Reporter& reporter = {});

}  // namespace dynmo::train
