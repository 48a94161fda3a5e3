// SPDX-License-Identifier: Apache-2.0
#include "dynmo/scenario/job.h"

#include <gtest/gtest.h>

#include "dynmo/core/json.h"
#include "tests/support/temp_folder.h"

namespace dynmo::scenario {
namespace {

// Load models know the parts of plain blocks. A family with others would be simulated as another.
TEST(Job, LoadModelsTakeConfigsOfPlainBlocksOnly) {
  const TempFolder folder;
  const auto config = [&](const char* type) {
    const Json json = {{"model_type", type},       {"num_hidden_layers", 8},
                       {"hidden_size", 64},        {"num_attention_heads", 4},
                       {"num_key_value_heads", 4}, {"intermediate_size", 96},
                       {"vocab_size", 100},        {"max_position_embeddings", 4096}};
    return folder.write("config.json", json.dump()).string();
  };
  Scenario scenario;
  scenario.cluster.pipeline_ranks = 2;
  scenario.model.config = config("olmo2");
  EXPECT_TRUE(make_job(scenario));
  scenario.dynamism.source = "freezing";
  const auto refused = make_job(scenario);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("dynamism.source is 'freezing', wanted none"),
            std::string::npos)
      << refused.error().message;
  scenario.model.config = config("llama");
  EXPECT_TRUE(make_job(scenario));
}

}  // namespace
}  // namespace dynmo::scenario
