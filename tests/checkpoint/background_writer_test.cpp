// SPDX-License-Identifier: Apache-2.0
#include "dynmo/checkpoint/background_writer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <map>
#include <stdexcept>
#include <thread>

#include "dynmo/core/files.h"
#include "dynmo/core/rng.h"
#include "tests/support/temp_folder.h"

namespace dynmo::checkpoint {
namespace {

namespace fs = std::filesystem;

// A layer of some tensors of random bytes, which it owns.
struct Layer {
  std::vector<std::vector<std::byte>> tensors;
  LayerFile file;
  std::int64_t bytes = 0;
};

Layer make_layer(int id, Rng& rng) {
  Layer layer;
  layer.file.layer = LayerId(id);
  for (int t = 0; t < 3; ++t) {
    std::vector<std::byte> bytes(rng.below(5000));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(rng.below(256));
    layer.bytes += std::ssize(bytes);
    layer.tensors.push_back(std::move(bytes));
  }
  for (std::size_t t = 0; t < layer.tensors.size(); ++t) {
    layer.file.tensors.push_back({.name = fmt::format("t{}", t),
                                  .dtype = DType::kU8,
                                  .shape = {std::ssize(layer.tensors[t])},
                                  .bytes = layer.tensors[t]});
  }
  layer.file.metadata["steps"] = "3";
  return layer;
}

// Holds a writer's thread in a task until it is released.
class Held {
 public:
  explicit Held(BackgroundWriter& writer) {
    writer.add_task([this]() -> Expected<void> {
      entered_.set_value();
      released_.get_future().wait();
      return {};
    });
    entered_.get_future().wait();
  }
  void release() { released_.set_value(); }

 private:
  std::promise<void> entered_;
  std::promise<void> released_;
};

std::vector<FileEntry> sorted(std::vector<FileEntry> entries) {
  std::sort(entries.begin(), entries.end(),
            [](const FileEntry& a, const FileEntry& b) { return a.layer < b.layer; });
  return entries;
}

TEST(BackgroundWriter, WritesTheFilesOfTheSynchronousWriteWhateverItsLimit) {
  constexpr std::uint64_t kSeed = 3;
  for (const std::int64_t limit : {0, 1, 4000, 20000, 1 << 30}) {
    SCOPED_TRACE(fmt::format("limit {}, seed {}", limit, kSeed));
    Rng rng(kSeed);
    const TempFolder folder;
    const fs::path now = *begin_checkpoint(folder.path() / "now", 1);
    const fs::path later = *begin_checkpoint(folder.path() / "later", 1);
    std::vector<FileEntry> entries;
    BackgroundWriter writer{Bytes{limit}};
    for (int id = 0; id < 20; ++id) {
      Layer layer = make_layer(id, rng);
      const auto entry = write_layer(now, layer.file);
      ASSERT_TRUE(entry);
      entries.push_back(*entry);
      writer.add_layer(later, layer.file);
      // Training goes on: what it does to the layer is not in the file.
      for (auto& tensor : layer.tensors) std::fill(tensor.begin(), tensor.end(), std::byte{7});
    }
    const auto written = writer.finish();
    ASSERT_TRUE(written) << written.error().message;
    EXPECT_EQ(sorted(*written), entries);
    for (const FileEntry& entry : entries) {
      EXPECT_EQ(*read_file(now / entry.file), *read_file(later / entry.file));
    }
    EXPECT_LE(writer.peak_memory(), Bytes{limit});
    EXPECT_EQ(writer.finish()->size(), 0U) << "each entry is handed out once";
  }
}

TEST(BackgroundWriter, ASlowDiskHoldsUpNobodyWithinTheLimit) {
  const TempFolder folder;
  const fs::path pending = *begin_checkpoint(folder.path(), 1);
  Rng rng(5);
  std::vector<Layer> layers;
  for (int id = 0; id < 6; ++id) layers.push_back(make_layer(id, rng));
  std::int64_t first_four = 0;
  for (int id = 0; id < 4; ++id) first_four += layers[static_cast<std::size_t>(id)].bytes;
  BackgroundWriter writer{Bytes{first_four}};
  Held held(writer);
  for (const Layer& layer : layers) writer.add_layer(pending, layer.file);
  EXPECT_TRUE(writer.busy());
  EXPECT_EQ(writer.peak_memory(), Bytes{first_four});
  // Data that did not fit is on the disk already; the rest is not.
  for (int id = 0; id < 6; ++id) {
    EXPECT_EQ(fs::exists(pending / layer_file_name(LayerId(id))), id >= 4) << id;
  }
  held.release();
  EXPECT_EQ(writer.finish()->size(), 6U);
  EXPECT_FALSE(writer.busy());
}

TEST(BackgroundWriter, WaitsForBytesThatArriveOnItsThread) {
  const TempFolder folder;
  const fs::path now = *begin_checkpoint(folder.path() / "now", 1);
  const fs::path later = *begin_checkpoint(folder.path() / "later", 1);
  Rng rng(9);
  const Layer fits = make_layer(0, rng);
  const Layer too_large = make_layer(1, rng);
  BackgroundWriter writer{Bytes{fits.bytes}};
  EXPECT_EQ(writer.room(), Bytes{fits.bytes});
  Held held(writer);
  std::map<int, std::thread::id> threads;
  for (const Layer* layer : {&fits, &too_large}) {
    const auto arrived = [layer, &threads] {
      threads[layer->file.layer.value] = std::this_thread::get_id();
      return layer->file;
    };
    ASSERT_TRUE(write_layer(now, layer->file));
    writer.add_arriving(later, Bytes{layer->bytes}, arrived);
  }
  EXPECT_EQ(writer.room(), Bytes{0});
  EXPECT_FALSE(threads.contains(0)) << "it waits for its turn";
  EXPECT_EQ(threads.at(1), std::this_thread::get_id()) << "there is no room";
  held.release();
  const auto written = writer.finish();
  ASSERT_TRUE(written);
  EXPECT_NE(threads.at(0), std::this_thread::get_id());
  for (const FileEntry& entry : *written) {
    EXPECT_EQ(*read_file(now / entry.file), *read_file(later / entry.file));
  }
  EXPECT_EQ(written->size(), 2U);
  EXPECT_EQ(writer.room(), Bytes{fits.bytes});
  // A layer that never arrives is not waited for after an error.
  writer.add_task([]() -> Expected<void> { return make_error(ErrorCode::kBadInput, "full"); });
  writer.wait();
  writer.add_arriving(later, Bytes{1}, []() -> LayerFile { throw std::runtime_error("asked"); });
  EXPECT_EQ(writer.finish().error().message, "full");
}

TEST(BackgroundWriter, WhatIsDroppedIsNotWrittenAndNobodyWaitsForAFileThatHangs) {
  const TempFolder folder;
  const fs::path pending = *begin_checkpoint(folder.path(), 1);
  Rng rng(7);
  const Layer first = make_layer(0, rng);
  const Layer second = make_layer(1, rng);
  BackgroundWriter writer{Bytes{1 << 20}};
  writer.add_task([]() -> Expected<void> { return make_error(ErrorCode::kBadInput, "full"); });
  writer.wait();
  {
    Held held(writer);
    writer.add_layer(pending, first.file);
    writer.drop();
    EXPECT_TRUE(writer.writes_dropped());
    EXPECT_TRUE(writer.busy());
    writer.wait_for(std::chrono::milliseconds(1));
    writer.add_layer(pending, second.file);
    held.release();
    const auto written = writer.finish();
    ASSERT_TRUE(written) << "an error of before it was dropped: " << written.error().message;
    ASSERT_EQ(written->size(), 1U);
    EXPECT_EQ(written->front().layer, LayerId(1));
  }
  EXPECT_FALSE(writer.writes_dropped());
  EXPECT_FALSE(fs::exists(pending / layer_file_name(LayerId(0))));
  // The memory of dropped copies is free again: all of it fits once more.
  BackgroundWriter small{Bytes{first.bytes}};
  Held held(small);
  small.add_layer(pending, first.file);
  small.drop();
  small.add_layer(pending, first.file);
  EXPECT_FALSE(fs::exists(pending / layer_file_name(LayerId(0))));
  held.release();
  EXPECT_EQ(small.finish()->size(), 1U);
}

TEST(BackgroundWriter, AnErrorOfAFileThatWasDroppedIsNoNews) {
  BackgroundWriter writer{Bytes{0}};
  std::promise<void> entered;
  std::promise<void> released;
  writer.add_task([&]() -> Expected<void> {
    entered.set_value();
    released.get_future().wait();
    return make_error(ErrorCode::kBadInput, "full");
  });
  entered.get_future().wait();
  writer.drop();
  released.set_value();
  EXPECT_TRUE(writer.finish());
  EXPECT_FALSE(writer.writes_dropped());
}

TEST(BackgroundWriter, AnErrorIsKeptNamesThePathAndEndsWithTheCheckpoint) {
  const TempFolder folder;
  Rng rng(6);
  const Layer layer = make_layer(0, rng);
  for (const std::int64_t limit : {0, 1 << 20}) {
    BackgroundWriter writer{Bytes{limit}};
    writer.add_layer(folder.path() / "nowhere", layer.file);
    writer.wait();
    writer.add_layer(folder.path(), layer.file);  // passed over: the checkpoint is lost already
    bool ran = false;
    writer.add_task([&]() -> Expected<void> {
      ran = true;
      return {};
    });
    const auto failed = writer.finish();
    ASSERT_FALSE(failed);
    EXPECT_NE(failed.error().message.find("nowhere/layer-0000"), std::string::npos)
        << failed.error().message;
    EXPECT_NE(failed.error().message.find("No such file"), std::string::npos);
    EXPECT_FALSE(fs::exists(folder.path() / "layer-0000.safetensors"));
    EXPECT_TRUE(ran);
    writer.add_layer(folder.path(), layer.file);
    const auto next = writer.finish();
    ASSERT_TRUE(next) << next.error().message;
    EXPECT_EQ(next->size(), 1U);
    fs::remove(folder.path() / "layer-0000.safetensors");
  }
}

TEST(BackgroundWriter, WhatATaskThrowsComesOutOfFinish) {
  BackgroundWriter writer{Bytes{0}};
  writer.add_task([]() -> Expected<void> { throw std::runtime_error("thrown"); });
  EXPECT_THROW([[maybe_unused]] const auto entries = writer.finish(), std::runtime_error);
  EXPECT_TRUE(writer.finish());
}

}  // namespace
}  // namespace dynmo::checkpoint
