// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/question/emit.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <optional>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/files.h"
#include "dynmo/core/nearest.h"
#include "dynmo/cost/blocks.h"
#include "dynmo/plan/pack.h"
#include "dynmo/plan/question/emit_impl.h"
#include "dynmo/schedule/csv.h"
#include "dynmo/schedule/generate.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

std::string counted(std::int64_t number, std::string_view noun) {
  return fmt::format("{} {}{}", number, noun, number == 1 ? "" : "s");
}

struct FormName {
  EmitForm form;
  std::string_view name;
  std::string_view reader;  // the program that reads it
};
constexpr const char* kTorchtitanJson = "torchtitan.json";
constexpr const char* kTorchtitanArgs = "torchtitan.args";
constexpr const char* kMegatronArgs = "megatron.args";
constexpr const char* kCsvFile = "schedule.csv";

constexpr std::array kForms = {EmitForm::kTorchtitan, EmitForm::kMegatron, EmitForm::kCsv};
constexpr std::array<FormName, 3> kNames = {
    {{EmitForm::kTorchtitan, "torchtitan", "torchtitan"},
     {EmitForm::kMegatron, "megatron", "Megatron-Core"},
     {EmitForm::kCsv, "csv", "torch.distributed.pipelining"}}};

std::string_view reader(EmitForm form) { return kNames[static_cast<std::size_t>(form)].reader; }

template <class... Args>
Error cannot(EmitForm form, fmt::format_string<Args...> text, Args&&... args) {
  return make_error(ErrorCode::kBadInput, "{}: {}", name(form),
                    fmt::format(text, std::forward<Args>(args)...));
}

// Returns whether the layers have DynMo's names, from the embedding to the head.
bool has_own_names(const cost::ModelCost& model) {
  return std::ranges::all_of(model.layers, [](const cost::LayerCost& layer) {
    const std::string_view module = cost::module_of(layer.name);
    return module == "embedding" || module == "head" || cost::is_block(module);
  });
}

// Returns the modules of a stage, each once, by DynMo's names.
std::vector<std::string> modules_of(const LayerRange& layers, const cost::ModelCost& model) {
  std::vector<std::string> modules;
  for (int i = layers.first.value; i < layers.end(); ++i) {
    const std::string_view module = cost::module_of(model.layers[static_cast<std::size_t>(i)].name);
    if (modules.empty() || modules.back() != module) modules.emplace_back(module);
  }
  return modules;
}

Expected<void> check_whole(EmitForm form, const EmitProblem& problem) {
  const auto& stages = problem.plan.stages;
  for (std::size_t s = 1; s < stages.size(); ++s) {
    const LayerId first = stages[s].layers.first;
    const std::string& before = problem.model.layers[first.index() - 1].name;
    const std::string& after = problem.model.layers[first.index()].name;
    const std::string_view module = cost::module_of(after);
    if (cost::module_of(before) != module) continue;
    if (module == "head") {
      return cannot(form,
                    "stages {} and {} share the head ('{}' | '{}'), and {} places it whole: plan "
                    "with granularity block, which joins its slices",
                    s - 1, s, before, after, reader(form));
    }
    return cannot(form,
                  "stages {} and {} share a block ('{}' | '{}'), and {} places whole blocks: plan "
                  "with granularity block",
                  s - 1, s, before, after, reader(form));
  }
  return {};
}

Expected<void> check_idle(EmitForm form, const Plan& plan) {
  const std::vector<Rank> used = ranks_at_work(plan);
  for (std::size_t r = 0; r < static_cast<std::size_t>(plan.ranks); ++r) {
    if (r < used.size() && used[r].index() == r) continue;
    return cannot(form, "rank {} of {} is idle, and {} gives every rank a stage: plan for {}", r,
                  plan.ranks, reader(form), counted(std::ssize(used), "rank"));
  }
  return {};
}

Expected<void> check_frozen(EmitForm form, const EmitProblem& problem) {
  const int frozen = problem.model.frozen_layers();
  for (std::size_t s = 0; s < problem.plan.stages.size(); ++s) {
    if (problem.plan.stages[s].layers.end() > frozen) continue;
    return cannot(form,
                  "stage {} is frozen and has no backward, and {} wants one of every stage: wanted "
                  "a layer that trains in each stage",
                  s, reader(form));
  }
  return {};
}

Expected<void> check_equal_stages(EmitForm form, const Plan& plan) {
  const std::size_t first = plan.stages_of(Rank{0}).size();
  for (int r = 1; r < plan.ranks; ++r) {
    const std::size_t here = plan.stages_of(Rank{r}).size();
    if (here == first) continue;
    return cannot(
        form,
        "rank 0 has {} and rank {} has {}, and {} gives every rank as many: plan with "
        "schedule {}",
        counted(static_cast<std::int64_t>(first), "stage"), r, here, reader(form),
        form == EmitForm::kMegatron ? "1f1b or interleaved" : "1f1b, interleaved, zb-h1 or zb-v");
  }
  return {};
}

std::vector<Rank> placement_of(const Plan& plan) {
  std::vector<Rank> ranks;
  for (const PlanStage& stage : plan.stages) ranks.push_back(stage.rank);
  return ranks;
}

bool is_loop(const Plan& plan) {
  const int laps = static_cast<int>(plan.stages.size()) / plan.ranks;
  return placement_of(plan) == schedule::loop_placement(plan.ranks, laps);
}

bool is_v(const Plan& plan) {
  return std::ssize(plan.stages) == std::int64_t{2} * plan.ranks &&
         placement_of(plan) == schedule::wave_placement(plan.ranks, 2);
}

Expected<void> check_placement(EmitForm form, const Plan& plan) {
  if (is_loop(plan) || (form == EmitForm::kTorchtitan && is_v(plan))) return {};
  std::string ranks;
  for (std::size_t s = 0; s < std::min<std::size_t>(plan.stages.size(), 8); ++s) {
    ranks += fmt::format("{}{}", s == 0 ? "" : " ", plan.stages[s].rank);
  }
  if (plan.stages.size() > 8) ranks += " ...";
  return cannot(
      form,
      "stages lie on ranks {}, and {} puts stage s on rank s mod {}{}: plan with "
      "schedule {} and without place",
      ranks, reader(form), plan.ranks, form == EmitForm::kMegatron ? "" : ", or two a rank in a V",
      form == EmitForm::kMegatron ? "1f1b or interleaved" : "1f1b, interleaved, zb-h1 or zb-v");
}

// A size and its noun, or none if all sizes can be divided.
std::optional<std::pair<std::int64_t, std::string_view>> undivided(const cost::DecoderShape& shape,
                                                                   std::int64_t devices) {
  const bool groups = shape.kv_heads > 0 && devices % shape.kv_heads == 0;  // share a head
  for (const auto& [size, noun] :
       {std::pair<std::int64_t, std::string_view>(shape.heads, "attention heads"),
        {groups ? 0 : shape.kv_heads, "key-value heads"},
        {shape.intermediate, "columns of an MLP"},
        {shape.sequence, "tokens of a sequence"}}) {
    if (size % devices != 0) return std::pair(size, noun);
  }
  return std::nullopt;
}

Expected<void> check_megatron(const EmitProblem& problem) {
  DYNMO_TRY(check_divided(EmitForm::kMegatron, problem.shape, problem.parallelism));
  const Plan& plan = problem.plan;
  const bool one = std::ssize(plan.stages) == plan.ranks;
  if (plan.schedule != ScheduleKind::k1F1B && plan.schedule != ScheduleKind::kInterleaved) {
    return cannot(EmitForm::kMegatron,
                  "Megatron-Core has no schedule {}, it runs 1F1B with one stage a rank and "
                  "interleaved 1F1B with several: plan with schedule 1f1b or interleaved",
                  schedule::name(plan.schedule));
  }
  DYNMO_CHECK(one || plan.schedule == ScheduleKind::kInterleaved, "1F1B has one stage a rank");
  int blocks = 0;
  const auto& layers = problem.model.layers;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const std::string_view module = cost::module_of(layers[i].name);
    const bool known = i == 0                   ? module == "embedding"
                       : cost::is_block(module) ? true
                                                : module == "head";
    blocks += cost::is_block(module) ? 1 : 0;
    if (known) continue;
    return cannot(EmitForm::kMegatron,
                  "layer {} is called '{}', and a layout has an embedding, blocks.N and a head: "
                  "wanted a profile or a config of such a model",
                  i, layers[i].name);
  }
  if (blocks > 0 && cost::module_of(layers.back().name) == "head") return {};
  return cannot(EmitForm::kMegatron,
                "the last layer is called '{}', and a layout ends with the loss: wanted 'head'",
                layers.back().name);
}

Json torchtitan_keys(const Plan& plan, const EmitProblem& problem,
                     const std::filesystem::path& csv) {
  const cost::ModelCost& model = problem.model;
  const bool own = problem.names == ModuleNames::kTranslated && has_own_names(model);
  Json parts = Json::array();
  for (const PlanStage& stage : plan.stages) {
    Json part = Json::array();
    for (const std::string& module : modules_of(stage.layers, model)) {
      if (!own) {
        part.push_back(module);
      } else if (module == "embedding") {
        part.push_back("tok_embeddings");
      } else if (module == "head") {
        part.push_back("norm");
        part.push_back("lm_head");
      } else {
        part.push_back("layers." + module.substr(module.find('.') + 1));
      }
    }
    parts.push_back(std::move(part));
  }
  std::string_view schedule = "Interleaved1F1B";
  if (is_v(plan)) schedule = "ZBVZeroBubble";
  if (std::ssize(plan.stages) == plan.ranks) {
    schedule = plan.schedule == ScheduleKind::kGpipe ? "GPipe" : "1F1B";
  }
  Json keys = {{"pipeline_parallel_degree", plan.ranks},
               {"pipeline_parallel_schedule", schedule},
               {"pipeline_parallel_schedule_csv", csv.lexically_normal().string()},
               {"module_fqns_per_model_part", std::move(parts)}};
  if (problem.parallelism.tensor > 1) {
    keys["tensor_parallel_degree"] = problem.parallelism.tensor;
  }
  return keys;
}

// Returns flags for torchtitan's command line. A stage is one word of modules with commas between.
std::string torchtitan_args(const Json& keys) {
  std::string text;
  for (const auto& [key, value] : keys.items()) {
    text += fmt::format("{}--parallelism.{}", text.empty() ? "" : " ", key);
    if (!value.is_array()) {
      text += ' ' + (value.is_string() ? value.get<std::string>() : value.dump());
      continue;
    }
    for (const Json& part : value) {
      std::string word;
      for (const Json& module : part) {
        word += (word.empty() ? "" : ",") + module.get<std::string>();
      }
      text += ' ' + word;
    }
  }
  return text + '\n';
}

std::string megatron_args(const Plan& plan, const EmitProblem& problem) {
  std::string layout;
  for (const PlanStage& stage : plan.stages) {
    if (stage.layers.first.value > 0) layout += '|';
    for (const std::string& module : modules_of(stage.layers, problem.model)) {
      layout += module == "embedding" ? 'E' : module == "head" ? 'L' : 't';
    }
  }
  std::string text = fmt::format(
      "--pipeline-model-parallel-size {} --pipeline-model-parallel-layout {}", plan.ranks, layout);
  const cost::Parallelism& parallelism = problem.parallelism;
  if (parallelism.tensor > 1) {
    text += fmt::format(" --tensor-model-parallel-size {} --sequence-parallel", parallelism.tensor);
  }
  if (parallelism.optimizer_shards > 1) text += " --use-distributed-optimizer";
  return text + '\n';
}

std::string note_of(EmitForm form, const EmitProblem& problem) {
  std::string text = fmt::format("for {} micro-batch{} a step", problem.micro_batches,
                                 problem.micro_batches == 1 ? "" : "es");
  if (problem.recomputed.empty()) return text;
  return text + fmt::format("; the plan recomputes {} of {} layers, which {} has other keys for",
                            problem.recomputed.size(), problem.model.size(), reader(form));
}

}  // namespace

std::span<const EmitForm> emit_forms() { return kForms; }

std::string_view name(EmitForm form) { return kNames[static_cast<std::size_t>(form)].name; }

Expected<EmitForm> parse_emit_form(std::string_view text) {
  std::vector<std::string> known;
  for (const EmitForm form : kForms) {
    if (name(form) == text) return form;
    known.emplace_back(name(form));
  }
  return make_error(ErrorCode::kBadInput, "form '{}' is not known{}: wanted {}", text,
                    suggestion(text, known), fmt::join(known, ", "));
}

bool takes_whole_blocks(EmitForm form) { return form != EmitForm::kCsv; }

Expected<void> check_divided(EmitForm form, const cost::DecoderShape& shape,
                             const cost::Parallelism& parallelism) {
  const std::int64_t devices = parallelism.tensor;
  const auto rest = undivided(shape, devices);
  if (form != EmitForm::kMegatron || !rest) return {};
  std::int64_t fewer = devices - 1;
  while (undivided(shape, fewer)) --fewer;
  return cannot(form,
                "tensor_parallel is {}, and Megatron-Core cannot divide {} {} evenly by it: plan "
                "with tensor_parallel {}",
                devices, rest->first, rest->second, fewer);
}

Expected<void> check_emit(EmitForm form, const EmitProblem& problem) {
  if (takes_whole_blocks(form)) DYNMO_TRY(check_whole(form, problem));
  DYNMO_TRY(check_idle(form, problem.plan));
  DYNMO_TRY(check_frozen(form, problem));
  if (form == EmitForm::kCsv) return {};
  if (form == EmitForm::kMegatron) DYNMO_TRY(check_megatron(problem));
  const Plan plan = form == EmitForm::kTorchtitan
                        ? internal::with_whole_v(problem.plan, problem.model)
                        : problem.plan;
  DYNMO_TRY(check_equal_stages(form, plan));
  return check_placement(form, plan);
}

std::vector<std::string_view> emitted_names(EmitForm form) {
  switch (form) {
    case EmitForm::kTorchtitan:
      return {kTorchtitanJson, kTorchtitanArgs, kCsvFile};
    case EmitForm::kMegatron:
      return {kMegatronArgs};
    case EmitForm::kCsv:
      return {kCsvFile};
  }
  DYNMO_CHECK(false, "a form, got {}", static_cast<int>(form));
}

Expected<Emitted> emit(EmitForm form, const EmitProblem& problem,
                       const std::filesystem::path& folder) {
  DYNMO_TRY(check_emit(form, problem));
  if (form == EmitForm::kTorchtitan &&
      folder.string().find_first_of(" \t\n*?[") != std::string::npos) {
    return make_error(
        ErrorCode::kBadInput,
        "torchtitan: its files are to be in '{}', wanted a folder without blanks, *, ? "
        "and [, where a shell divides `$(cat {})`",
        folder.string(), kTorchtitanArgs);
  }
  Emitted emitted{.files = {}, .note = note_of(form, problem)};
  if (form == EmitForm::kMegatron) {
    emitted.files.push_back({kMegatronArgs, megatron_args(problem.plan, problem)});
    return emitted;
  }
  DYNMO_ASSIGN(schedule::Schedule order,
               schedule_of(problem.plan, problem.micro_batches, problem.model.frozen_layers()));
  if (form == EmitForm::kTorchtitan) {
    const Plan plan = internal::with_whole_v(problem.plan, problem.model);
    if (plan.stages.size() > problem.plan.stages.size()) {
      order = internal::with_split_stage(std::move(order), problem.plan.ranks - 1);
    }
    const Json keys = torchtitan_keys(plan, problem, folder / kCsvFile);
    emitted.files.push_back({kTorchtitanJson, Json{{"parallelism", keys}}.dump(1) + "\n"});
    emitted.files.push_back({kTorchtitanArgs, torchtitan_args(keys)});
  }
  emitted.files.push_back({kCsvFile, schedule::write_csv(order)});
  return emitted;
}

Expected<void> write_emitted(const Emitted& emitted, const std::filesystem::path& folder) {
  DYNMO_TRY(make_directories(folder));
  for (const EmittedFile& file : emitted.files) {
    DYNMO_TRY(write_file_durably(folder / file.name, file.text));
  }
  return {};
}

}  // namespace dynmo::plan
