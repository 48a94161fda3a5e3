// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/load_log.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "tests/support/mutate.h"
#include "tests/support/samples.h"
#include "tests/support/temp_folder.h"

namespace dynmo::dynamism {
namespace {

// Costs that change in every way: all fields drawn anew every third step, a frozen prefix that
// grows, a change every fifth.
class Drawn final : public LoadModel {
 public:
  Drawn(int layers, std::uint64_t seed) : layers_(layers), seed_(seed) {}
  cost::ModelCost at(std::int64_t step) const override {
    cost::ModelCost model;
    Rng rng(mix_key({seed_, static_cast<std::uint64_t>(step / 3)}));
    const auto bytes = [&] { return Bytes{static_cast<std::int64_t>(rng.next() >> 14)}; };
    for (int i = 0; i < layers_; ++i) {
      cost::LayerCost layer;
      layer.name = "layer \"" + std::to_string(i) + "\"\n";
      layer.forward_s = rng.uniform();
      layer.backward_input_s = std::exp(-700 * rng.uniform());
      layer.backward_weight_s = 1e6 * rng.uniform();
      layer.update_s = i % 2 == 0 ? 0 : rng.uniform();
      layer.parameter_bytes = bytes();
      layer.gradient_bytes = bytes();
      layer.optimizer_bytes = bytes();
      layer.activation_bytes = bytes();
      layer.boundary_bytes = bytes();
      layer.frozen = i < step / 7;
      layer.product_time = 1 - rng.uniform();
      model.layers.push_back(layer);
    }
    return model;
  }
  cost::Announced announced_at(std::int64_t step) const override {
    if (step == 0 || step % 5 != 0) return cost::Announced::kNothing;
    if (step % 15 == 0) return cost::Announced::kPredicted;
    return step % 10 == 0 ? cost::Announced::kWork : cost::Announced::kKnown;
  }

 private:
  int layers_;
  std::uint64_t seed_;
};

TEST(LoadTrace, ReplaysWhatWasRecordedBitForBit) {
  const TempFolder folder;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Drawn load(1 + static_cast<int>(seed % 6), seed);
    const auto path = folder.path() / "load.jsonl";
    ASSERT_TRUE(record(load, 40, 1, path));
    const auto replay = read_trace(path);
    ASSERT_TRUE(replay) << replay.error().message;
    for (const std::int64_t step : {39, 0, 17, 1, 38, 7, 6, 8, 20, 3}) {
      ASSERT_EQ((*replay)->at(step), load.at(step)) << "seed " << seed << ", step " << step;
    }
    for (std::int64_t step = 0; step < 40; ++step) {
      ASSERT_EQ((*replay)->announced_at(step), load.announced_at(step)) << "step " << step;
    }
    EXPECT_EQ((*replay)->at(1000), load.at(39));
    EXPECT_EQ((*replay)->announced_at(1000), cost::Announced::kNothing);
  }
}

TEST(LoadTrace, BetweenRecordedStepsTheEarlierHolds) {
  const Drawn load(3, 4);
  const auto text = trace_text(load, 40, 12);  // 0, 12, 24, 36 and the changes at 5, 10, ..., 35
  ASSERT_TRUE(text);
  const auto replay = parse_trace(*text, "load");
  ASSERT_TRUE(replay) << replay.error().message;
  EXPECT_EQ((*replay)->at(4), load.at(0));
  EXPECT_EQ((*replay)->at(5), load.at(5));
  EXPECT_EQ((*replay)->at(9), load.at(5));
  EXPECT_EQ((*replay)->at(13), load.at(12));
  EXPECT_EQ((*replay)->at(39), load.at(36));
}

TEST(LoadTrace, ATraceOfAReplayIsTheSameText) {
  const auto text = trace_text(Drawn(4, 9), 30, 1);
  ASSERT_TRUE(text);
  const auto replay = parse_trace(*text, "load");
  ASSERT_TRUE(replay);
  EXPECT_EQ(*trace_text(**replay, 30, 1), *text);
}

constexpr const char* kHeader =
    R"({"format":"dynmo-load-trace-1","layers":[{"name":"a","forward_s":1,"backward_input_s":2,"backward_weight_s":3},{"name":"b","forward_s":1,"backward_input_s":2,"backward_weight_s":3}]})"
    "\n";

std::string fault(const std::string& text) {
  const auto replay = parse_trace(text, "t");
  return replay ? "" : replay.error().message;
}

TEST(LoadTrace, OnlyWhatChangesNeedsToBeSaid) {
  const auto replay = parse_trace(std::string(kHeader) +
                                      "{\"step\":3}\n{\"step\":5,\"forward_s\":[1,7]}\n"
                                      "{\"step\":6,\"frozen\":[true,false]}\n",
                                  "t");
  ASSERT_TRUE(replay) << replay.error().message;
  EXPECT_EQ((*replay)->at(0), (*replay)->at(3));  // before the first: the first
  EXPECT_EQ((*replay)->at(4).layers[1].forward_s, 1);
  EXPECT_EQ((*replay)->at(9).layers[1].forward_s, 7);
  EXPECT_EQ((*replay)->at(9).layers[1].backward_input_s, 2);
  EXPECT_EQ((*replay)->at(9).frozen_layers(), 1);
}

TEST(LoadTrace, FaultsNameLineAndPointer) {
  const std::string header = kHeader;
  EXPECT_EQ(fault(""), "t: is empty, wanted a \"dynmo-load-trace-1\" file");
  EXPECT_EQ(fault(header), "t: has no steps, wanted a line for at least one");
  EXPECT_EQ(fault(header + "{\"step\":1,\"forward_s\":[1,-2]}\n"),
            "t: line 2: /forward_s/1 is -2, wanted seconds from 0 to 1e6");
  EXPECT_EQ(fault(header + "{\"step\":1,\"product_time\":[1,0]}\n"),
            "t: line 2: /product_time/1 is 0, wanted a number above 0, at most 1");
  EXPECT_EQ(fault(header + "{\"step\":1,\"change\":\"pruned\"}\n"),
            "t: line 2: /change is \"pruned\", wanted true, false, \"frozen\" or \"predicted\"");
  EXPECT_EQ(fault(header + "{\"step\":1,\"frozen\":[1,true]}\n"),
            "t: line 2: /frozen/0 is 1, wanted true or false");
  EXPECT_EQ(fault(header + "{\"step\":1,\"boundary_bytes\":[1.5,1]}\n"),
            "t: line 2: /boundary_bytes/0 is 1.5, wanted whole bytes from 0 to 2^50");
  EXPECT_EQ(fault(header + "{\"step\":1,\"forward_s\":[1]}\n"),
            "t: line 2: /forward_s is not an array of 2 elements, one a layer");
  EXPECT_EQ(fault(header + "{\"step\":1}\n{\"step\":1}\n"),
            "t: line 3: /step is 1, wanted more than 1");
  EXPECT_NE(fault(header + "{\"step\":1,\"foward_s\":[1,1]}\n").find("'forward_s'"),
            std::string::npos);
  EXPECT_NE(fault(header + "[]\n").find("t: line 2: / is array"), std::string::npos);
  EXPECT_NE(fault(header + "nonsense\n").find("t: line 2: wanted JSON"), std::string::npos);
  EXPECT_NE(fault("{\"format\":\"dynmo-profile-1\",\"layers\":[]}\n").find("t: line 1: /format"),
            std::string::npos);
  EXPECT_NE(fault("{\"format\":\"dynmo-load-trace-1\",\"layers\":[{}]}\n{\"step\":0}\n")
                .find("t: line 1: /layers/0/forward_s is missing"),
            std::string::npos);
}

TEST(LoadTrace, AHalfWrittenLastLineIsPassedOver) {
  const std::string text = std::string(kHeader) + "{\"step\":1}\n{\"step\":2,\"forw";
  const auto replay = parse_trace(text, "t");
  ASSERT_TRUE(replay) << replay.error().message;
  EXPECT_NE(fault(text + "\n"), "");
}

TEST(LoadTrace, RefusesCostsThatMakeNoSense) {
  class Bad final : public LoadModel {
   public:
    cost::ModelCost at(std::int64_t step) const override {
      cost::ModelCost model;
      model.layers.resize(1);
      model.layers[0].name = step < 2 ? "a" : "b";
      model.layers[0].forward_s = step == 1 ? std::nan("") : 1;
      return model;
    }
    cost::Announced announced_at(std::int64_t /*step*/) const override {
      return cost::Announced::kNothing;
    }
  };
  EXPECT_NE(trace_text(Bad(), 2, 1).error().message.find("step 1: layer 0"), std::string::npos);
  EXPECT_NE(trace_text(Bad(), 4, 2).error().message.find("step 2: the layers"), std::string::npos);
  EXPECT_EQ(trace_text(Bad(), 4, 0).error().message, "trace: every is 0, wanted 1 or more");
}

TEST(LoadTrace, MeasuredStepsGoInOneByOne) {
  const Drawn load(3, 8);
  TraceLines lines;
  std::string text;
  for (const std::int64_t step : {4, 5, 9})
    text += *lines.add(step, step == 9 ? cost::Announced::kWork : cost::Announced::kNothing,
                       load.at(step));
  EXPECT_EQ(lines.add(9, cost::Announced::kNothing, load.at(9)).error().message,
            "trace: step is 9, wanted more than 9");
  const auto replay = parse_trace(text, "t");
  ASSERT_TRUE(replay) << replay.error().message;
  EXPECT_EQ((*replay)->at(4), load.at(4));
  EXPECT_EQ((*replay)->at(8), load.at(5));
  EXPECT_EQ((*replay)->at(10), load.at(9));
  EXPECT_EQ((*replay)->announced_at(9), cost::Announced::kWork);
  EXPECT_EQ((*replay)->announced_at(5), cost::Announced::kNothing);
}

// Whatever the bytes, an error or a load model whose costs are valid.
TEST(LoadTrace, TakesAnyBytes) {
  const std::string text = *trace_text(Drawn(2, 1), 12, 1);
  int accepted = 0;
  for (std::uint64_t seed = 0; seed < samples(5000U); ++seed) {
    Rng rng(mix_key({0x7ACE, seed}));
    const std::string damaged = mutate(text, rng);
    const auto replay = parse_trace(damaged, "t");
    if (!replay) {
      ASSERT_EQ(replay.error().code, ErrorCode::kBadInput) << "seed " << seed;
      ASSERT_EQ(replay.error().message.find('\n'), std::string::npos) << "seed " << seed;
      continue;
    }
    ++accepted;
    for (const std::int64_t step : {0, 5, 100}) {
      ASSERT_TRUE(cost::validate((*replay)->at(step))) << "seed " << seed;
    }
  }
  EXPECT_GT(accepted, samples(100));
}

}  // namespace
}  // namespace dynmo::dynamism
