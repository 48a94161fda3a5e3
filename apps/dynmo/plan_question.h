// SPDX-License-Identifier: Apache-2.0
#pragma once

// The question that `dynmo plan` answers, read from its flags and their files.

#include <cstdint>
#include <optional>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/plan/question/question.h"

namespace dynmo::app {

// Defaults of a plan, if neither a flag nor a config sets a value.
inline constexpr std::int64_t kMicroBatches = 32;
inline constexpr const char* kBalancer = "search";
inline constexpr const char* kSchedule = "auto";

struct PlanFlags {
  std::optional<std::string> profile;
  std::optional<std::string> model;
  std::optional<std::string> config;
  std::optional<std::string> device;
  std::optional<std::int64_t> sequence;
  std::optional<std::int64_t> micro_batch_size;
  std::optional<std::int64_t> head_slices;
  std::optional<std::int64_t> tensor_parallel;
  std::optional<std::int64_t> optimizer_shards;
  std::optional<std::int64_t> ranks;
  std::optional<std::string> memory;
  std::optional<std::string> cluster;
  std::optional<double> head_room;
  std::optional<std::int64_t> micro_batches;
  std::optional<std::string> balancer;
  std::optional<std::string> schedule;
  std::optional<std::string> recompute;
  std::optional<std::string> from;
  bool place = false;
  bool pack = false;
  std::optional<double> slack;
  std::optional<std::int64_t> evaluations;
  std::optional<std::string> out;
  std::optional<std::string> trace;
  std::optional<std::string> granularity;
  std::optional<std::string> emit;
  std::optional<std::string> emit_to;
  bool json = false;
};

// Reads the question. Returns kBadInput with the flag or the file.
[[nodiscard]] Expected<plan::Question> read_question(const PlanFlags& flags);

}  // namespace dynmo::app
