// SPDX-License-Identifier: Apache-2.0
#pragma once

// A fuzz target is one reader of text from outside, run on arbitrary bytes. A target must answer
// with a value or a one-line Error; what it takes, it must also survive: write and read back the
// same, and go through the code behind it without a failed check.
//
// driver.cpp makes a program of a target that needs no special compiler; libfuzzer.cpp one that
// clang's libFuzzer drives (CMake option DYNMO_FUZZ).

#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/expected.h"

namespace dynmo::fuzz {

// The outcome for `text`; an accepted input is worth mutating further. Throws what is a finding.
enum class Outcome { kRefused, kTaken };
[[nodiscard]] Outcome run_target(std::string_view text);

// Valid inputs to start from, small ones: time goes with their length.
[[nodiscard]] std::vector<std::string> seeds();

// Throws CheckFailure unless the error is one that a user can do something with.
inline Outcome refused(const Error& error) {
  DYNMO_CHECK(error.code == ErrorCode::kBadInput || error.code == ErrorCode::kInfeasible,
              "an error the user can mend, got code {}: {}", static_cast<int>(error.code),
              error.message);
  DYNMO_CHECK(!error.message.empty(), "a message that says something, got none");
  DYNMO_CHECK(error.message.find('\n') == std::string::npos, "a message of one line, got {}",
              error.message);
  return Outcome::kRefused;
}

}  // namespace dynmo::fuzz
