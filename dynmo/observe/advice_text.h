// SPDX-License-Identifier: Apache-2.0
#pragma once

// Advice on a plan as sentences: how few ranks would do, what bounds the step, tokens an hour.

#include <map>
#include <string>

#include "dynmo/plan/advice.h"

namespace dynmo::observe {

// The words with which a program sets the keys, before their value.
struct AdviceWords {
  std::map<plan::AdviceKey, std::string> keys;
  std::string hour = "rank-hour";
};

// Two or three sentences, a line each. `tokens` are those of a step; 0: not known.
[[nodiscard]] std::string advice_text(const plan::Advice& advice, double tokens,
                                      const AdviceWords& words);

}  // namespace dynmo::observe
