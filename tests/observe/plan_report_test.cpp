// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/plan_report.h"

#include <gtest/gtest.h>

namespace dynmo::observe {
namespace {

cost::ModelCost four_layers() {
  cost::ModelCost model;
  for (int i = 0; i < 4; ++i) {
    cost::LayerCost layer;
    layer.name = fmt::format("block{}", i);
    layer.forward_s = layer.backward_input_s = layer.backward_weight_s = i < 2 ? 1e-3 : 2e-3;
    layer.parameter_bytes = Bytes{1 << 20};
    layer.activation_bytes = Bytes{1 << 10};
    model.layers.push_back(layer);
  }
  return model;
}

struct Planned {
  cost::ModelCost model = four_layers();
  cost::Cluster cluster = cost::equal_ranks(2, Bytes{1 << 23});
  plan::Plan plan = plan::make_plan({3, 1}, schedule::ScheduleKind::k1F1B);
  plan::Plan before = plan::make_plan({2, 2}, schedule::ScheduleKind::k1F1B);
  plan::Evaluation evaluation = *plan::evaluate(plan, {model, cluster, 2}, {.timeline = true});

  [[nodiscard]] PlanReport report() const {
    return {.model = model,
            .cluster = cluster,
            .micro_batches = 2,
            .plan = plan,
            .evaluation = evaluation,
            .made_by = "balancer optimal",
            .compared = {{.name = "uniform 1f1b",
                          .evaluation = *plan::evaluate(before, {model, cluster, 2})}},
            .migration = plan::difference(before, plan, model)};
  }
};

TEST(PlanReport, SaysWhatAPlanIs) {
  const Planned planned;
  EXPECT_EQ(plan_report(planned.report(), {.width = 60, .ascii = true}),
            "4 layers on 2 ranks, 2 micro-batches; schedule 1f1b; balancer optimal\n"
            "\n"
            "  stage  rank  layers  named                 time   memory  in flight\n"
            "      0     0  0-2     block0 .. block2  12.00 ms  3.0 MiB          2\n"
            "      1     1  3       block3             6.00 ms  1.0 MiB          1\n"
            "\n"
            "cut             block0 .. block2 | block3\n"
            "step time       26.00 ms, 1.444 x ideal\n"
            "  uniform 1f1b  30.00 ms, 1.667 x ideal\n"
            "  ideal         18.00 ms = 2 x work / speed of all ranks\n"
            "bubble          30.8 %: fill and drain 7.7 %, imbalance 23.1 %, communication 0.0 %, "
            "straggler 0.0 %\n"
            "imbalance       33.3 % -> 33.3 %\n"
            "memory          3.0 MiB at most of 8.0 MiB on rank 0, 6.0 KiB of them stashes\n"
            "moves           1 of 4 layers, 1.0 MiB\n"
            "\n"
            "rank 0 |F0------F1------....B0-------------B1--------------|\n"
            "rank 1 |........F0--B0------F1--B1-----....................|\n"
            "        0                                          26.00 ms\n"
            "        F forward, B both, . idle\n");
}

TEST(PlanReport, NamesOutOfFilesStayOnTheirLine) {
  Planned planned;
  planned.model.layers[3].name = "a\nb\x1b[31m" + std::string(100, 'x');
  planned.model.layers[0].name = std::string(31, 'x') + "\xC3\xA9\xC3\xA9";
  const std::string text = plan_report(planned.report(), {.ascii = true});
  EXPECT_NE(text.find("  a?b?[31mxxxxxxxxxxxxxxxxxxxxxxxx.."), std::string::npos) << text;
  EXPECT_NE(text.find("  " + std::string(31, 'x') + ".. .. "), std::string::npos) << text;
}

TEST(PlanReport, ShowsTheFirstAndTheLastOfManyStages) {
  cost::ModelCost model;
  model.layers.assign(100, four_layers().layers[0]);
  const cost::Cluster cluster = cost::equal_ranks(101);
  const std::vector<int> counts(100, 1);
  std::vector<int> with_idle = counts;
  with_idle.push_back(0);
  const plan::Plan plan = plan::make_plan(with_idle, schedule::ScheduleKind::k1F1B);
  const plan::Evaluation evaluation = *plan::evaluate(plan, {model, cluster, 2});
  const std::string text = plan_report({.model = model,
                                        .cluster = cluster,
                                        .micro_batches = 2,
                                        .plan = plan,
                                        .evaluation = evaluation,
                                        .made_by = "",
                                        .compared = {},
                                        .migration = {}});
  EXPECT_NE(text.find("(36 more stages)"), std::string::npos) << text;
  EXPECT_NE(text.find("\n     31    31  31      block0"), std::string::npos) << text;
  EXPECT_EQ(text.find("\n     32 "), std::string::npos) << text;
  EXPECT_NE(text.find("\n     68    68  68      block0"), std::string::npos) << text;
  EXPECT_NE(text.find("idle ranks      1 of 101\n"), std::string::npos) << text;
}

}  // namespace
}  // namespace dynmo::observe
