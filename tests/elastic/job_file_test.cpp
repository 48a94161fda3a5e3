// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/job_file.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <set>
#include <tuple>

#include "dynmo/core/files.h"
#include "dynmo/process/sockets.h"
#include "tests/support/temp_folder.h"

namespace dynmo::elastic {
namespace {

namespace fs = std::filesystem;

JobFile some_job() {
  return {.address = "127.0.0.1", .port = 4321, .host = process::host_name(), .pid = 77};
}

TEST(JobFile, IsReadAsItWasWritten) {
  const TempFolder folder;
  ASSERT_TRUE(write_job(folder.path(), some_job(), "abc"));
  const auto job = read_job(folder.path());
  ASSERT_TRUE(job) << job.error().message;
  EXPECT_EQ(*job, some_job());
  EXPECT_EQ(*read_secret(secret_path(folder.path())), "abc");
  const auto leader = find_leader(folder.path().string(), "");
  ASSERT_TRUE(leader) << leader.error().message;
  EXPECT_EQ(leader->address, "127.0.0.1");
  EXPECT_EQ(leader->port, 4321);
  EXPECT_EQ(leader->secret, "abc");
}

TEST(JobFile, IsForItsOwnerAloneAlsoWhereAnotherWasBefore) {
  const TempFolder folder;
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE(write_job(folder.path(), some_job(), "abc"));
    for (const fs::path& path : {job_path(folder.path()), secret_path(folder.path())}) {
      EXPECT_EQ(fs::status(path).permissions(), fs::perms::owner_read | fs::perms::owner_write);
      fs::permissions(path, fs::perms::all);  // of the file that the second one takes the place of
    }
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 2) << "nothing else stays";
}

TEST(JobFile, IsGoneWhenTheRunIs) {
  const TempFolder folder;
  ASSERT_TRUE(write_job(folder.path(), some_job(), "abc"));
  remove_job(folder.path());
  EXPECT_TRUE(fs::is_empty(folder.path()));
  remove_job(folder.path());  // once more is no harm
  const auto job = read_job(folder.path());
  ASSERT_FALSE(job);
  EXPECT_EQ(job.error().code, ErrorCode::kPeerLost);
  EXPECT_NE(job.error().message.find("no elastic run goes on"), std::string::npos);
}

// A number that no process has: of one that was waited for.
pid_t ended_process() {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(0);
  ::waitpid(pid, nullptr, 0);
  return pid;
}

TEST(JobFile, OfALeaderThatWasKilledIsRemovedAndNoOther) {
  const std::int64_t ended = ended_process();
  const std::string here = process::host_name();
  for (const auto& [host, pid, stays] :
       {std::tuple(here, ended, false), std::tuple(here, std::int64_t{::getpid()}, true),
        std::tuple(std::string("elsewhere"), ended, true)}) {
    const TempFolder folder;
    const JobFile job{.address = "127.0.0.1", .port = 4321, .host = host, .pid = pid};
    ASSERT_TRUE(write_job(folder.path(), job, "abc"));
    remove_job_of_ended(folder.path());
    EXPECT_EQ(fs::exists(job_path(folder.path())), stays) << host << " " << pid;
    EXPECT_EQ(fs::exists(secret_path(folder.path())), stays) << host << " " << pid;
  }
  remove_job_of_ended("/nowhere");  // is no harm
}

// After a cut the others have gone on, and lead.
TEST(JobFile, OfAnotherLeaderStaysWhereOneEnds) {
  const TempFolder folder;
  const JobFile mine{.address = "10.0.0.1", .port = 4321, .host = "here", .pid = 1};
  JobFile theirs = mine;
  theirs.address = "10.0.0.2";
  ASSERT_TRUE(write_job(folder.path(), theirs, "abc"));
  remove_job_of(folder.path(), mine);
  EXPECT_TRUE(fs::exists(job_path(folder.path())));
  EXPECT_TRUE(fs::exists(secret_path(folder.path())));
  remove_job_of(folder.path(), theirs);
  EXPECT_FALSE(fs::exists(job_path(folder.path())));
  EXPECT_FALSE(fs::exists(secret_path(folder.path())));
}

TEST(JobFile, ASecretThatIsNoTextIsRefused) {
  const TempFolder folder;
  for (const std::string text : {"\xff\xfe\x80", "caf\xc3\xa9", "a b", "a\nb", "\x01"}) {
    ASSERT_TRUE(write_file_durably(secret_path(folder.path()), text));
    const auto secret = read_secret(secret_path(folder.path()));
    ASSERT_FALSE(secret) << text;
    EXPECT_EQ(secret.error().code, ErrorCode::kBadInput);
    EXPECT_NE(secret.error().message.find(secret_path(folder.path()).string()), std::string::npos);
  }
}

TEST(JobFile, CannotBeWrittenWhereThereIsNoFolder) {
  const TempFolder folder;
  const auto written = write_job(folder.path() / "none", some_job(), "abc");
  ASSERT_FALSE(written);
  EXPECT_EQ(written.error().code, ErrorCode::kBadInput);
  EXPECT_NE(written.error().message.find("No such file"), std::string::npos);
}

TEST(JobFile, ThatIsNoneIsRefusedByName) {
  const std::string good = R"({"format":"dynmo-job-1","address":"a","port":1,"host":"h","pid":2})";
  ASSERT_TRUE(parse_job(good, "job.json"));
  const std::vector<std::pair<std::string, std::string>> edits = {
      {R"("port":1)", R"("port":0)"},      {R"("port":1)", R"("port":65536)"},
      {R"("port":1)", R"("port":"1")"},    {R"("address":"a",)", ""},
      {R"("pid":2)", R"("pid":2,"x":3)"},  {"dynmo-job-1", "dynmo-job-2"},
      {R"("host":"h")", R"("host":null)"}, {"}", ""}};
  for (const auto& [from, to] : edits) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    const auto job = parse_job(text, "job.json");
    ASSERT_FALSE(job) << text;
    EXPECT_EQ(job.error().code, ErrorCode::kBadInput);
    EXPECT_NE(job.error().message.find("job.json"), std::string::npos) << job.error().message;
  }
}

TEST(JobFile, ALeaderIsFoundByHostAndPort) {
  const TempFolder folder;
  const std::string secret = folder.write("copied", "abc\r\n").string();
  const auto leader = find_leader("node-3:29500", secret);
  ASSERT_TRUE(leader) << leader.error().message;
  EXPECT_EQ(leader->address, "node-3");
  EXPECT_EQ(leader->port, 29500);
  EXPECT_EQ(leader->secret, "abc");
  EXPECT_EQ(find_leader("::1:29500", secret)->address, "::1");
  EXPECT_EQ(find_leader("[::1]:29500", secret)->address, "::1");
  // The name of a folder may have a colon.
  fs::create_directory(folder.path() / "run:1");
  ASSERT_TRUE(write_job(folder.path() / "run:1", some_job(), "def"));
  EXPECT_EQ(find_leader((folder.path() / "run:1").string(), "")->secret, "def");
  EXPECT_EQ(find_leader((folder.path() / "run:1").string(), secret)->secret, "abc");
}

TEST(JobFile, ALeaderOnTheLoopbackOfAnotherHostIsNotSoughtOnThisOne) {
  const TempFolder folder;
  JobFile job = some_job();
  job.host = "another";
  ASSERT_TRUE(write_job(folder.path(), job, "abc"));
  const auto leader = find_leader(folder.path().string(), "");
  ASSERT_FALSE(leader);
  EXPECT_EQ(leader.error().code, ErrorCode::kBadInput);
  for (const std::string& part :
       {std::string("at 127.0.0.1:4321 of host 'another' only"), process::host_name()}) {
    EXPECT_NE(leader.error().message.find(part), std::string::npos) << leader.error().message;
  }
  job.address = "192.0.2.1";
  ASSERT_TRUE(write_job(folder.path(), job, "abc"));
  ASSERT_TRUE(find_leader(folder.path().string(), ""));
  EXPECT_EQ(find_leader(folder.path().string(), "")->address, "192.0.2.1");
}

TEST(JobFile, ALeaderThatCannotBeFoundIsRefusedByName) {
  const TempFolder folder;
  const std::string secret = folder.write("copied", "abc\n").string();
  const std::string empty = folder.write("empty", "\n").string();
  const std::vector<std::tuple<std::string, std::string, std::string>> faults = {
      {"node:0", secret, "HOST:PORT"},
      {"node:65536", secret, "HOST:PORT"},
      {"node:12x", secret, "HOST:PORT"},
      {"node:", secret, "HOST:PORT"},
      {"node:-1", secret, "HOST:PORT"},
      {":29500", secret, "HOST:PORT"},
      {"node:29500", "", "--secret"},
      {"node:29500", empty, "is empty"},
      {"node:29500", (folder.path() / "none").string(), "none"},
      {folder.path().string(), "", "no elastic run goes on"},
      {(folder.path() / "none").string(), "", "no elastic run goes on"}};
  for (const auto& [run, file, names] : faults) {
    const auto leader = find_leader(run, file);
    ASSERT_FALSE(leader) << run;
    const bool absent = names.starts_with("no elastic run");
    EXPECT_EQ(leader.error().code, absent ? ErrorCode::kPeerLost : ErrorCode::kBadInput) << run;
    EXPECT_NE(leader.error().message.find(names), std::string::npos) << leader.error().message;
  }
}

TEST(JobFile, SecretsAreDrawnAndCompared) {
  std::set<std::string> drawn;
  for (int i = 0; i < 100; ++i) {
    const std::string secret = make_secret();
    EXPECT_EQ(secret.size(), 32U);
    EXPECT_EQ(secret.find_first_not_of("0123456789abcdef"), std::string::npos);
    drawn.insert(secret);
  }
  EXPECT_EQ(drawn.size(), 100U);
  EXPECT_TRUE(same_secret("abc", "abc"));
  for (const char* other : {"abd", "xbc", "ab", "abcd", ""}) {
    EXPECT_FALSE(same_secret("abc", other));
    EXPECT_FALSE(same_secret(other, "abc"));
  }
}

}  // namespace
}  // namespace dynmo::elastic
