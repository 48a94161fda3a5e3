// SPDX-License-Identifier: Apache-2.0
#include "dynmo/schedule/schedule.h"

#include <algorithm>
#include <array>

#include "dynmo/core/check.h"
#include "dynmo/core/nearest.h"

namespace dynmo::schedule {
namespace {

constexpr std::array kKinds = {
    KindTraits{ScheduleKind::k1F1B, "1f1b", StageLayout::kOneARank},
    KindTraits{ScheduleKind::kGpipe, "gpipe", StageLayout::kOneARank},
    KindTraits{ScheduleKind::kZbH1, "zb-h1", StageLayout::kOneARank},
    KindTraits{ScheduleKind::kZbV, "zb-v", StageLayout::kV},
    KindTraits{ScheduleKind::kInterleaved, "interleaved", StageLayout::kLoop},
    KindTraits{ScheduleKind::kAdaptive, "adaptive", StageLayout::kAny},
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

std::span<const KindTraits> schedule_kinds() { return kKinds; }

const KindTraits& traits(ScheduleKind kind) {
  const auto found = std::ranges::find(kKinds, kind, &KindTraits::kind);
  DYNMO_CHECK(found != kKinds.end(), "a schedule kind, got {}", static_cast<int>(kind));
  return *found;
}

std::string_view name(ScheduleKind kind) { return traits(kind).name; }

Expected<ScheduleKind> parse_schedule_kind(std::string_view name) {
  std::vector<std::string> known;
  for (const KindTraits& one : kKinds) {
    if (one.name == name) return one.kind;
    known.emplace_back(one.name);
  }
  return make_error(ErrorCode::kBadInput, "'{}' is not a schedule{}", name,
                    suggestion(name, known));
}

}  // namespace dynmo::schedule
