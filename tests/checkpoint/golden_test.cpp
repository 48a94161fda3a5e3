// SPDX-License-Identifier: Apache-2.0
#include "tests/support/golden.h"

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/checkpoint/manifest_impl.h"
#include "tests/support/temp_folder.h"

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

TEST(CheckpointGoldens, RefusalsStayTheSame) {
  expect_refusals("checkpoint/goldens/entries.jsonl",
                  [](const std::string& text) -> Expected<void> {
                    std::istringstream lines(text);
                    for (std::string line; std::getline(lines, line);)
                      DYNMO_TRY(decode_entries(line));
                    return {};
                  });
  expect_refusals("checkpoint/goldens/manifest.json",
                  [](const std::string& text) -> Expected<void> {
                    const TempFolder folder;
                    folder.write(kManifestName, text);
                    DYNMO_TRY(read_manifest(folder.path()));
                    return {};
                  });
}

}  // namespace
}  // namespace dynmo::checkpoint
