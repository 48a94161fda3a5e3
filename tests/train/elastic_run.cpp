// SPDX-License-Identifier: Apache-2.0
#include "tests/train/elastic_run.h"

#include <ATen/Parallel.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/core/check.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/files.h"
#include "dynmo/core/rng.h"
#include "dynmo/data/token_shard.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/process/sockets.h"
#include "dynmo/train/run.h"
#include "dynmo/train/setup/leader_options.h"

namespace dynmo::train::testing {
namespace {

using process::LineClient;

constexpr std::chrono::milliseconds kReply = kHang;

Expected<elastic::Reply> hear(LineClient& client) {
  DYNMO_ASSIGN(const std::string line, client.receive(elastic::kMaxReply, kReply));
  DYNMO_ASSIGN(elastic::Reply reply, elastic::parse_reply(line));
  if (!reply.done) return Error{reply.code, reply.text};
  return reply;
}

elastic::Member member_of(int id) {
  return {.id = {static_cast<std::uint64_t>(id)}, .host = process::host_name(), .pid = 1};
}

}  // namespace

Expected<LineClient> ElasticRun::ask(const elastic::Request& request) {
  DYNMO_ASSIGN(const elastic::ControlEndpoint leader,
               elastic::find_leader(case_.options.config.run.directory, ""));
  DYNMO_ASSIGN(LineClient client, LineClient::connect(leader.address, leader.port, kReply));
  elastic::Request full = request;
  full.secret = leader.secret;
  DYNMO_TRY(client.send(to_line(full)));
  return client;
}

Expected<Json> ElasticRun::status() {
  DYNMO_ASSIGN(LineClient client, ask({.kind = elastic::RequestKind::kStatus}));
  DYNMO_ASSIGN(const elastic::Reply reply, hear(client));
  return reply.status;
}

void ElasticRun::fail(const Error& why) {
  const std::lock_guard lock(mutex_);
  if (failure_) return;
  failure_ = why;
  hub_.fail(why);
}

void ElasticRun::start(Thread& thread, std::function<Expected<void>()> work) {
  thread.thread = std::jthread([this, &thread, work = std::move(work)] {
    at::set_num_threads(1);
    try {
      thread.done = work();
    } catch (const Killed&) {
      thread.ended = true;
      return;
    } catch (const CheckFailure& failure) {
      thread.done = make_error(ErrorCode::kInternal, "{}", failure.what());
    } catch (const std::exception& fault) {
      Error error = error_of(fault);
      if (case_.watch && thread.groups->others_go_on()) error.code = ErrorCode::kInternal;
      thread.done = error;
    }
    if (!thread.done && (thread.fails_at || thread.may_fail) && !thread.joined) {
      thread.groups->give_up(thread.done.error());
      thread.gave_up = true;
      thread.done = {};
    }
    thread.done = thread.groups->close(thread.done);
    if (!thread.done && !case_.watch) fail(thread.done.error());
    hub_.end(thread.groups->self().id);
    thread.ended = true;
  });
}

Expected<void> ElasticRun::run() {
  at::set_num_threads(1);
  {
    DYNMO_ASSIGN(const ValidOptions valid, validated(case_.options));
    DYNMO_ASSIGN(const ResolvedRun run, resolve(valid));
    build_ = this_build(run);
  }
  wanted_ = case_.ranks;
  left_ = case_.max_gap;
  ended_ = !case_.next;
  reporter_.line = [this](std::string_view text) {
    const std::lock_guard lock(mutex_);
    story_ += fmt::format("{}\n", text);
  };
  reporter_.progress = [this](const Progress& progress) {
    boundary();
    if (case_.between) case_.between(progress.done, *this);
  };
  for (int rank = 0; rank < case_.ranks; ++rank) add_rank();
  for (int rank = 0; Thread & thread : threads_) {
    start(thread, [this, &thread, rank]() -> Expected<void> {
      check_context().rank = rank;
      DYNMO_TRY(thread.groups->enter(1, case_.ranks, WorldRank(rank), Origin::kFirst));
      DYNMO_ASSIGN(const ValidOptions valid, validated(case_.options));
      return train(*thread.groups, valid, reporter_);
    });
    ++rank;
  }
  // Who leads adds threads, and ends after its last order.
  for (auto at = threads_.begin(); at != threads_.end();) {
    at->thread.join();
    const std::lock_guard lock(mutex_);
    ++at;
  }
  if (failure_) return *failure_;
  for (LineClient& client : waiting_) DYNMO_TRY(hear(client));
  return {};
}

// As joining.cpp does it in a process of its own.
Expected<void> ElasticRun::join(Thread& thread) {
  const auto stand_by = [&]() -> Expected<LineClient> {
    TrainOptions options = case_.options;
    DYNMO_ASSIGN(LineClient asking, ask({.kind = elastic::RequestKind::kConfig}));
    DYNMO_ASSIGN(const elastic::Reply settings, hear(asking));
    DYNMO_TRY(apply_text(options.config, settings.text, "the run's settings"));
    DYNMO_ASSIGN(LineClient client, ask({.kind = elastic::RequestKind::kJoin,
                                         .newcomer = thread.groups->self(),
                                         .build = build_}));
    DYNMO_ASSIGN(const elastic::Reply standby, hear(client));
    if (!standby.standby) return make_error(ErrorCode::kInternal, "no number for a newcomer");
    return client;
  };
  auto client = stand_by();
  if (!client && !thread.may_fail) fail(client.error());
  thread.stands_by = true;
  thread.stands_by.notify_all();
  if (!client) return client.error();
  DYNMO_ASSIGN(const elastic::Reply admitted, hear(*client));
  if (!admitted.place) return make_error(ErrorCode::kInternal, "no place: {}", admitted.text);
  const elastic::Place& place = *admitted.place;
  check_context().rank = place.rank.value;
  DYNMO_TRY(thread.groups->enter(place.generation, place.size, place.rank, Origin::kChange,
                                 place.numbers));
  if (thread.fails_at) {
    thread.groups->fail_at(*thread.fails_at, [&thread] { return thread.joined.load(); });
  }
  DYNMO_ASSIGN(const ValidOptions valid, validated(case_.options));
  DYNMO_ASSIGN(ResolvedRun run, resolve(valid));
  return train::join(*thread.groups, std::move(run), reporter_, [&] { thread.joined = true; });
}

ElasticRun::Thread& ElasticRun::add_rank() {
  Thread& thread = add_thread();
  thread.groups = std::make_unique<HubGroups>(hub_, member_of(next_id_++));
  if (case_.watch) case_.watch(*thread.groups);
  hub_.begin(thread.groups->self().id);
  return thread;
}

ElasticRun::Thread& ElasticRun::add_thread() {
  const std::lock_guard lock(mutex_);
  return threads_.emplace_back();
}

void ElasticRun::add_newcomer() {
  Thread& thread = add_rank();
  thread.may_fail = static_cast<bool>(case_.watch);
  start(thread, [this, &thread] { return join(thread); });
  thread.stands_by.wait(false);
}

std::vector<ElasticRun::Ended> ElasticRun::ended() const {
  std::vector<Ended> all;
  for (const Thread& thread : threads_) {
    all.push_back(
        {thread.groups->is_lost(), thread.groups->is_torn(), thread.gave_up, thread.done});
  }
  return all;
}

void ElasticRun::boundary() {
  if (ended_) return;
  const Expected<void> followed = follow();
  if (followed) return;
  story_ += fmt::format("the orders failed: {}\n", followed.error().message);
  fail(followed.error());
  ended_ = true;
}

Expected<void> ElasticRun::follow() {
  DYNMO_ASSIGN(const Json now, status());
  std::vector<int> members;
  for (const Json& rank : now.at("ranks")) members.push_back(rank.at("rank").get<int>());
  if (failing_ != nullptr) {
    if (failing_->joined) {
      ++wanted_;
    } else if (!failing_->ended) {
      return {};
    } else {
      ++failed_;
      under_way_ = false;
      reap();
    }
    failing_ = nullptr;
  }
  if (under_way_) {
    if (std::ssize(members) != wanted_) return {};  // it waits for a checkpoint
    for (LineClient& client : waiting_) DYNMO_TRY(hear(client));
    waiting_.clear();
    under_way_ = false;
    ++changes_;
    reap();
    case_.settled(changes_);
    const auto gaps = static_cast<std::uint64_t>(case_.max_gap - case_.min_gap + 1);
    left_ = case_.min_gap + static_cast<int>(rng_.below(gaps));
  }
  if (--left_ > 0) return {};
  const std::optional<Order> order = case_.next(members);
  if (!order) {
    ended_ = true;
    return {};
  }
  under_way_ = true;
  return give(*order);
}

// Returns when the run's leader has it: the status that is asked for later was served later.
Expected<void> ElasticRun::give(const Order& order) {
  const int replicas = static_cast<int>(case_.options.config.pipeline.replicas);
  switch (order.kind) {
    case Order::Kind::kPack: {
      story_ += fmt::format("pack {}\n", order.ranks);
      wanted_ = order.ranks * replicas;
      DYNMO_ASSIGN(LineClient client,
                   ask({.kind = elastic::RequestKind::kPack, .ranks = order.ranks}));
      waiting_.push_back(std::move(client));
      DYNMO_TRY(status());
      return {};
    }
    case Order::Kind::kCheckpoint: {
      story_ += "checkpoint\n";
      DYNMO_ASSIGN(LineClient client, ask({.kind = elastic::RequestKind::kCheckpoint}));
      waiting_.push_back(std::move(client));
      DYNMO_TRY(status());
      ended_ = true;
      return {};
    }
    case Order::Kind::kCheckpointAndDrain: {
      story_ += "checkpoint\n";
      DYNMO_ASSIGN(LineClient client, ask({.kind = elastic::RequestKind::kCheckpoint}));
      waiting_.push_back(std::move(client));
      return give({.kind = Order::Kind::kDrain, .member = order.member});
    }
    case Order::Kind::kDrain: {
      story_ += fmt::format("drain {}\n", order.member);
      wanted_ -= replicas;
      DYNMO_ASSIGN(LineClient client,
                   ask({.kind = elastic::RequestKind::kDrain, .member = order.member}));
      waiting_.push_back(std::move(client));
      DYNMO_TRY(status());
      return {};
    }
    case Order::Kind::kAwait:
      story_ += fmt::format("await {} ranks\n", order.ranks);
      wanted_ = order.ranks;
      return {};
    case Order::Kind::kSignal:
    case Order::Kind::kRefusedSignal: {
      story_ += fmt::format("signal to {}\n", order.member);
      under_way_ = order.kind == Order::Kind::kSignal;
      if (under_way_) wanted_ -= replicas;
      // Members' ids count as their numbers do: all that ask become members, in that order.
      for (Thread& thread : threads_) {
        if (thread.groups->self().id.value == static_cast<std::uint64_t>(order.member) + 1) {
          thread.groups->ask_to_leave();
        }
      }
      return {};
    }
    case Order::Kind::kJoin: {
      const int count = order.ranks * replicas;
      story_ += fmt::format("join {}\n", count);
      wanted_ += count;
      for (int i = 1; i <= count; ++i) add_newcomer();  // one after another: numbers follow ids
      return {};
    }
    case Order::Kind::kFailToJoin: {
      story_ += fmt::format("join, and fail at message {}\n", order.message);
      Thread& thread = add_rank();
      thread.fails_at = order.message;
      failing_ = &thread;
      start(thread, [this, &thread] { return join(thread); });
      thread.stands_by.wait(false);
      return {};
    }
  }
  return {};
}

// Threads of ranks that have left, while run() waits for the first one.
void ElasticRun::reap() {
  const std::lock_guard lock(mutex_);
  if (threads_.front().ended) return;
  std::erase_if(threads_, [](Thread& thread) { return thread.ended && thread.done.has_value(); });
}

Expected<void> train_twin(const TrainOptions& options, int ranks) {
  return transport::run_ranks(ranks,
                              [&](transport::Transport& group) -> Expected<void> {
                                at::set_num_threads(1);
                                return train(group, options, Reporter());
                              },
                              {.deadline = kHang});
}

namespace {

struct Row {
  std::int64_t step = 0;
  double loss = 0;
};

std::vector<Json> lines_of(const std::filesystem::path& path) {
  std::vector<Json> lines;
  const auto text = read_file(path);
  if (!text) return lines;
  std::istringstream stream(*text);
  for (std::string line; std::getline(stream, line);) lines.push_back(Json::parse(line));
  return lines;
}

std::vector<Row> rows_of(const std::filesystem::path& records) {
  std::vector<Row> rows;
  for (const Json& line : lines_of(records)) {
    rows.push_back({line.at("step").get<std::int64_t>(), line.at("loss").get<double>()});
  }
  return rows;
}

std::string loss_digest(const observe::RunFolder& run) {
  const auto text = read_file(run.summary());
  return text ? Json::parse(*text).at("runs").at(0).at("loss_digest").get<std::string>() : "none";
}

std::map<std::int64_t, std::vector<std::string>> checkpoints_of(const observe::RunFolder& run) {
  std::map<std::int64_t, std::vector<std::string>> digests;
  const auto folders = checkpoint::list_checkpoints(run.checkpoints());
  EXPECT_TRUE(folders) << folders.error().message;
  if (!folders) return digests;
  for (const auto& folder : *folders) {
    const auto manifest = checkpoint::verify(folder.path);
    EXPECT_TRUE(manifest) << manifest.error().message;
    if (!manifest) continue;
    for (const auto& file : manifest->files) digests[folder.step].push_back(file.digest.hex());
  }
  return digests;
}

}  // namespace

std::vector<double> losses_of(const std::filesystem::path& run, int rank) {
  std::vector<double> losses;
  for (const Row& row : rows_of(observe::RunFolder(run).records_of(WorldRank(rank)))) {
    losses.push_back(row.loss);
  }
  return losses;
}

void expect_as_twin(const std::filesystem::path& run, const std::filesystem::path& twin, int first,
                    int changes) {
  const observe::RunFolder mine(run);
  const observe::RunFolder theirs(twin);
  EXPECT_EQ(loss_digest(mine), loss_digest(theirs));
  const std::vector<Row> wanted = rows_of(theirs.records_of(WorldRank(0)));
  ASSERT_FALSE(wanted.empty());

  // Who was a member in each step, as the events say.
  std::vector<int> members(static_cast<std::size_t>(first));
  std::iota(members.begin(), members.end(), 0);
  std::vector<std::vector<int>> at(wanted.size(), members);
  int sizes = 0;
  for (const Json& event : lines_of(mine.events())) {
    if (event.at("event") != "size") continue;
    ++sizes;
    EXPECT_EQ(event.at("ranks_before").get<std::vector<int>>(), members);
    members = event.at("ranks").get<std::vector<int>>();
    const auto step = event.at("step").get<std::size_t>();
    ASSERT_LT(step, at.size());
    std::fill(at.begin() + static_cast<std::ptrdiff_t>(step), at.end(), members);
  }
  EXPECT_EQ(sizes, changes);

  // Each has written down every step in which it was one, once, with the twin's loss.
  std::map<int, std::vector<std::int64_t>> steps;
  for (std::size_t step = 0; step < at.size(); ++step) {
    for (const int member : at[step]) steps[member].push_back(static_cast<std::int64_t>(step));
  }
  for (const auto& [member, expected] : steps) {
    std::vector<std::int64_t> found;
    for (const Row& row : rows_of(mine.records_of(WorldRank(member)))) {
      found.push_back(row.step);
      ASSERT_LT(row.step, std::ssize(wanted));
      EXPECT_EQ(row.loss, wanted[static_cast<std::size_t>(row.step)].loss)
          << "step " << row.step << " of rank " << member;
    }
    EXPECT_EQ(found, expected) << "rank " << member;
  }
  const auto checkpoints = checkpoints_of(mine);
  EXPECT_EQ(checkpoints, checkpoints_of(theirs));
  EXPECT_TRUE(checkpoints.empty() || checkpoints.contains(std::ssize(wanted)));
}

// Losses of the held-out data, by step.
std::map<std::int64_t, std::set<double>> validations_of(const observe::RunFolder& run) {
  std::map<std::int64_t, std::set<double>> found;
  for (const Json& event : lines_of(run.events())) {
    if (event.at("event") != "validation") continue;
    found[event.at("step").get<std::int64_t>()].insert(event.at("loss").get<double>());
  }
  return found;
}

void expect_as_twin_after_losses(const std::filesystem::path& run,
                                 const std::filesystem::path& twin, int unfinished) {
  const observe::RunFolder mine(run);
  const observe::RunFolder theirs(twin);
  EXPECT_EQ(loss_digest(mine), loss_digest(theirs));
  const std::vector<Row> wanted = rows_of(theirs.records_of(WorldRank(0)));
  ASSERT_FALSE(wanted.empty());
  std::set<std::int64_t> steps;
  std::error_code fault;
  for (const auto& file : std::filesystem::directory_iterator(mine.records(), fault)) {
    for (const Row& row : rows_of(file.path())) {
      steps.insert(row.step);
      ASSERT_LT(row.step, std::ssize(wanted));
      EXPECT_EQ(row.loss, wanted[static_cast<std::size_t>(row.step)].loss)
          << "step " << row.step << " in " << file.path().filename();
    }
  }
  EXPECT_EQ(std::ssize(steps), std::ssize(wanted)) << "steps in the records";
  EXPECT_EQ(validations_of(mine), validations_of(theirs));
  const auto checkpoints = checkpoints_of(mine);
  const auto twins = checkpoints_of(theirs);
  for (const auto& [step, digests] : checkpoints) {
    EXPECT_TRUE(twins.contains(step) && twins.at(step) == digests) << "checkpoint of step " << step;
  }
  EXPECT_GE(std::ssize(checkpoints) + unfinished, std::ssize(twins));
  EXPECT_TRUE(twins.empty() || checkpoints.contains(std::ssize(wanted))) << "the last checkpoint";
}

void write_tokens(const std::filesystem::path& prefix, int vocabulary) {
  auto writer = data::TokenShardWriter::create(prefix);
  ASSERT_TRUE(writer);
  Rng rng(5);
  std::vector<std::int32_t> tokens(4000);
  for (std::int32_t& token : tokens) {
    token = static_cast<std::int32_t>(rng.below(static_cast<std::uint64_t>(vocabulary)));
  }
  ASSERT_TRUE(writer->append(tokens));
  writer->end_document();
  ASSERT_TRUE(writer->finish());
}

}  // namespace dynmo::train::testing
