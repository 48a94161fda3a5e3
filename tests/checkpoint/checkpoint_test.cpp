// SPDX-License-Identifier: Apache-2.0
#include "dynmo/checkpoint/checkpoint.h"

#include <gtest/gtest.h>

#include "dynmo/core/check.h"
#include "dynmo/core/files.h"
#include "dynmo/core/rng.h"
#include "tests/support/mutate.h"
#include "tests/support/temp_folder.h"

namespace dynmo::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr int kLayers = 3;

// The bytes that layer `layer` holds at `step`.
std::string weights_of(std::int64_t step, int layer) {
  return fmt::format("{:08}{:08}", step % 100000000, layer);
}

Expected<std::vector<FileEntry>> write_layers(const fs::path& pending, std::int64_t step) {
  std::vector<FileEntry> entries;
  // Not in order: ranks finish as they will.
  for (const int layer : {2, 0, 1}) {
    const std::string weights = weights_of(step, layer);
    const auto bytes = std::as_bytes(std::span(weights));
    DYNMO_ASSIGN(
        FileEntry entry,
        write_layer(pending, {.layer = LayerId(layer),
                              .tensors = {{"w", DType::kF32, {2, 2}, bytes},
                                          {"optimizer.exp_avg.w", DType::kU8, {16}, bytes}},
                              .metadata = {{"optimizer_steps", std::to_string(step)}}}));
    entries.push_back(std::move(entry));
  }
  return entries;
}

Json state_of(std::int64_t step) { return {{"step", step}, {"seed", 7}, {"rate", 0.1}}; }

Expected<fs::path> save(const fs::path& root, std::int64_t step) {
  DYNMO_ASSIGN(const fs::path pending, begin_checkpoint(root, step));
  DYNMO_ASSIGN(auto entries, write_layers(pending, step));
  return commit_checkpoint(pending, step, std::move(entries), state_of(step));
}

void expect_whole(const VerifiedCheckpoint& checkpoint, std::int64_t step) {
  EXPECT_EQ(checkpoint.manifest.step, step);
  EXPECT_EQ(checkpoint.manifest.state, state_of(step));
  ASSERT_EQ(checkpoint.manifest.files.size(), static_cast<std::size_t>(kLayers));
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto file = read_layer(checkpoint, LayerId(layer));
    ASSERT_TRUE(file) << file.error().message;
    const std::string weights = weights_of(step, layer);
    const auto expected = std::as_bytes(std::span(weights));
    const auto bytes = file->find("w")->bytes;
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), expected.begin(), expected.end()));
    EXPECT_EQ(file->metadata().at("optimizer_steps"), std::to_string(step));
  }
}

void flip(const fs::path& path, std::size_t byte) {
  std::string bytes = *read_file(path);
  bytes.at(byte) = static_cast<char>(bytes[byte] ^ 1);
  std::ofstream(path, std::ios::binary) << bytes;
}

TEST(Checkpoint, ComesBackWhole) {
  const TempFolder folder;
  const auto path = save(folder.path() / "checkpoints", 40);
  ASSERT_TRUE(path) << path.error().message;
  EXPECT_EQ(*path, folder.path() / "checkpoints" / "step-00000040");
  EXPECT_TRUE(fs::exists(*path / "layer-0002.safetensors"));
  const auto newest = newest_verified(folder.path() / "checkpoints", nullptr);
  ASSERT_TRUE(newest) << newest.error().message;
  EXPECT_EQ(newest->path, *path);
  expect_whole(*newest, 40);
  EXPECT_THROW((void)read_layer(*newest, LayerId(kLayers)), CheckFailure);
}

TEST(Checkpoint, OfNoneIsNoCheckpoint) {
  const TempFolder folder;
  EXPECT_TRUE(list_checkpoints(folder.path() / "none")->empty());
  const auto newest = newest_verified(folder.path() / "none", nullptr);
  ASSERT_FALSE(newest);
  EXPECT_EQ(newest.error().code, ErrorCode::kNoCheckpoint);
  // The folder that was asked for is the one that is named.
  const auto found = find_checkpoint(folder.path() / "none", nullptr);
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code, ErrorCode::kNoCheckpoint);
  EXPECT_NE(found.error().message.find("none' does not exist"), std::string::npos);
  const auto nothing = find_checkpoint(folder.path(), nullptr);
  ASSERT_FALSE(nothing);
  EXPECT_NE(nothing.error().message.find("neither checkpoints nor manifest.json"),
            std::string::npos);
}

TEST(Checkpoint, TheNewestIsFirstAndOnlyCommittedOnesCount) {
  const TempFolder folder;
  for (const std::int64_t step : {5, 100000000, 40}) ASSERT_TRUE(save(folder.path(), step));
  ASSERT_TRUE(begin_checkpoint(folder.path(), 50));
  fs::create_directories(folder.path() / "step-00000060");  // no manifest
  for (const char* name : {"step-00000070.tmp", "step-70", "step--0000071", "step-", "other"}) {
    folder.write(fs::path(name) / "manifest.json", "{}");
  }
  const auto checkpoints = list_checkpoints(folder.path());
  ASSERT_TRUE(checkpoints);
  ASSERT_EQ(checkpoints->size(), 3U);
  EXPECT_EQ((*checkpoints)[0].step, 100000000);
  EXPECT_EQ((*checkpoints)[0].path, folder.path() / "step-100000000");
  EXPECT_EQ((*checkpoints)[1].step, 40);
  EXPECT_EQ((*checkpoints)[2].step, 5);
}

TEST(Checkpoint, DamageOfAnyFileIsSkippedWithItsReason) {
  const TempFolder folder;
  ASSERT_TRUE(save(folder.path(), 1));
  for (const char* file : {"layer-0000.safetensors", "layer-0001.safetensors",
                           "layer-0002.safetensors", "manifest.json"}) {
    const auto path = *save(folder.path(), 2) / file;
    const auto size = static_cast<std::size_t>(fs::file_size(path));
    for (const std::size_t byte : {std::size_t{0}, size / 2, size - 2}) {
      flip(path, byte);
      std::vector<Error> skipped;
      const auto newest = newest_verified(folder.path(), &skipped);
      ASSERT_TRUE(newest) << newest.error().message;
      expect_whole(*newest, 1);
      ASSERT_EQ(skipped.size(), 1U) << file << " byte " << byte;
      EXPECT_NE(skipped[0].message.find(path.string()), std::string::npos) << skipped[0].message;
      flip(path, byte);
    }
    EXPECT_EQ(newest_verified(folder.path(), nullptr)->manifest.step, 2);
    fs::remove(path);
    EXPECT_EQ(newest_verified(folder.path(), nullptr)->manifest.step, 1) << file;
  }
}

TEST(Checkpoint, AFileThatChangedAfterVerifyingIsNotLoaded) {
  const TempFolder folder;
  ASSERT_TRUE(save(folder.path(), 1));
  const auto newest = newest_verified(folder.path(), nullptr);
  flip(newest->path / "layer-0001.safetensors", 200);
  EXPECT_TRUE(read_layer(*newest, LayerId(0)));
  const auto damaged = read_layer(*newest, LayerId(1));
  ASSERT_FALSE(damaged);
  EXPECT_NE(damaged.error().message.find("it is damaged"), std::string::npos);
}

TEST(Checkpoint, ARenamedFolderIsNotAnotherStep) {
  const TempFolder folder;
  ASSERT_TRUE(save(folder.path(), 1));
  fs::rename(folder.path() / "step-00000001", folder.path() / "step-00000009");
  EXPECT_NE(verify(folder.path() / "step-00000009").error().message.find("is of step 1"),
            std::string::npos);
}

TEST(Checkpoint, OfTheSameStepIsReplaced) {
  const TempFolder folder;
  const auto path = save(folder.path(), 3);
  flip(*path / "layer-0000.safetensors", 200);
  ASSERT_FALSE(verify(*path));
  ASSERT_TRUE(save(folder.path(), 3));
  EXPECT_TRUE(verify(*path));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1);
}

TEST(Checkpoint, IsNotCommittedWithoutEveryLayersFile) {
  const TempFolder folder;
  ASSERT_TRUE(save(folder.path(), 1));
  const auto pending = *begin_checkpoint(folder.path(), 2);
  const auto entries = *write_layers(pending, 2);
  const auto commit = [&](std::vector<FileEntry> some) {
    const auto done = commit_checkpoint(pending, 2, std::move(some), state_of(2));
    EXPECT_FALSE(done);
    EXPECT_EQ(newest_verified(folder.path(), nullptr)->manifest.step, 1);
    return done ? "" : done.error().message;
  };
  EXPECT_EQ(commit({}), pending.string() + ": no layers, wanted the file of each");
  EXPECT_EQ(commit({entries[0], entries[1]}),
            pending.string() +
                ": file 1 of 2 is of layer 2, wanted layer 1: one is missing or "
                "there twice");
  EXPECT_EQ(commit({entries[0], entries[1], entries[1], entries[2]}),
            pending.string() +
                ": file 1 of 4 is of layer 0, wanted layer 1: one is missing or "
                "there twice");
  auto smaller = entries;
  smaller[0].bytes = Bytes{1};
  EXPECT_NE(commit(smaller).find("not committed"), std::string::npos);
  fs::remove(pending / entries[2].file);
  EXPECT_NE(commit(entries).find("layer-0001.safetensors has 0 bytes"), std::string::npos);
  EXPECT_THROW((void)commit_checkpoint(pending, 2, entries, Json::array()), CheckFailure);
}

TEST(Checkpoint, BeginClearsWhatInterruptedOnesLeft) {
  const TempFolder folder;
  ASSERT_TRUE(save(folder.path(), 1));
  const auto stale = *begin_checkpoint(folder.path(), 2);
  ASSERT_TRUE(write_layers(stale, 2));
  folder.write("notes.tmp", "of the user");
  const auto pending = begin_checkpoint(folder.path(), 3);
  ASSERT_TRUE(pending);
  EXPECT_FALSE(fs::exists(stale));
  EXPECT_TRUE(fs::is_empty(*pending));
  EXPECT_TRUE(fs::exists(folder.path() / "notes.tmp"));
  EXPECT_TRUE(fs::exists(folder.path() / "step-00000001"));
  discard_pending(folder.path());
  EXPECT_FALSE(fs::exists(*pending));
}

TEST(Checkpoint, WhoStillWritesForAnEarlierGroupDisturbsNothing) {
  const TempFolder folder;
  const auto stale = *begin_checkpoint(folder.path(), 2, 3);
  const auto pending = *begin_checkpoint(folder.path(), 2, 4);
  EXPECT_NE(stale, pending);
  auto entries = *write_layers(pending, 2);
  // The folder comes back, with half a file of the same step.
  folder.write(stale.filename() / entries[0].file, "cut");
  ASSERT_TRUE(commit_checkpoint(pending, 2, std::move(entries), state_of(2)));
  expect_whole(*newest_verified(folder.path(), nullptr), 2);
  ASSERT_TRUE(begin_checkpoint(folder.path(), 3, 4));
  EXPECT_FALSE(fs::exists(stale));
}

TEST(Prune, KeepsTheNewestAndNeverRemovesTheOnlyGoodOne) {
  const TempFolder folder;
  for (std::int64_t step = 1; step <= 6; ++step) ASSERT_TRUE(save(folder.path(), step));
  EXPECT_EQ(prune(folder.path(), 4)->size(), 2U);
  EXPECT_EQ(list_checkpoints(folder.path())->back().step, 3);
  for (const std::int64_t step : {5, 6}) {
    flip(step_folder(folder.path(), step) / "layer-0000.safetensors", 200);
  }
  const auto removed = prune(folder.path(), 1);
  ASSERT_TRUE(removed);
  EXPECT_EQ(*removed, (std::vector{step_folder(folder.path(), 5), step_folder(folder.path(), 3)}));
  EXPECT_EQ(newest_verified(folder.path(), nullptr)->manifest.step, 4);
  flip(step_folder(folder.path(), 4) / "layer-0000.safetensors", 200);
  EXPECT_TRUE(prune(folder.path(), 1)->empty()) << "nothing verifies: nothing is worth less";
  EXPECT_THROW((void)prune(folder.path(), 0), CheckFailure);
}

TEST(Entries, ComeBackFromTheirText) {
  const std::vector<FileEntry> entries = {
      {LayerId(3), "layer-0003.safetensors", Bytes{1LL << 40}, digest_of("x")},
      {LayerId(0), "layer-0000.safetensors", Bytes{0}, digest_of("y")}};
  EXPECT_EQ(*decode_entries(encode_entries(entries)), entries);
  EXPECT_TRUE(decode_entries(encode_entries({}))->empty());
  const std::string text = encode_entries(entries);
  for (std::size_t size = 0; size < text.size(); ++size) {
    EXPECT_FALSE(decode_entries(text.substr(0, size))) << size;
  }
}

TEST(Manifest, TruncatedAtAnyByteIsAnError) {
  const TempFolder folder;
  const auto path = *save(folder.path(), 1) / "manifest.json";
  const std::string text = *read_file(path);
  for (std::size_t size = 0; size + 2 < text.size(); ++size) {  // without the last "}\n"
    fs::remove(path);
    std::ofstream(path, std::ios::binary) << text.substr(0, size);
    EXPECT_FALSE(read_manifest(path.parent_path())) << size;
  }
}

// Every damage is noticed, or harmless: what is read is what was written.
TEST(Manifest, NoDamageChangesWhatIsRead) {
  const TempFolder folder;
  const auto path = *save(folder.path(), 1) / "manifest.json";
  const std::string text = *read_file(path);
  const auto good = read_manifest(path.parent_path());
  ASSERT_TRUE(good);
  int harmless = 0;
  for (std::uint64_t seed = 0; seed < 5000; ++seed) {
    Rng rng(mix_key({seed, 43}));
    fs::remove(path);
    std::ofstream(path, std::ios::binary) << mutate(text, rng);
    const auto read = read_manifest(path.parent_path());
    if (!read) {
      EXPECT_EQ(read.error().message.find('\n'), std::string::npos) << "seed " << seed;
      continue;
    }
    ++harmless;
    EXPECT_EQ(read->step, good->step) << "seed " << seed;
    EXPECT_EQ(read->files, good->files) << "seed " << seed;
    EXPECT_EQ(read->state, good->state) << "seed " << seed;
  }
  EXPECT_LT(harmless, 500);
}

TEST(Manifest, RefusesAStateThatJsonCannotHold) {
  const TempFolder folder;
  const auto pending = *begin_checkpoint(folder.path(), 1);
  auto entries = *write_layers(pending, 1);
  const auto done = commit_checkpoint(pending, 1, entries, {{"name", "\xff"}});
  ASSERT_FALSE(done);
  EXPECT_NE(done.error().message.find("not UTF-8"), std::string::npos);
  EXPECT_TRUE(list_checkpoints(folder.path())->empty());
}

}  // namespace
}  // namespace dynmo::checkpoint
