// SPDX-License-Identifier: Apache-2.0
// A target (target.h) as clang's libFuzzer wants it. What a target throws ends the program, which
// libFuzzer reports with the input.

#include <cstddef>
#include <cstdint>

#include "tests/fuzz/mutate.h"
#include "tests/fuzz/target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);   // NOLINT
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {  // NOLINT
  (void)dynmo::fuzz::run_target({reinterpret_cast<const char*>(data), size});
  return 0;
}

// Half of the changes are ours, which know of values and brackets, half are libFuzzer's own.
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size,
                                        std::size_t most);                            // NOLINT
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,  // NOLINT
                                               std::size_t most, unsigned seed);
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,  // NOLINT
                                               std::size_t most, unsigned seed) {
  dynmo::Rng rng(seed);
  if (rng.below(2) == 0) return LLVMFuzzerMutate(data, size, most);
  static const std::vector<std::string> seeds = dynmo::fuzz::seeds();
  const std::string changed =
      dynmo::fuzz::mutate({reinterpret_cast<const char*>(data), size},
                          seeds[static_cast<std::size_t>(rng.below(seeds.size()))], rng);
  const std::size_t kept = changed.size() < most ? changed.size() : most;
  changed.copy(reinterpret_cast<char*>(data), kept);
  return kept;
}
