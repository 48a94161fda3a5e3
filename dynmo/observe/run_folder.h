// SPDX-License-Identifier: Apache-2.0
#pragma once

// The folder of a run and the names of its files (docs/formats.md).

#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <utility>

#include "dynmo/core/ids.h"

namespace dynmo::observe {

class RunFolder {
 public:
  using Path = std::filesystem::path;

  explicit RunFolder(Path root) : root_(std::move(root)) {}

  [[nodiscard]] const Path& root() const { return root_; }
  // Returns the folder of one of several runs that are compared. A single run has the empty name
  // and this folder.
  [[nodiscard]] RunFolder of(std::string_view name) const {
    return name.empty() ? *this : RunFolder(root_ / name);
  }

  [[nodiscard]] Path config() const { return root_ / "config.toml"; }
  [[nodiscard]] Path summary() const { return root_ / "summary.json"; }
  [[nodiscard]] Path traffic() const { return root_ / "traffic.jsonl"; }
  [[nodiscard]] Path cluster() const { return root_ / "cluster.json"; }
  [[nodiscard]] Path profile() const { return root_ / "profile.json"; }
  [[nodiscard]] Path events() const { return root_ / "events.jsonl"; }
  [[nodiscard]] Path trace() const { return root_ / "trace.json"; }
  [[nodiscard]] Path checkpoints() const { return root_ / "checkpoints"; }
  [[nodiscard]] Path records() const { return root_ / "records"; }
  [[nodiscard]] Path records_of(WorldRank rank) const {
    return records() / fmt::format("rank-{}.jsonl", rank);
  }
  // Returns the folders of TensorBoard's events: of the run, and of a rank.
  [[nodiscard]] Path tensorboard() const { return root_ / "tensorboard"; }
  [[nodiscard]] Path tensorboard_of(WorldRank rank) const {
    return tensorboard() / fmt::format("rank-{}", rank);
  }
  [[nodiscard]] Path prometheus_of(WorldRank rank) const {
    return root_ / "metrics" / fmt::format("rank-{}.prom", rank);
  }
  // Returns the file for a run that began or was resumed at a step.
  [[nodiscard]] Path load_trace(std::int64_t first_step) const {
    return root_ / (first_step > 0 ? fmt::format("load-trace-{:08}.jsonl", first_step)
                                   : "load-trace.jsonl");
  }
  [[nodiscard]] Path lock() const { return root_ / "run.lock"; }

 private:
  Path root_;
};

}  // namespace dynmo::observe
