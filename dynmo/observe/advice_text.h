// SPDX-License-Identifier: Apache-2.0
#pragma once

// Advice on a plan as sentences: the number of ranks that is enough, the step's limit, tokens an
// hour.

#include <map>
#include <string>

#include "dynmo/plan/question/advice.h"

namespace dynmo::observe {

// The words with which a program sets the keys, before their value.
struct AdviceWords {
  std::map<plan::AdviceKey, std::string> keys;
  std::string hour = "rank-hour";
};

// Returns two or three sentences, one on each line. `tokens` are those of a step; 0: not known.
[[nodiscard]] std::string advice_text(const plan::Advice& advice, double tokens,
                                      const AdviceWords& words);

}  // namespace dynmo::observe
