// SPDX-License-Identifier: Apache-2.0
#pragma once

// The options of a training run beside its config, and the receiver of its text.

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/c10d/channel_transport.h"
#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/dynamism/training/source.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/recipe.h"

namespace dynmo::runtime {
class SideCopies;
}

namespace dynmo::train {

// The text on progress replaces the previous one. It is reported on rank 0 only, after each step.
struct Progress {
  std::int64_t done = 0;  // steps of the run
  std::int64_t steps = 0;
  std::function<std::string()> text;  // makes the text, which most callers want after few steps
};
struct Reporter {
  std::function<void(std::string_view)> line = [](std::string_view) {};
  std::function<void(const Progress&)> progress = [](const Progress&) {};
  // Takes a message of any rank for its log (rank_log.h).
  std::function<void(config::LogLevel, std::string_view)> log = [](config::LogLevel,
                                                                   std::string_view) {};

  // Prints and logs a line.
  void say(std::string_view text, config::LogLevel level = config::LogLevel::kInfo) const {
    line(text);
    log(level, text);
  }
};
// A text for the user, and its level in the log.
struct Line {
  std::string text;
  config::LogLevel level = config::LogLevel::kInfo;
};

struct TrainOptions {
  config::Config config;
  // The names of the runs to compare, "dense" first. "dense" is the model without its sources of
  // dynamism under its first plan. "static" has the first plan, never changed. "balanced" moves
  // layers. If the list is empty, there is one run as the config says. The first run that is not
  // dense is the baseline.
  std::vector<std::string> compare;
  // Disables all sources of dynamism. Emulated layers keep the costs of their first step.
  bool dense = false;
  bool resume = false;     // continue from the newest checkpoint that verifies, in run.directory
  bool overwrite = false;  // an earlier run in run.directory is removed first
  // Makes the layers of the model for a vocabulary. The default is the decoder of the config's
  // [model] table.
  std::function<Expected<model::Recipe>(const config::Config&, std::int64_t vocabulary)> make_model;
  // Makes additional sources of dynamism, behind those of the config.
  dynamism::MakeSources make_sources;
  // The way of bytes between the devices of a group's ranks.
  struct DeviceWay {
    c10d::ChannelTransport* channels = nullptr;  // of the group; null: through host memory
    std::string text = {};                       // for the user
  };
  // The device of this rank. run_rank() sets it if run.device names a device (rank_process.h).
  struct RankDevice {
    at::Device device = at::kCPU;
    Bytes memory = cost::kUnlimitedMemory;        // of the device, for all ranks that share it
    std::shared_ptr<runtime::SideCopies> copies;  // of this rank, in all its groups
    std::string no_kernels;  // why it has none of our own (kernels/device), for the user
    // Returns the way in a group of the run. Without it, all goes through host memory.
    std::function<DeviceWay(const transport::Transport& group)> way_in = {};

    [[nodiscard]] DeviceWay in(const transport::Transport& group) const {
      return way_in ? way_in(group) : DeviceWay();
    }
  };
  RankDevice rank_device = {};
  std::string program = {};  // this program with its version; empty: not recorded
  std::string host;          // name of this rank's host in plans; empty: the machine's name
  // The names of these options in errors, as the user knows them.
  struct Names {
    std::string resume = "resume";
    std::string overwrite = "overwrite";
    std::string compare = "compare";
    std::string directory = "run.directory";
  };
  Names names = {};
};

}  // namespace dynmo::train
