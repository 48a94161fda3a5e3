// SPDX-License-Identifier: Apache-2.0
#include "dynmo/schedule/schedule.h"

#include <array>
#include <utility>

#include "dynmo/core/nearest.h"

namespace dynmo::schedule {
namespace {

constexpr std::array kKindNames = {
    std::pair{ScheduleKind::kGpipe, std::string_view("gpipe")},
    std::pair{ScheduleKind::k1F1B, std::string_view("1f1b")},
    std::pair{ScheduleKind::kInterleaved, std::string_view("interleaved")},
    std::pair{ScheduleKind::kZbH1, std::string_view("zb-h1")},
    std::pair{ScheduleKind::kZbV, std::string_view("zb-v")},
    std::pair{ScheduleKind::kAdaptive, std::string_view("adaptive")},
};

}  // namespace

bool is_compute(ActionKind kind) { return kind <= ActionKind::kWeightGradient; }

Expected<void> validate(const PipelineShape& shape) {
  if (shape.ranks < 1) {
    return make_error(ErrorCode::kBadInput, "a pipeline of {} ranks; want at least 1", shape.ranks);
  }
  if (shape.micro_batches < 1) {
    return make_error(ErrorCode::kBadInput, "{} micro-batches; want at least 1",
                      shape.micro_batches);
  }
  if (shape.stages.empty()) {
    return make_error(ErrorCode::kBadInput, "a pipeline without stages; want at least 1");
  }
  const std::size_t limit = kMaxStageMicroBatches / static_cast<std::size_t>(shape.micro_batches);
  if (shape.stages.size() > limit) {
    return make_error(ErrorCode::kBadInput, "{} stages x {} micro-batches; want a product up to {}",
                      shape.stages.size(), shape.micro_batches, kMaxStageMicroBatches);
  }
  bool trained = false;
  for (std::size_t s = 0; s < shape.stages.size(); ++s) {
    const StageShape& stage = shape.stages[s];
    if (stage.rank.value < 0 || stage.rank.value >= shape.ranks) {
      return make_error(ErrorCode::kBadInput, "stage {} is on rank {}; want a rank below {}", s,
                        stage.rank, shape.ranks);
    }
    if (stage.frozen && trained) {
      return make_error(ErrorCode::kBadInput,
                        "stage {} is frozen but stage {} before it is not; only the first stages "
                        "of a model can be frozen",
                        s, s - 1);
    }
    trained = !stage.frozen;
  }
  return {};
}

std::string_view name(ScheduleKind kind) {
  for (const auto& [known, text] : kKindNames) {
    if (known == kind) return text;
  }
  return "unknown";
}

Expected<ScheduleKind> parse_schedule_kind(std::string_view name) {
  std::vector<std::string> known;
  for (const auto& [kind, text] : kKindNames) {
    if (text == name) return kind;
    known.emplace_back(text);
  }
  return make_error(ErrorCode::kBadInput, "'{}' is not a schedule{}", name,
                    suggestion(name, known));
}

}  // namespace dynmo::schedule
