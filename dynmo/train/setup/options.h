// SPDX-License-Identifier: Apache-2.0
#pragma once

// A training run takes these options besides its config; they say where its text for people goes.

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/c10d/channel_transport.h"
#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/dynamism/training/source.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/recipe.h"

namespace dynmo::train {

// Called on rank 0 only, after each step. Its text replaces the one before it.
struct Progress {
  std::int64_t done = 0;  // steps of the run
  std::int64_t steps = 0;
  std::string_view text;
};
struct Reporter {
  std::function<void(std::string_view)> line = [](std::string_view) {};
  std::function<void(const Progress&)> progress = [](const Progress&) {};
};

struct TrainOptions {
  config::Config config;  // valid
  // Names among "dense" (the model without its sources of dynamism under its first plan), "static"
  // (the first plan, never changed) and "balanced", the dense one first; empty: one run as the
  // config says. The first that is not dense is the baseline.
  std::vector<std::string> compare;
  // No source of dynamism is there; emulated layers keep the costs of their first step.
  bool dense = false;
  bool resume = false;     // continue from the newest checkpoint that verifies, in run.directory
  bool overwrite = false;  // an earlier run in run.directory is removed first
  // The layers of the model for a vocabulary; default: the decoder of the config's [model] table.
  std::function<Expected<model::Recipe>(const config::Config&, std::int64_t vocabulary)> make_model;
  // Sources of dynamism of your own, behind those of the config.
  dynamism::MakeSources make_sources;
  // Where this rank computes, and how bytes in the memory of its device get to the others (null:
  // through host memory). run_rank (rank_process.h) fills it in for run.device = cuda.
  struct RankDevice {
    at::Device device = at::kCPU;
    c10d::ChannelTransport* channels = nullptr;
    std::string text;  // for people
  };
  RankDevice rank_device = {};
  std::string program = {};  // that trains, with its version; empty: not recorded
  std::string host;          // of this rank, as plans know it; empty: the name of the machine
  // Errors call these options by the names that the reader has given them.
  struct Names {
    std::string resume = "resume";
    std::string overwrite = "overwrite";
    std::string compare = "compare";
    std::string directory = "run.directory";
  };
  Names names = {};
};

}  // namespace dynmo::train
