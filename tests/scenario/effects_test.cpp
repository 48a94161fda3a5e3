// SPDX-License-Identifier: Apache-2.0
// A key of a scenario that is given changes the answer, or one line refuses it by name.
#include "dynmo/core/effects.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "dynmo/core/json.h"
#include "dynmo/scenario/job.h"
#include "dynmo/scenario/report.h"
#include "dynmo/scenario/run.h"
#include "dynmo/scenario/scenario.h"
#include "tests/support/other_values.h"
#include "tests/support/samples.h"

namespace dynmo::scenario {
namespace {

std::string refusal_of(const std::string& text, std::vector<std::string> compare = {}) {
  const auto scenario = parse_scenario(text, "s.toml", std::move(compare));
  return scenario ? "" : scenario.error().message;
}

TEST(EffectsOfAScenario, KeysThatDoNothingAreRefusedByName) {
  EXPECT_EQ(refusal_of("[dynamism]\nsource = \"moe\"\n[freezing]\nfraction = 0.5\n"),
            "s.toml: freezing.fraction is 0.5 with dynamism.source = moe, which does not use it: "
            "wanted dynamism.source = freezing, or no freezing.fraction");
  EXPECT_EQ(
      refusal_of("[policy]\nevaluations = 100\n"),
      "s.toml: policy.evaluations is 100 with no policy that searches, which does not use it: "
      "wanted search in policy.compare, or no policy.evaluations");
  EXPECT_EQ(refusal_of("[cluster]\nbetween_latency = 0.5\n"),
            "s.toml: cluster.between_latency is 0.5 with all 8 ranks on a node "
            "(cluster.ranks_per_node = 8), which does not use it: wanted more ranks, or fewer on a "
            "node, or no cluster.between_latency");
  EXPECT_EQ(refusal_of("[training]\ncheckpoint_every = 5\n"),
            "s.toml: training.checkpoint_every is 5 with no failure, which does not use it: wanted "
            "an [[event]] with failure = true, or no training.checkpoint_every");
  EXPECT_EQ(
      refusal_of("[model]\nconfig = \"c.json\"\nhidden = 512\n"),
      "s.toml: model.hidden is 512 with model.config = c.json, which does not use it: wanted no "
      "model.config, or no model.hidden");
}

TEST(EffectsOfAScenario, NamesThatTakeThePlaceOfPoliciesAreEnough) {
  const std::string text = "[policy]\ncompare = [\"search\"]\nevaluations = 100\n";
  EXPECT_EQ(refusal_of(text), "");
  EXPECT_EQ(refusal_of(text, {"optimal"}), "");
  EXPECT_NE(refusal_of("[policy]\nevaluations = 100\n", {"optimal"}), "");
  EXPECT_EQ(refusal_of("[policy]\nevaluations = 100\n", {"search"}), "");
}

// The figures of the runs, without the scenario's own numbers.
std::string answer(const Scenario& scenario) {
  const auto job = make_job(scenario);
  if (!job) return job.error().message;
  const auto comparison = compare(*job, scenario.policy.compare, {});
  if (!comparison) return comparison.error().message;
  Json json = comparison_json(scenario, *comparison);
  return json["runs"].dump() + to_string(json["steps"]);
}

constexpr std::string_view kSmall =
    "[model]\nblocks = 4\nhidden = 256\nvocabulary = 512\nsequence = 256\n"
    "[cluster]\npipeline_ranks = 4\nranks_per_node = 2\ndata_parallel = 2\nslow_ranks = [1]\n"
    "[training]\nsteps = 16\nmicro_batches = 4\n";

struct Base {
  std::string name;
  std::string text;
  std::vector<std::string> tables;  // whose keys have something to say there
};

std::vector<Base> bases() {
  const std::string small(kSmall);
  const auto source = [&](const std::string& name, const std::string& keys) {
    return small + "[dynamism]\nsource = \"" + name + "\"\n" + keys;
  };
  const std::string experts = source("moe", "").replace(0, 7, "[model]\nexperts = 8\n");
  return {
      {"none", small, {"model", "device", "cluster", "dynamism", "training", "policy"}},
      {"experts", experts, {"model", "moe"}},
      {"scores",  // of every head are kept
       source("none", "").replace(0, 7, "[model]\nfused_attention = false\n"),
       {"model"}},
      {"pack",
       source("freezing",
              "[freezing]\nstart = 0.0\nend = 0.1\nfraction = 0.9\n"
              "[policy]\ncompare = [\"optimal+pack\"]\npack_slack = 1.0\nmove_fixed = 0.0\n")
           .replace(small.find("steps = 16"), 10, "steps = 60"),
       {"policy"}},
      {"search",
       source("freezing", "[policy]\ncompare = [\"search\"]\nevaluations = 20\n"),
       {"policy"}},
      {"events",
       source(
           "freezing",
           "[[event]]\nstep = 6\nleave = [3]\nfailure = true\n[[event]]\nstep = 11\njoin = [3]\n"),
       {"training", "policy"}},
      {"schedule", source("freezing", ""), {"freezing", "policy"}},
      {"plasticity",
       source(
           "freezing",
           "[freezing]\nrule = \"plasticity\"\ncheck_every = 1\nbootstrap = 0.0\npatience = 1\n"),
       {"freezing"}},
      {"random",
       source("freezing", "[freezing]\nrule = \"random\"\ncheck_every = 1\n"),
       {"freezing"}},
      {"pruning", source("pruning", "[pruning]\nstart = 2\nend = 10\nevery = 4\n"), {"pruning"}},
      {"hash",
       source("sparse-attention", "[sparse_attention]\nbuckets = 4\nblock = 16\n"),
       {"sparse_attention"}},
      {"drop",
       source("sparse-attention", "[sparse_attention]\nrule = \"drop\"\nblock = 16\n"),
       {"sparse_attention"}},
      {"exit",
       source("early-exit",
              "[early_exit]\nwarm_up = 2\nramp_steps = 4\nexit_every = 1\nexit_loss = 0.0\n"),
       {"early_exit"}},
      {"exit with a loss",
       source("early-exit", "[early_exit]\nwarm_up = 2\nramp_steps = 4\nexit_every = 1\n"),
       {"early_exit"}},
      {"depths", source("mixture-of-depths", ""), {"mixture_of_depths"}},
  };
}

// A key with a few values, each of which does something else.
bool is_choice(const TomlKey& key) {
  return std::holds_alternative<TomlChoice>(key.field) ||
         std::holds_alternative<bool*>(key.field) || std::holds_alternative<Names>(key.allowed);
}

// Sets every key alone. A key that is accepted and changes the answer of no base is silent; numbers
// that no decision comes near may leave one base as it was. Another choice than the default changes
// the answer of every base.
TEST(EffectsOfAScenario, EveryKeyAloneChangesTheAnswerOrIsRefusedByName) {
  std::map<std::string, std::string>
      silent;  // by key: the bases and values that it left as they were
  std::set<std::string> speaks;
  const bool few = drawn_by("a third of the keys of a scenario").has_value();
  for (const Base& base : bases()) {
    const auto scenario = parse_scenario(base.text, base.name);
    ASSERT_TRUE(scenario.has_value()) << scenario.error().message;
    const std::string before = answer(*scenario);
    ASSERT_TRUE(before.starts_with('[')) << base.name << ": " << before;  // of runs, no error
    Scenario standard;
    const std::vector<TomlKey> standard_keys = keys_of(standard);
    Scenario listed = *scenario;
    const std::vector<TomlKey> keys = keys_of(listed);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const TomlKey& key = keys[i];
      const std::string table = key.name.substr(0, key.name.find('.'));
      const bool looked_at = std::ranges::count(base.tables, table) > 0 && key.refused.empty();
      const bool at_default = toml_value(key.field) == toml_value(standard_keys[i].field);
      const bool chooses = is_choice(key) && at_default;
      if (!looked_at || !draws(i, 3) || (speaks.contains(key.name) && !chooses)) continue;
      for (const std::string& value : other_values(key, 64)) {
        Scenario changed = *scenario;
        ASSERT_TRUE(
            apply_toml_settings(keys_of(changed), std::vector{key.name + "=" + value}, "a.b=c"));
        const auto valid = validate(changed);
        if (!valid) {
          EXPECT_EQ(valid.error().message.find('\n'), std::string::npos) << valid.error().message;
          continue;
        }
        if (answer(changed) != before) {
          speaks.insert(key.name);
          if (chooses) continue;
          break;
        }
        EXPECT_FALSE(chooses) << key.name << "=" << value << " changes nothing in " << base.name;
        silent[key.name] += " " + base.name + ":" + value;
      }
    }
  }
  for (const auto& [key, where] : silent) {
    EXPECT_TRUE(speaks.contains(key)) << key << " changes nothing in" << where;
  }
  EXPECT_GE(speaks.size(), few ? 15U : 80U);
}

}  // namespace
}  // namespace dynmo::scenario
