// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/plan.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/text.h"

namespace dynmo::plan {

Rank Plan::owner(LayerId layer) const {
  DYNMO_CHECK(layer.value >= 0 && layer.value < layers(), "a layer below {}, got {}", layers(),
              layer);
  const auto after =
      std::upper_bound(stages.begin(), stages.end(), layer,
                       [](LayerId id, const PlanStage& stage) { return id < stage.layers.first; });
  return std::prev(after)->rank;
}

std::vector<int> Plan::stages_of(Rank rank) const {
  std::vector<int> found;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    if (stages[s].rank == rank) found.push_back(static_cast<int>(s));
  }
  return found;
}

Plan make_plan(const std::vector<int>& counts, schedule::ScheduleKind schedule,
               Generation generation) {
  Plan plan{.ranks = static_cast<int>(counts.size()),
            .stages = {},
            .schedule = schedule,
            .generation = generation};
  std::int32_t first = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    DYNMO_CHECK(counts[i] >= 0, "0 or more layers on rank {}, got {}", i, counts[i]);
    if (counts[i] == 0) continue;
    plan.stages.push_back({Rank{static_cast<std::int32_t>(i)}, {LayerId{first}, counts[i]}});
    first += counts[i];
  }
  return plan;
}

Plan make_plan(const std::vector<int>& counts, const std::vector<Rank>& placement, int ranks,
               schedule::ScheduleKind schedule, Generation generation) {
  DYNMO_CHECK(counts.size() == placement.size(), "a rank for each of {} stages, got {}",
              counts.size(), placement.size());
  Plan plan{.ranks = ranks, .stages = {}, .schedule = schedule, .generation = generation};
  std::int32_t first = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    DYNMO_CHECK(counts[i] >= 0, "0 or more layers in stage {}, got {}", i, counts[i]);
    if (counts[i] == 0) continue;
    if (!plan.stages.empty() && plan.stages.back().rank == placement[i]) {
      plan.stages.back().layers.count += counts[i];
    } else {
      plan.stages.push_back({placement[i], {LayerId{first}, counts[i]}});
    }
    first += counts[i];
  }
  return plan;
}

Plan renamed(const Plan& plan, std::span<const Rank> name) {
  DYNMO_CHECK(std::cmp_equal(name.size(), plan.ranks), "names of {} ranks, got {}", plan.ranks,
              name.size());
  Plan result = plan;
  for (PlanStage& stage : result.stages) stage.rank = name[stage.rank.index()];
  for (std::size_t r = 0; r < plan.order.size(); ++r) {
    result.order[name[r].index()] = plan.order[r];
  }
  return result;
}

Expected<void> validate(const Plan& plan, int layers) {
  if (plan.ranks < 1) {
    return make_error(ErrorCode::kBadInput, "the plan has {} ranks, wanted at least one",
                      plan.ranks);
  }
  std::int64_t next = 0;  // 64 bits: the counts come from a file
  for (std::size_t s = 0; s < plan.stages.size(); ++s) {
    const PlanStage& stage = plan.stages[s];
    if (stage.rank.value < 0 || stage.rank.value >= plan.ranks) {
      return make_error(ErrorCode::kBadInput, "stage {} is on rank {}, wanted one below {}", s,
                        stage.rank, plan.ranks);
    }
    if (stage.layers.count < 1) {
      return make_error(ErrorCode::kBadInput, "stage {} has {} layers, wanted at least one", s,
                        stage.layers.count);
    }
    if (stage.layers.first.value != next) {
      return make_error(ErrorCode::kBadInput,
                        "stage {} starts at layer {}, wanted {}: stages follow one another without "
                        "gap or overlap",
                        s, stage.layers.first, next);
    }
    next += stage.layers.count;
  }
  if (next != layers) {
    return make_error(ErrorCode::kBadInput, "the plan has {} layers, wanted the model's {}", next,
                      layers);
  }
  return {};
}

Digest digest(const Plan& plan) {
  std::string text = fmt::format("dynmo-plan-1 ranks {} schedule {} generation {}", plan.ranks,
                                 schedule::name(plan.schedule), plan.generation);
  for (const PlanStage& stage : plan.stages) {
    text += fmt::format(" {}:{}+{}", stage.rank, stage.layers.first, stage.layers.count);
  }
  for (std::size_t r = 0; r < plan.order.size(); ++r) {
    text += fmt::format(" order {}", r);
    for (const schedule::Action& action : plan.order[r]) {
      text += ' ';
      text += schedule::to_string(action);
    }
  }
  return digest_of(text);
}

schedule::PipelineShape shape_of(const Plan& plan, int micro_batches, int frozen_layers) {
  schedule::PipelineShape shape;
  shape.ranks = plan.ranks;
  shape.micro_batches = micro_batches;
  for (const PlanStage& stage : plan.stages) {
    shape.stages.push_back({.rank = stage.rank, .frozen = stage.layers.end() <= frozen_layers});
  }
  return shape;
}

namespace {

// Returns the micro-batches in the order in which a stage makes the gradients of its inputs.
std::vector<MicroBatchId> gradients_of(const schedule::Schedule& made, std::size_t stage) {
  std::vector<MicroBatchId> order;
  for (const schedule::Action& action : made.ranks[made.shape.stages[stage].rank.index()]) {
    const bool makes = action.kind == schedule::ActionKind::kBackward ||
                       action.kind == schedule::ActionKind::kInputGradient;
    if (action.stage.index() == stage && makes) order.push_back(action.micro_batch);
  }
  return order;
}

// Adds the backwards that an order lacks if it was made while stages were frozen that train again.
// They come last, from the last stage on, in the order in which gradients arrive. That is correct
// but slow, and serves until the next plan.
void add_missing_backwards(schedule::Schedule& made) {
  std::vector<MicroBatchId> ascending;
  for (int m = 0; m < made.shape.micro_batches; ++m) ascending.emplace_back(m);
  std::vector<MicroBatchId> arriving = ascending;
  for (std::size_t s = made.shape.stages.size(); s-- > 0 && !made.shape.stages[s].frozen;) {
    if (gradients_of(made, s).empty()) {
      auto& actions = made.ranks[made.shape.stages[s].rank.index()];
      const auto add = [&](schedule::ActionKind kind, MicroBatchId micro_batch) {
        actions.push_back(
            {.kind = kind, .stage = StageId(static_cast<int>(s)), .micro_batch = micro_batch});
      };
      for (const MicroBatchId m : arriving) add(schedule::ActionKind::kInputGradient, m);
      for (const MicroBatchId m : ascending) add(schedule::ActionKind::kWeightGradient, m);
    }
    arriving = gradients_of(made, s);
  }
}

}  // namespace

Expected<schedule::Schedule> schedule_of(const Plan& plan, int micro_batches, int frozen_layers) {
  const schedule::PipelineShape shape = shape_of(plan, micro_batches, frozen_layers);
  if (plan.schedule != schedule::ScheduleKind::kAdaptive) {
    return schedule::make_schedule(plan.schedule, shape);
  }
  DYNMO_TRY(schedule::validate(shape));
  schedule::Schedule made{.shape = shape, .ranks = plan.order};
  std::int64_t forwards = 0;
  for (std::vector<schedule::Action>& actions : made.ranks) {
    for (const schedule::Action& action : actions) {
      const bool known = action.stage.value >= 0 && action.stage.index() < shape.stages.size() &&
                         action.micro_batch.value >= 0 && action.micro_batch.value < micro_batches;
      forwards += action.kind == schedule::ActionKind::kForward ? 1 : 0;
      if (known && schedule::is_compute(action.kind)) continue;
      return make_error(ErrorCode::kBadInput,
                        "the plan's order has {}, which is no compute action of {} stages and {} "
                        "micro-batches: make a plan for this number of micro-batches",
                        schedule::to_string(action), shape.stages.size(), micro_batches);
    }
    std::erase_if(actions, [&](const schedule::Action& action) {
      return shape.stages[action.stage.index()].frozen &&
             action.kind != schedule::ActionKind::kForward;
    });
  }
  const std::int64_t wanted = std::ssize(shape.stages) * micro_batches;
  if (forwards != wanted) {
    return make_error(ErrorCode::kBadInput,
                      "the plan's order has {} forward actions, wanted {} of {} stages and {} "
                      "micro-batches: make a plan for this number of micro-batches",
                      forwards, wanted, shape.stages.size(), micro_batches);
  }
  add_missing_backwards(made);
  return made;
}

std::string to_string(const Plan& plan) {
  std::string text;
  for (const PlanStage& stage : plan.stages) {
    if (!text.empty()) text += '|';
    text += fmt::format("{}", stage.layers.count);
  }
  return text;
}

std::string named_cut(const Plan& plan, std::span<const std::string> names) {
  constexpr std::size_t kShown = 8;
  DYNMO_CHECK(std::cmp_equal(names.size(), plan.layers()), "names of {} layers, got {}",
              plan.layers(), names.size());
  const std::size_t stages = plan.stages.size();
  const std::size_t hidden = stages > kShown ? stages - kShown : 0;
  std::string text;
  for (std::size_t s = 0; s < stages; ++s) {
    if (s > 0) text += " | ";
    if (hidden > 0 && s == kShown / 2) {
      text += fmt::format("({} more stages) | ", hidden);
      s += hidden;
    }
    const LayerRange& layers = plan.stages[s].layers;
    text += names[layers.first.index()];
    if (layers.count > 1) text += " .. " + names[static_cast<std::size_t>(layers.end() - 1)];
  }
  return text;
}

Json to_json(const Plan& plan) {
  Json stages = Json::array();
  for (std::size_t s = 0; s < plan.stages.size(); ++s) {
    const PlanStage& stage = plan.stages[s];
    stages.push_back({{"stage", s},
                      {"rank", stage.rank.value},
                      {"first_layer", stage.layers.first.value},
                      {"layers", stage.layers.count}});
  }
  Json json{{"format", "dynmo-plan-1"},
            {"schedule", schedule::name(plan.schedule)},
            {"ranks", plan.ranks},
            {"generation", plan.generation},
            {"stages", std::move(stages)}};
  if (plan.schedule != schedule::ScheduleKind::kAdaptive) return json;
  Json& order = json["order"] = Json::array();
  for (const std::vector<schedule::Action>& actions : plan.order) {
    Json& texts = order.emplace_back(Json::array());
    for (const schedule::Action& action : actions) texts.push_back(schedule::to_string(action));
  }
  return json;
}

namespace {

constexpr int kMaxRanks = 1 << 20;  // of a file: a slip of the keyboard must not allocate for it

constexpr Generation kMaxGenerations = Generation{1} << 62;  // room to count on

std::int32_t small_integer(JsonObject& object, const std::string& key) {
  const std::int64_t value = object.integer(key);
  if (value < 0 || value > std::numeric_limits<std::int32_t>::max()) {
    object.fail(key, fmt::format("is {}, wanted a whole number from 0 to 2^31 - 1", value));
    return 0;
  }
  return static_cast<std::int32_t>(value);
}

// Reads a list of action texts for each rank.
Expected<std::vector<std::vector<schedule::Action>>> parse_order(const Json& json, const Plan& plan,
                                                                 std::string_view origin) {
  const auto fault = [&](std::string_view where, std::string_view problem) {
    return make_error(ErrorCode::kBadInput, "{}: /order{} {}", origin, where, problem);
  };
  if (!json.is_array() || json.size() != static_cast<std::size_t>(plan.ranks)) {
    return fault("", fmt::format("wanted a list of actions for each of {} ranks", plan.ranks));
  }
  std::vector<std::vector<schedule::Action>> order;
  for (std::size_t r = 0; r < json.size(); ++r) {
    if (!json[r].is_array()) return fault(fmt::format("/{}", r), "wanted a list of actions");
    order.emplace_back();
    for (std::size_t i = 0; i < json[r].size(); ++i) {
      const auto action = json[r][i].is_string()
                              ? schedule::parse_action(json[r][i].get_ref<const std::string&>())
                              : Error{ErrorCode::kBadInput, "wanted an action like \"0F0\""};
      if (!action) return fault(fmt::format("/{}/{}", r, i), action.error().message);
      if (!schedule::is_compute(action->kind) || action->stage.index() >= plan.stages.size() ||
          plan.stages[action->stage.index()].rank.index() != r) {
        return fault(fmt::format("/{}/{}", r, i),
                     fmt::format("is {}, wanted F, B, I or W of a stage on rank {}",
                                 schedule::to_string(*action), r));
      }
      order.back().push_back(*action);
    }
  }
  return order;
}

}  // namespace

Expected<Plan> parse_plan(const Json& json, std::string_view origin) {
  JsonObject root(json, std::string(origin));
  root.expect_format("dynmo-plan-1");
  Plan plan;
  plan.ranks = small_integer(root, "ranks");
  if (plan.ranks > kMaxRanks) {
    root.fail("ranks", fmt::format("is {}, wanted at most {}", plan.ranks, kMaxRanks));
  }
  plan.generation = root.integer("generation", 0);
  if (plan.generation < 0 || plan.generation >= kMaxGenerations) {
    root.fail("generation", fmt::format("is {}, wanted 0 to 2^62 - 1", plan.generation));
  }
  const std::string schedule_name = root.string("schedule");
  auto stages = root.objects("stages");
  for (const char* derived :
       {"step_time_s", "ideal_step_time_s", "bottleneck_s", "peak_activation_bytes", "bubble",
        "imbalance", "balancer", "micro_batches", "migration", "order", "recomputed_layers",
        "costs", "tokens_per_s", "traffic", "advice", "joined_head"}) {
    root.ignore(derived);
  }
  DYNMO_TRY(root.finish());
  const auto kind = schedule::parse_schedule_kind(schedule_name);
  if (!kind) {
    return make_error(ErrorCode::kBadInput, "{}: /schedule: {}", origin, kind.error().message);
  }
  plan.schedule = *kind;
  std::int64_t layers = 0;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    if (small_integer(stages[s], "stage") != static_cast<std::int64_t>(s)) {
      stages[s].fail("stage", fmt::format("is out of order, wanted {}", s));
    }
    PlanStage stage;
    stage.rank = Rank{small_integer(stages[s], "rank")};
    stage.layers = {LayerId{small_integer(stages[s], "first_layer")},
                    small_integer(stages[s], "layers")};
    for (const char* derived : {"time_s", "memory_bytes", "in_flight"}) stages[s].ignore(derived);
    DYNMO_TRY(stages[s].finish());
    layers += stage.layers.count;
    plan.stages.push_back(stage);
  }
  if (layers < 1 || layers > std::numeric_limits<std::int32_t>::max()) {
    return make_error(ErrorCode::kBadInput, "{}: /stages have {} layers, wanted 1 to 2^31 - 1",
                      origin, layers);
  }
  if (const auto valid = validate(plan, static_cast<int>(layers)); !valid) {
    return make_error(ErrorCode::kBadInput, "{}: /stages: {}", origin, valid.error().message);
  }
  const auto order = json.find("order");
  if (plan.schedule == schedule::ScheduleKind::kAdaptive) {
    if (order == json.end()) {
      return make_error(ErrorCode::kBadInput,
                        "{}: /order is missing, wanted the actions of each rank, as the schedule "
                        "is adaptive",
                        origin);
    }
    DYNMO_ASSIGN(plan.order, parse_order(*order, plan, origin));
  } else if (order != json.end()) {
    return make_error(ErrorCode::kBadInput,
                      "{}: /order is given, but schedule {} makes its own: leave it out, or set "
                      "the schedule to adaptive",
                      origin, schedule_name);
  }
  return plan;
}

Expected<Plan> read_plan(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const Json json, read_json(path));
  return parse_plan(json, path.string());
}

}  // namespace dynmo::plan
