// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "dynmo/core/check.h"
#include "dynmo/core/units.h"
#include "dynmo/observe/plan_report.h"
#include "dynmo/observe/table.h"

namespace dynmo::observe {
namespace {

std::string short_count(double value) {
  if (value >= 1e9) return fmt::format("{:.2f} billion", value * 1e-9);
  if (value >= 1e6) return fmt::format("{:.2f} million", value * 1e-6);
  return fmt::format("{:.0f}", value);
}

std::string share_text(double share) { return fmt::format("{:.1f} %", 100 * share); }

// Returns a setting as text, such as "model.head_slices = 4".
std::string setting(plan::AdviceKey key, const std::string& value, const AdviceWords& words) {
  const auto found = words.keys.find(key);
  DYNMO_CHECK(found != words.keys.end(), "words for {}", plan::name(key));
  return fmt::format("{} {}", found->second, value);
}

std::string limit_text(const plan::Advice& advice) {
  switch (advice.limit) {
    case plan::StepLimit::kWork:
      return fmt::format("The work itself bounds the step: the ranks compute {} of the time",
                         share_text(advice.share));
    case plan::StepLimit::kHead:
      return fmt::format("The head bounds the step: ranks wait {} of the time for it",
                         share_text(advice.share));
    case plan::StepLimit::kLayer:
      return fmt::format("Layer {} bounds the step: ranks wait {} of the time for it", advice.layer,
                         share_text(advice.share));
    case plan::StepLimit::kCut:
      return fmt::format(
          "Whole layers bound the step: ranks wait {} of the time, and no cut is "
          "more even",
          share_text(advice.share));
    case plan::StepLimit::kBalancer:
      return "The balancer's cut bounds the step, and another is better";
    case plan::StepLimit::kMemory:
      return fmt::format(
          "Memory bounds the step: ranks wait {} of the time, and a more even cut "
          "does not fit",
          share_text(advice.share));
    case plan::StepLimit::kFill:
      return fmt::format(
          "Filling and draining the pipeline bound the step: they take {} of the "
          "time",
          share_text(advice.share));
    case plan::StepLimit::kMessages:
      return fmt::format("Messages bound the step: ranks wait {} of the time for them",
                         share_text(advice.share));
    case plan::StepLimit::kSlowRank:
      return fmt::format("A slow rank bounds the step: the others wait {} of the time for it",
                         share_text(advice.share));
  }
  return {};
}

std::string remedy_text(const plan::Advice& advice, const AdviceWords& words) {
  if (!advice.remedy) return {};
  const plan::Remedy& remedy = *advice.remedy;
  std::string text = "; " + setting(remedy.key, remedy.value, words);
  if (remedy.with) text += " with " + setting(remedy.with->key, remedy.with->value, words);
  text += " would take " + format_seconds(remedy.step_s);
  if (remedy.key == plan::AdviceKey::kMicroBatches) text += " for the same tokens";
  if (remedy.key == plan::AdviceKey::kRanks) text += " on fewer ranks";
  return text;
}

}  // namespace

std::string advice_text(const plan::Advice& advice, double tokens, const AdviceWords& words) {
  std::string text;
  const plan::RankCount& all = advice.all;
  if (advice.fewest && advice.fewest->ranks < all.ranks) {
    const double more = advice.fewest->step_s / advice.best_s - 1;
    text += fmt::format("With balancer optimal {} of {} are enough: a step takes {}, {}.\n",
                        advice.fewest->ranks, format_count(all.ranks, "rank"),
                        format_seconds(advice.fewest->step_s),
                        more > 0 ? share_text(more) + " more than the best" : "the best");
  } else if (advice.fewest && all.ranks > 1) {
    text += fmt::format("All {} ranks are needed to stay within {:.0f} % of the best step.\n",
                        all.ranks, 100 * plan::kAdviceMargin);
  }
  text += limit_text(advice) + remedy_text(advice, words) + ".\n";
  if (!(tokens > 0)) return text;
  text += fmt::format("{} tokens a {}", short_count(plan::tokens_an_hour(all, tokens)), words.hour);
  if (advice.fewest && advice.fewest->ranks < all.ranks) {
    text += fmt::format(", {} on {}", short_count(plan::tokens_an_hour(*advice.fewest, tokens)),
                        format_count(advice.fewest->ranks, "rank"));
  }
  return text + ".\n";
}

}  // namespace dynmo::observe
