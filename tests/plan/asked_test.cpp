// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/question/asked.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "dynmo/cost/files.h"
#include "tests/plan/cuts.h"

namespace dynmo::plan {
namespace {

using With = Option::With;

Asked of_a_profile() {
  Asked asked;
  asked.profile = "costs";
  asked.documents["costs"] = cost::profile_json(equal_model(4, 1e-3));
  asked.ranks = 2;
  return asked;
}

Asked of_a_config() {
  Asked asked;
  asked.model = "config";
  asked.documents["config"] = {{"model_type", "llama"},        {"hidden_size", 64},
                               {"num_hidden_layers", 4},       {"num_attention_heads", 4},
                               {"intermediate_size", 128},     {"vocab_size", 512},
                               {"max_position_embeddings", 64}};
  asked.device = "h100";
  asked.sequence = 32;
  asked.ranks = 2;
  return asked;
}

std::string text_of_refusal(const Asked& asked, Spelling spelling) {
  const auto made = question_of(asked, spelling);
  const auto checked = made ? check_effects(asked, *made, spelling) : Expected<void>(made.error());
  if (checked) return "";
  EXPECT_EQ(checked.error().code, ErrorCode::kBadInput);
  return checked.error().message;
}

void set(const Option& option, std::int64_t value) {
  *std::get<std::optional<std::int64_t>*>(option.value) = value;
}

TEST(Asked, HasEachOptionOnce) {
  Asked asked;
  std::set<std::string_view> flags;
  std::set<std::string_view> arguments;
  std::set<const void*> values;
  const std::vector<Option> options = options_of(asked);
  for (const Option& option : options) {
    EXPECT_TRUE(flags.insert(option.flag).second) << option.flag;
    EXPECT_TRUE(option.argument.empty() || arguments.insert(option.argument).second);
    std::visit([&](const void* value) { EXPECT_TRUE(values.insert(value).second); }, option.value);
    EXPECT_FALSE(is_given(option)) << option.flag;
    EXPECT_FALSE(option.help.empty()) << option.flag;
  }
  asked = of_a_config();
  EXPECT_EQ(std::ranges::count_if(options_of(asked), is_given), 4);
}

// Each limit is an accepted number, and the next one is refused by either name.
TEST(Asked, RefusesNumbersBeyondTheLimitsOfItsTable) {
  int limited = 0;
  Asked all;
  for (std::size_t i = 0; i < options_of(all).size(); ++i) {
    Asked asked = of_a_config();
    const Option option = options_of(asked)[i];
    if (option.max == 0) continue;
    ++limited;
    for (const std::int64_t wrong : {option.max + 1, std::int64_t{0}, std::int64_t{-3}}) {
      set(option, wrong);
      const std::string text =
          fmt::format(" is {}, wanted a whole number from 1 to {}", wrong, option.max);
      EXPECT_EQ(text_of_refusal(asked, Spelling::kFlag), std::string(option.flag) + text);
      EXPECT_EQ(text_of_refusal(asked, Spelling::kArgument), std::string(option.argument) + text);
    }
    for (const std::int64_t end : {std::int64_t{1}, option.max}) {
      set(option, end);
      EXPECT_EQ(text_of_refusal(asked, Spelling::kFlag).find("whole number"), std::string::npos);
    }
  }
  EXPECT_EQ(limited, 7);
}

TEST(Asked, RefusesOptionsOfOtherCosts) {
  Asked all;
  for (std::size_t i = 0; i < options_of(all).size(); ++i) {
    Asked asked = of_a_profile();
    const Option option = options_of(asked)[i];
    if (option.with == With::kAny) continue;
    if (option.flag == "--device") {
      asked.device = "h100";
    } else {
      set(option, 2);
    }
    EXPECT_TRUE(text_of_refusal(asked, Spelling::kFlag)
                    .starts_with(std::string(option.flag) + " goes with --model"));
    EXPECT_EQ(
        text_of_refusal(asked, Spelling::kArgument),
        std::string(option.argument) + " goes with a Hugging Face config, not with measured costs");
  }
}

TEST(Asked, RefusesWhatExcludesOrWantsAnother) {
  struct Case {
    void (*change)(Asked&);
    std::string flags;
    std::string arguments;
  };
  for (const Case& one : std::vector<Case>{
           {[](Asked& a) { a.sequence.reset(); },
            "--model wants --device, such as h100, and --sequence, such as 4096",
            "a Hugging Face config wants device, such as h100, and sequence, such as 4096"},
           {[](Asked& a) { a.cluster = "c.json"; },
            "both --ranks and --cluster were given, wanted one of them",
            "both ranks and cluster were given, wanted one of them"},
           {[](Asked& a) { a.ranks.reset(); },
            "no ranks were given, wanted --ranks N or --cluster CLUSTER.json",
            "wanted ranks=N or cluster="},
           {[](Asked& a) { a.ranks.reset(), a.cluster = "c.json", a.memory = "1GiB"; },
            "--memory goes with --ranks; the ranks of --cluster have memory_bytes each",
            "memory goes with ranks; the ranks of a cluster have memory_bytes each"},
           {[](Asked& a) { a.slack = 1; }, "--slack goes with --pack", "slack goes with pack=True"},
           {[](Asked& a) { a.head_room = 1; },
            "--head-room is 1, wanted a share of the memory from 0 to less than 1, such as 0.1",
            "head_room is 1, wanted a share of the memory from 0 to less than 1, such as 0.1"},
           {[](Asked& a) { a.evaluations = 9, a.balancer = "time"; },
            "--evaluations does nothing here: wanted --balancer search with it, or no "
            "--evaluations",
            "evaluations does nothing here: wanted balancer='search' with it, or no evaluations"},
           {[](Asked& a) { a.ranks = 1, a.pack = true; },
            "--pack does nothing here: wanted more than one rank with it, or no --pack",
            "pack does nothing here: wanted more than one rank with it, or no pack"},
           {[](Asked& a) { a.memory = "0"; }, "--memory is 0, wanted more than 0, such as 80GiB",
            "memory is 0, wanted more than 0, such as 80GiB"},
           {[](Asked& a) { a.recompute = "all"; },
            "--recompute: 'all' is no choice, wanted none, whole or auto",
            "recompute: 'all' is no choice, wanted none, whole or auto"},
       }) {
    Asked asked = of_a_config();
    one.change(asked);
    EXPECT_EQ(text_of_refusal(asked, Spelling::kFlag), one.flags);
    EXPECT_EQ(text_of_refusal(asked, Spelling::kArgument), one.arguments);
  }
  Asked unbounded = of_a_profile();
  unbounded.recompute = "auto";
  EXPECT_EQ(text_of_refusal(unbounded, Spelling::kArgument),
            "recompute='auto' does nothing here: wanted memory, device or a cluster whose ranks "
            "have memory_bytes with it, or no recompute='auto'");
  EXPECT_EQ(text_of_refusal(of_a_config(), Spelling::kFlag), "");
  EXPECT_EQ(text_of_refusal(of_a_profile(), Spelling::kFlag), "");
}

// Costs need no ranks.
TEST(Asked, HasCostsWithoutRanks) {
  Asked asked = of_a_config();
  asked.ranks.reset();
  const auto costs = costs_of(asked, Spelling::kArgument);
  ASSERT_TRUE(costs) << costs.error().message;
  const auto work = work_of(asked, Spelling::kArgument);
  ASSERT_TRUE(work) << work.error().message;
  EXPECT_EQ(std::ssize(*work), costs->size());
  EXPECT_EQ(costs->size(), 10);
}

}  // namespace
}  // namespace dynmo::plan
