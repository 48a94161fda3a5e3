// SPDX-License-Identifier: Apache-2.0
// A training's config that is taken is written and read back to the same text, and to the same
// training.
#include "dynmo/config/config.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {

Outcome run_target(std::string_view text) {
  config::Config taken;
  const auto applied = config::apply_text(taken, text, "fuzz.toml");
  if (!applied) return refused(applied.error());
  const auto valid = config::validate(taken);
  if (!valid) return refused(valid.error());
  const std::string written = config::to_toml(taken);
  config::Config again;
  const auto read = config::apply_text(again, written, "written.toml");
  DYNMO_CHECK(read.has_value(), "a config that reads back, got: {}", read.error().message);
  DYNMO_CHECK(config::to_toml(again) == written, "the same config, got another");
  DYNMO_CHECK(config::identity(again) == config::identity(taken), "the same training, got another");
  DYNMO_CHECK(config::first_difference(again, taken).empty(), "no difference, got: {}",
              config::first_difference(again, taken));
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  return {
      "[model]\nfamily = \"gpt2\"\nblocks = 8\ntied_embeddings = false\nprecision = \"bf16\"\n"
      "[pipeline]\nranks = 4\ncut = [3, 5, 4, 6]\nmemory = \"2GiB\"\n[elastic]\nenabled = true\n"
      "ranks_min = 2\npack = \"auto\"\n[sparse_attention]\nenabled = true\n",
      "[optimizer]\ndecay = \"wsd\"\nlearning_rate = 3e-4\n[emulated]\nprofile = "
      "\"p.json\"\n[run]\n"
      "device = \"emulated\"\n[train]\nvalidation_every = 0\n",
      config::to_toml({})};
}

}  // namespace dynmo::fuzz
