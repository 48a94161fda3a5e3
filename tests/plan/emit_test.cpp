// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/question/emit.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/question/question.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/csv.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/lowering.h"
#include "tests/plan/cuts.h"
#include "tests/support/samples.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

cost::ModelCost blocks_model(int blocks, int frozen = 0) {
  cost::ModelCost model = equal_model(blocks + 2, 1e-3);
  model.layers.front().name = "embedding";
  for (int block = 0; block < blocks; ++block) {
    model.layers[static_cast<std::size_t>(block) + 1].name = fmt::format("blocks.{}", block);
  }
  model.layers.back().name = "head";
  for (int i = 0; i < frozen; ++i) model.layers[static_cast<std::size_t>(i)].frozen = true;
  return model;
}

std::string text_of_file(const Emitted& emitted, std::string_view name) {
  const auto file = std::ranges::find(emitted.files, name, &EmittedFile::name);
  return file == emitted.files.end() ? "" : file->text;
}

std::string refusal(EmitForm form, const Plan& plan, const cost::ModelCost& model) {
  const auto checked = check_emit(form, {.plan = plan, .model = model, .micro_batches = 4});
  if (checked) return "";
  EXPECT_EQ(checked.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(checked.error().message.find('\n'), std::string::npos);
  return checked.error().message;
}

TEST(Emit, WritesTorchtitansKeysAsJsonAndAsFlags) {
  const cost::ModelCost model = blocks_model(3);
  const Plan plan = make_plan({2, 3}, ScheduleKind::k1F1B);
  const auto emitted = emit(EmitForm::kTorchtitan,
                            {.plan = plan, .model = model, .micro_batches = 2}, "some/folder");
  ASSERT_TRUE(emitted) << emitted.error().message;
  const Json keys = Json::parse(text_of_file(*emitted, "torchtitan.json"))["parallelism"];
  EXPECT_EQ(keys["pipeline_parallel_degree"], 2);
  EXPECT_EQ(keys["pipeline_parallel_schedule"], "1F1B");
  EXPECT_EQ(keys["pipeline_parallel_schedule_csv"], "some/folder/schedule.csv");
  EXPECT_EQ(keys["module_fqns_per_model_part"].dump(),
            R"([["tok_embeddings","layers.0"],["layers.1","layers.2","norm","lm_head"]])");
  EXPECT_EQ(text_of_file(*emitted, "torchtitan.args"),
            "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule "
            "1F1B --parallelism.pipeline_parallel_schedule_csv some/folder/schedule.csv "
            "--parallelism.module_fqns_per_model_part tok_embeddings,layers.0 "
            "layers.1,layers.2,norm,lm_head\n");
  EXPECT_EQ(text_of_file(*emitted, "schedule.csv"), "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n");
  EXPECT_EQ(emitted->note, "for 2 micro-batches a step");
}

TEST(Emit, KeepsTheNamesOfModules) {
  cost::ModelCost model = blocks_model(2);
  const Plan plan = make_plan({2, 2}, ScheduleKind::kGpipe);
  EmitProblem problem{.plan = plan, .model = model, .micro_batches = 2};
  problem.names = ModuleNames::kKept;
  const auto kept = emit(EmitForm::kTorchtitan, problem, ".");
  ASSERT_TRUE(kept);
  EXPECT_NE(text_of_file(*kept, "torchtitan.args").find(" embedding,blocks.0 blocks.1,head\n"),
            std::string::npos);
  model.layers[0].name = "wte";
  problem.names = ModuleNames::kTranslated;
  const auto others = emit(EmitForm::kTorchtitan, problem, ".");
  ASSERT_TRUE(others);
  EXPECT_NE(text_of_file(*others, "torchtitan.args").find(" GPipe "), std::string::npos);
  EXPECT_NE(text_of_file(*others, "torchtitan.args").find(" wte,blocks.0 "), std::string::npos);
}

TEST(Emit, WritesMegatronsLayoutInOrderOfStages) {
  const cost::ModelCost model = blocks_model(6);
  const Plan loop =
      make_plan({3, 1, 2, 2}, schedule::loop_placement(2, 2), 2, ScheduleKind::kInterleaved);
  const auto emitted =
      emit(EmitForm::kMegatron, {.plan = loop, .model = model, .micro_batches = 4}, ".");
  ASSERT_TRUE(emitted) << emitted.error().message;
  EXPECT_EQ(text_of_file(*emitted, "megatron.args"),
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|t|tt|tL\n");
}

TEST(Emit, SaysWhatRecomputationNeedsOfOthers) {
  const cost::ModelCost model = blocks_model(2);
  const Plan plan = make_plan({2, 2}, ScheduleKind::k1F1B);
  const auto emitted =
      emit(EmitForm::kMegatron,
           {.plan = plan, .model = model, .micro_batches = 1, .recomputed = {LayerId{1}}}, ".");
  ASSERT_TRUE(emitted);
  EXPECT_EQ(emitted->note,
            "for 1 micro-batch a step; the plan recomputes 1 of 4 layers, which Megatron-Core has "
            "other keys for");
}

TEST(Emit, RefusesWhatAFormCannotSayByName) {
  const cost::ModelCost model = blocks_model(6);
  cost::ModelCost halves = blocks_model(6);
  halves.layers[3].name = "blocks.2.attention";
  halves.layers[4].name = "blocks.2.mlp";
  cost::ModelCost sliced = blocks_model(6);
  sliced.layers[6].name = "head.0 of 2";
  sliced.layers[7].name = "head.1 of 2";
  cost::ModelCost other = blocks_model(6);
  other.layers[2].name = "norm";
  const Plan even = make_plan({4, 4}, ScheduleKind::k1F1B);
  const Plan uneven = make_plan({7, 1}, ScheduleKind::k1F1B);
  const Plan idle = make_plan({4, 0, 4}, ScheduleKind::k1F1B);
  const Plan zb = make_plan({4, 4}, ScheduleKind::kZbH1);
  Plan swapped = even;
  std::swap(swapped.stages[0].rank, swapped.stages[1].rank);
  Plan adaptive = even;
  adaptive.schedule = ScheduleKind::kAdaptive;
  const Plan unlike =
      make_plan({2, 2, 2, 2}, {Rank{0}, Rank{1}, Rank{2}, Rank{0}}, 3, ScheduleKind::kAdaptive);
  const Plan wave =
      make_plan(std::vector<int>(8, 1), schedule::wave_placement(2, 4), 2, ScheduleKind::kAdaptive);
  const auto titan = EmitForm::kTorchtitan;
  const auto megatron = EmitForm::kMegatron;
  const auto csv = EmitForm::kCsv;
  struct Case {
    EmitForm form;
    const Plan& plan;
    const cost::ModelCost& model;
    std::string wanted;
  };
  const cost::ModelCost frozen = blocks_model(6, 4);
  for (const Case& one : std::vector<Case>{
           {titan, even, halves, "share a block ('blocks.2.attention' | 'blocks.2.mlp')"},
           {megatron, even, halves, "plan with granularity block"},
           {titan, uneven, sliced, "share the head"},
           {titan, idle, model,
            "rank 1 of 3 is idle, and torchtitan gives every rank a stage: "
            "plan for 2 ranks"},
           {megatron, idle, model, "rank 1 of 3 is idle"},
           {csv, idle, model, "rank 1 of 3 is idle, and torch.distributed.pipelining"},
           {titan, even, frozen, "stage 0 is frozen and has no backward"},
           {megatron, even, frozen, "stage 0 is frozen"},
           {csv, even, frozen, "wanted a layer that trains in each stage"},
           {titan, unlike, model, "rank 0 has 2 stages and rank 1 has 1"},
           {titan, wave, model, "plan with schedule 1f1b, interleaved, zb-h1 or zb-v"},
           {titan, swapped, model, "stages lie on ranks 1 0, and torchtitan puts stage s on"},
           {megatron, swapped, model, "without place"},
           {megatron, adaptive, model, "Megatron-Core has no schedule adaptive"},
           {megatron, zb, model, "plan with schedule 1f1b or interleaved"},
           {megatron, even, other, "layer 2 is called 'norm'"},
       }) {
    EXPECT_NE(refusal(one.form, one.plan, one.model).find(one.wanted), std::string::npos)
        << "wanted " << one.wanted << ", got " << refusal(one.form, one.plan, one.model);
  }
  EXPECT_EQ(refusal(csv, even, halves), "");
  EXPECT_EQ(refusal(csv, unlike, model), "");
  EXPECT_EQ(refusal(titan, zb, model), "");
  const auto form = parse_emit_form("torchtian");
  ASSERT_FALSE(form);
  EXPECT_EQ(form.error().message,
            "form 'torchtian' is not known, did you mean 'torchtitan'?: wanted torchtitan, "
            "megatron, csv");
}

// The cut of the keys, the cut of the plan, and an order that completes on the stages of the keys.
TEST(Emit, IsFoundByASearchForWhatAFormCanSay) {
  int with_v = 0;
  for (std::uint64_t seed = 0; seed < samples(40U); ++seed) {
    Rng rng(mix_key({0xE417, seed}));
    const int ranks = pick(rng, 2, 4);
    Question question;
    question.model = blocks_model(pick(rng, 2 * ranks, 20));
    for (cost::LayerCost& layer : question.model.layers) {
      layer.forward_s *= 0.2 + rng.uniform();
      layer.backward_weight_s *= 0.2 + rng.uniform();
    }
    question.cluster = cost::equal_ranks(ranks);
    question.micro_batches = ranks * pick(rng, 1, 4);
    question.form = seed % 2 == 0 ? EmitForm::kTorchtitan : EmitForm::kMegatron;
    question.evaluations = 200;
    const auto given = answer(question);
    ASSERT_TRUE(given) << given.error().message;
    const auto emitted = emit(*question.form, emit_problem(question, *given), ".");
    ASSERT_TRUE(emitted) << emitted.error().message;
    if (question.form == EmitForm::kMegatron) continue;
    const Json keys = Json::parse(text_of_file(*emitted, "torchtitan.json"))["parallelism"];
    const Json& parts = keys["module_fqns_per_model_part"];
    std::vector<std::string> modules;
    for (const Json& part : parts) {
      EXPECT_FALSE(part.empty());
      for (const Json& module : part) modules.push_back(module);
    }
    EXPECT_EQ(std::ssize(modules), question.model.size() + 1);
    EXPECT_EQ(std::set(modules.begin(), modules.end()).size(), modules.size());
    EXPECT_EQ(parts.size() % static_cast<std::size_t>(ranks), 0U);
    const bool v = keys["pipeline_parallel_schedule"] == "ZBVZeroBubble";
    with_v += v ? 1 : 0;
    const auto read = schedule::read_csv(text_of_file(*emitted, "schedule.csv"), "schedule.csv");
    ASSERT_TRUE(read) << read.error().message;
    const auto& stages = read->schedule.shape.stages;
    ASSERT_EQ(stages.size(), parts.size());
    const std::vector<Rank> placement =
        v ? schedule::wave_placement(ranks, 2)
          : schedule::loop_placement(ranks, static_cast<int>(parts.size()) / ranks);
    for (std::size_t s = 0; s < stages.size(); ++s) EXPECT_EQ(stages[s].rank, placement[s]);
    const auto checked = schedule::check(schedule::lower(read->schedule));
    EXPECT_TRUE(checked) << checked.error().message << ", seed " << seed;
  }
  EXPECT_GT(with_v, 0) << "no V was drawn";
}

TEST(Emit, IsRefusedWhereAScheduleOrPackingWasAskedFor) {
  Question question;
  question.model = blocks_model(8);
  question.cluster = cost::equal_ranks(4);
  question.micro_batches = 8;
  question.form = EmitForm::kMegatron;
  question.evaluations = 20;
  question.schedule = ScheduleKind::kZbV;
  const auto schedule = answer(question);
  ASSERT_FALSE(schedule);
  EXPECT_NE(schedule.error().message.find("no schedule zb-v"), std::string::npos)
      << schedule.error().message;
  question.schedule = ScheduleKind::k1F1B;
  question.pack = true;
  question.slack = 9;
  const auto packed = answer(question);
  ASSERT_FALSE(packed);
  EXPECT_NE(packed.error().message.find("is idle"), std::string::npos) << packed.error().message;
}

// Megatron-Core 0.16: heads, columns and tokens are multiples of the devices, and key-value heads a
// multiple or a divisor.
TEST(Emit, IsRefusedForSizesThatMegatronCannotDivide) {
  const auto divides = [](const cost::DecoderShape& shape, std::int64_t devices) {
    const bool groups = shape.kv_heads % devices == 0 || devices % shape.kv_heads == 0;
    return groups && shape.heads % devices == 0 && shape.intermediate % devices == 0 &&
           shape.sequence % devices == 0;
  };
  const cost::ModelCost model = blocks_model(6);
  const Plan plan = make_plan({4, 4}, ScheduleKind::k1F1B);
  int refused = 0;
  for (std::uint64_t seed = 0; seed < samples(400U); ++seed) {
    Rng rng(mix_key({0x3E6A, seed}));
    cost::DecoderShape shape;
    shape.kv_heads = pick(rng, 1, 8);
    shape.heads = shape.kv_heads * pick(rng, 1, 8);
    shape.intermediate = 4 * pick(rng, 1, 60);
    shape.sequence = 2 * pick(rng, 1, 60);
    const std::int64_t devices = pick(rng, 1, 8);
    const EmitProblem problem{
        .plan = plan, .model = model, .parallelism = {.tensor = devices}, .shape = shape};
    const auto checked = check_emit(EmitForm::kMegatron, problem);
    ASSERT_EQ(checked.has_value(), divides(shape, devices)) << "seed " << seed;
    EXPECT_TRUE(check_emit(EmitForm::kTorchtitan, problem));
    if (checked) continue;
    ++refused;
    const std::string& text = checked.error().message;
    const std::int64_t other = std::stoll(text.substr(text.rfind(' ')));
    EXPECT_TRUE(other < devices && divides(shape, other)) << text;
  }
  EXPECT_GT(4 * refused, samples(400));
  cost::DecoderShape qwen;  // of Qwen2.5 0.5B
  qwen.heads = 14;
  qwen.kv_heads = 2;
  qwen.intermediate = 4864;
  qwen.sequence = 4095;
  const auto text = [&](std::int64_t devices) {
    const auto checked = check_divided(EmitForm::kMegatron, qwen, {.tensor = devices});
    return checked ? "" : checked.error().message;
  };
  EXPECT_EQ(text(7),
            "megatron: tensor_parallel is 7, and Megatron-Core cannot divide 2 key-value heads "
            "evenly by it: plan with tensor_parallel 1");
  EXPECT_EQ(text(2),
            "megatron: tensor_parallel is 2, and Megatron-Core cannot divide 4095 tokens of a "
            "sequence evenly by it: plan with tensor_parallel 1");
  qwen.sequence = 4096;
  EXPECT_EQ(text(2), "");
}

}  // namespace
}  // namespace dynmo::plan
