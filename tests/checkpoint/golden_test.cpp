// SPDX-License-Identifier: Apache-2.0
#include "tests/support/golden.h"

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/checkpoint/manifest_impl.h"

namespace dynmo::checkpoint {
namespace {

const std::filesystem::path kFolder = std::filesystem::path(DYNMO_TESTS) / "checkpoint/goldens";

TEST(CheckpointGoldens, AManifestIsWrittenAsItWasRead) {
  const auto manifest = read_manifest(kFolder);
  ASSERT_TRUE(manifest) << manifest.error().message;
  EXPECT_EQ(*encode_manifest(*manifest), *read_file(kFolder / kManifestName));
}

TEST(CheckpointGoldens, EntriesAreWrittenAsTheyWereRead) {
  expect_lines_rewritten("checkpoint/goldens/entries.jsonl",
                         [](std::string_view line) -> Expected<std::string> {
                           DYNMO_ASSIGN(const auto entries, decode_entries(line));
                           return encode_entries(entries) + "\n";
                         });
}

}  // namespace
}  // namespace dynmo::checkpoint
