// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/step_record.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <limits>
#include <thread>

#include "dynmo/core/files.h"
#include "dynmo/core/rng.h"
#include "dynmo/observe/record_writer.h"

namespace dynmo::observe {
namespace {

class Records : public ::testing::Test {
 protected:
  Records() {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    path_ = std::filesystem::temp_directory_path() /
            ("dynmo-" + std::to_string(::getpid()) + test->name() + ".jsonl");
    std::filesystem::remove(path_);
  }
  ~Records() override { std::filesystem::remove(path_); }

  std::filesystem::path path_;
};

StepRecord random_record(Rng& rng, std::int64_t step) {
  StepRecord record;
  record.step = step;
  record.rank = static_cast<int>(rng.below(8));
  record.generation = static_cast<Generation>(rng.below(9));
  record.loss = rng.uniform() * 10;
  record.tokens = static_cast<std::int64_t>(rng.below(1 << 20));
  record.step_s = rng.uniform();
  record.predicted_s = rng.uniform();
  record.busy_s = rng.uniform();
  record.idle_s = rng.uniform();
  record.first_layer = static_cast<int>(rng.below(40));
  record.layers = static_cast<int>(rng.below(10));
  record.frozen_layers = static_cast<int>(rng.below(10));
  record.imbalance = rng.uniform();
  record.bubble = rng.uniform();
  record.memory_bytes = Bytes{static_cast<std::int64_t>(rng.next() >> 1)};
  record.profile_s = rng.uniform();
  record.plan_s = rng.uniform();
  record.migrate_s = rng.uniform();
  record.moved_layers = static_cast<int>(rng.below(10));
  record.moved_bytes = Bytes{static_cast<std::int64_t>(rng.below(1 << 30))};
  record.reduction_s = rng.uniform();
  record.checkpoint_s = rng.uniform();
  record.sent_bytes = Bytes{static_cast<std::int64_t>(rng.below(1 << 30))};
  record.gradient_norm = rng.uniform();
  record.learning_rate = rng.uniform() * 1e-4;
  if (rng.below(2) == 1) record.device_memory_bytes = Bytes{1 + static_cast<int>(rng.below(9))};
  record.emulated = rng.below(2) == 1;
  if (rng.below(2) == 1) record.sources["layer_drop"] = {{"share", rng.uniform()}};
  return record;
}

TEST_F(Records, HaveNoDeviceMemoryOfACpu) {
  StepRecord record;
  EXPECT_FALSE(record_json(record).contains("device_memory_bytes"));
  record.device_memory_bytes = Bytes{7};
  EXPECT_EQ(record_json(record)["device_memory_bytes"], 7);
}

TEST_F(Records, ReadBackExactly) {
  Rng rng(1);
  std::vector<StepRecord> written;
  {
    auto writer = RecordWriter::open(path_);
    ASSERT_TRUE(writer) << writer.error().message;
    for (int step = 0; step < 2000; ++step) {
      written.push_back(random_record(rng, step));
      (*writer)->write(written.back());
    }
    const auto closed = (*writer)->close();
    EXPECT_TRUE(closed) << closed.error().message;
    EXPECT_TRUE((*writer)->close());  // twice is once
  }
  const auto read = read_records(path_);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, written);
}

TEST_F(Records, TheDestructorFlushes) {
  Rng rng(2);
  { (*RecordWriter::open(path_))->write(random_record(rng, 7)); }
  const auto read = read_records(path_);
  ASSERT_TRUE(read);
  ASSERT_EQ(read->size(), 1U);
  EXPECT_EQ(read->front().step, 7);
}

TEST_F(Records, ALossThatDivergedIsNullAndReadBackAsNaN) {
  StepRecord record;
  record.loss = std::nan("");
  record.gradient_norm = std::numeric_limits<double>::infinity();
  { (*RecordWriter::open(path_))->write(record); }
  EXPECT_NE(read_file(path_)->find("\"loss\":null"), std::string::npos);
  const auto read = read_records(path_);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_TRUE(std::isnan(read->front().loss));
  EXPECT_TRUE(std::isnan(read->front().gradient_norm));
  EXPECT_EQ(read->front().step_s, 0);
}

TEST_F(Records, AppendingMendsALineThatWasCutOff) {
  Rng rng(3);
  { (*RecordWriter::open(path_))->write(random_record(rng, 0)); }
  const auto whole = std::filesystem::file_size(path_);
  {
    (*RecordWriter::open(path_, {.start = RecordWriterOptions::Start::kAppend}))
        ->write(random_record(rng, 1));
  }
  std::filesystem::resize_file(path_, whole + 20);  // killed while writing step 1
  const auto torn = read_records(path_);
  ASSERT_TRUE(torn) << torn.error().message;
  EXPECT_EQ(torn->size(), 1U);
  {
    (*RecordWriter::open(path_, {.start = RecordWriterOptions::Start::kAppend}))
        ->write(random_record(rng, 2));
  }
  const auto read = read_records(path_);
  ASSERT_TRUE(read) << read.error().message;
  ASSERT_EQ(read->size(), 2U);
  EXPECT_EQ((*read)[1].step, 2);
}

TEST_F(Records, ErrorsNameTheLine) {
  Rng rng(4);
  { (*RecordWriter::open(path_))->write(random_record(rng, 0)); }
  const std::string good = *read_file(path_);
  ASSERT_TRUE(write_file_durably(path_, good + "{\"format\": \"dynmo-step-1\", \"stpe\": 1}\n"));
  EXPECT_EQ(read_records(path_).error().message, path_.string() + ": line 2: /step is missing");
  ASSERT_TRUE(write_file_durably(path_, good + good + "{oops}\n" + good));
  EXPECT_EQ(read_records(path_).error().message.find(path_.string() + ": line 3: wanted JSON"), 0U);
  std::string renamed = good;
  renamed.replace(renamed.find("busy_s"), 6, "bsuy_s");
  ASSERT_TRUE(write_file_durably(path_, renamed));
  EXPECT_EQ(read_records(path_).error().message,
            path_.string() + ": line 1: /bsuy_s is not a known key, did you mean 'busy_s'?");
}

TEST_F(Records, ManyThreadsMayWrite) {
  {
    auto writer = RecordWriter::open(path_);
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 500; ++i) {
          StepRecord record;
          record.step = i;
          record.rank = t;
          (*writer)->write(record);
        }
      });
    }
    threads.clear();
    ASSERT_TRUE((*writer)->close());
  }
  EXPECT_EQ(read_records(path_)->size(), 2000U);
}

TEST_F(Records, AFullDiskIsReportedByClose) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  auto writer = RecordWriter::open("/dev/full");
  ASSERT_TRUE(writer);
  (*writer)->write({});
  const auto closed = (*writer)->close();
  ASSERT_FALSE(closed);
  EXPECT_NE(closed.error().message.find("cannot write step records '/dev/full'"), std::string::npos)
      << closed.error().message;
  EXPECT_FALSE((*writer)->close());
}

// A limit of the file's size stands for a disk that is full for a while.
TEST_F(Records, LinesThatDoNotFitAreLeftOutWholeAndLaterOnesAreWritten) {
  const auto before = std::signal(SIGXFSZ, SIG_IGN);
  rlimit unlimited{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &unlimited), 0);
  auto writer = RecordWriter::open(path_, {.queue_records = 1000000});
  ASSERT_TRUE(writer);
  EXPECT_FALSE((*writer)->take_failure());
  rlimit full = unlimited;
  full.rlim_cur = 5000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &full), 0);
  std::int64_t step = 0;
  while ((*writer)->missing() == 0 && step < 100000) {
    StepRecord record;
    record.step = step++;
    (*writer)->write(record);
    std::this_thread::yield();
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &unlimited), 0);
  std::signal(SIGXFSZ, before);
  const auto failure = (*writer)->take_failure();
  ASSERT_TRUE(failure);
  EXPECT_NE(failure->message.find("File too large"), std::string::npos) << failure->message;
  EXPECT_FALSE((*writer)->take_failure());  // said once

  StepRecord last;
  last.step = step++;
  (*writer)->write(last);
  const auto closed = (*writer)->close();
  ASSERT_FALSE(closed);
  const std::int64_t missing = (*writer)->missing();
  EXPECT_NE(closed.error().message.find(fmt::format("lacks {} step records", missing)),
            std::string::npos)
      << closed.error().message;
  const auto read = read_records(path_);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(std::ssize(*read), step - missing);
  EXPECT_EQ(read->back().step, step - 1);
}

TEST_F(Records, AFileThatCannotBeMadeIsAnError) {
  const auto writer = RecordWriter::open(path_ / "no" / "such" / "folder");
  ASSERT_FALSE(writer);
  EXPECT_EQ(writer.error().code, ErrorCode::kBadInput);
}

// A pipe that nobody reads is the slowest disk there is: writing must not wait for it.
TEST_F(Records, WhatTheDiskCannotTakeIsDroppedAndCounted) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  const int reader = ::open(path_.c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  auto writer = RecordWriter::open(path_, {.queue_records = 16});
  ASSERT_TRUE(writer) << writer.error().message;
  constexpr int kRecords = 20000;  // megabytes; a pipe holds 64 KiB
  for (int i = 0; i < kRecords; ++i) {
    StepRecord record;
    record.step = i;
    (*writer)->write(record);
  }
  std::int64_t lines = 0;
  std::jthread drain([&](const std::stop_token& stop) {
    std::array<char, 65536> buffer;
    while (true) {
      const ssize_t got = ::read(reader, buffer.data(), buffer.size());
      if (got > 0) lines += std::count(buffer.begin(), buffer.begin() + got, '\n');
      if (got <= 0 && stop.stop_requested()) return;
      if (got <= 0) std::this_thread::yield();
    }
  });
  const auto closed = (*writer)->close();
  drain.request_stop();
  drain.join();
  ::close(reader);
  ASSERT_FALSE(closed);
  EXPECT_NE(closed.error().message.find("lacks " + std::to_string(kRecords - lines) + " step"),
            std::string::npos)
      << closed.error().message << ", " << lines << " lines arrived";
}

TEST(StepRecord, DamagedLinesAreReadOrRefused) {
  int read = 0;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Rng rng(mix_key({0x4EC04D, seed}));
    std::string text = record_json(random_record(rng, 1)).dump() + "\n";
    for (auto edits = 1 + rng.below(3); edits > 0; --edits) {
      text[rng.below(text.size())] = rng.below(2) == 0 ? static_cast<char>(rng.below(256))
                                                       : static_cast<char>('0' + rng.below(10));
    }
    const auto records = parse_records(text, "damaged");
    read += records ? 1 : 0;
    if (!records) {
      ASSERT_EQ(records.error().code, ErrorCode::kBadInput) << "seed " << seed;
      ASSERT_NE(records.error().message.find("line "), std::string::npos) << "seed " << seed;
    }
  }
  EXPECT_GT(read, 50);
}

}  // namespace
}  // namespace dynmo::observe
