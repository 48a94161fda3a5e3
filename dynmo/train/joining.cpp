// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <thread>
#include <utility>

#include "dynmo/c10d/device_kinds.h"
#include "dynmo/core/check.h"
#include "dynmo/elastic/job_file.h"
#include "dynmo/process/late_ranks.h"
#include "dynmo/process/line_server.h"
#include "dynmo/process/rank_environment.h"
#include "dynmo/train/c10d_groups.h"
#include "dynmo/train/rank_devices.h"
#include "dynmo/train/rank_process.h"
#include "dynmo/train/run.h"
#include "dynmo/train/setup/leader_options.h"
#include "dynmo/train/setup/rank_log.h"
#include "dynmo/train/setup/resolved_run.h"

namespace dynmo::train {
namespace {

using process::LineClient;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kConnect{5000};
constexpr std::chrono::milliseconds kAnswer{60000};  // the leader may have to read its data first
// Time that a newcomer waits for a place, which may never come.
constexpr std::chrono::hours kStandby{24 * 365};
constexpr std::chrono::milliseconds kLook{50};
constexpr std::chrono::milliseconds kJoinTime{20000};
constexpr int kTries = 3;

Expected<elastic::Reply> hear(LineClient& leader, std::chrono::milliseconds time) {
  auto line = leader.receive(elastic::kMaxReply, time);
  if (!line) {
    return make_error(ErrorCode::kPeerLost, "the run's leader does not answer: {}",
                      line.error().message);
  }
  return elastic::parse_reply(*line);
}

// Returns the leader's answer, whether it agrees or not.
Expected<elastic::Reply> ask(const elastic::ControlEndpoint& where, const elastic::Request& request,
                             LineClient& leader) {
  auto connected = LineClient::connect(where.address, where.port, kConnect);
  if (!connected) {
    return make_error(ErrorCode::kPeerLost, "no run listens at {}:{}: {}", where.address,
                      where.port, connected.error().message);
  }
  leader = *std::move(connected);
  DYNMO_TRY(leader.send(to_line(request)));
  return hear(leader, kAnswer);
}

// Checks that this folder is the run's. In another folder with the same name, records and a
// leader's files would never be found.
Expected<void> check_is_here(const std::string& folder, const elastic::ControlEndpoint& where) {
  const auto secret = elastic::read_secret(elastic::secret_path(folder));
  if (secret && elastic::same_secret(*secret, where.secret)) return {};
  return make_error(ErrorCode::kBadInput,
                    "'{}' is not the folder of the run at {}:{} here: wanted `dynmo train --join "
                    "FOLDER`, where it lies on this host, on storage that all hosts of the run see",
                    folder, where.address, where.port);
}

// Returns the logs' folder in this host's paths, if it is inside the run's folder.
std::string moved_with(const std::string& log, const std::filesystem::path& from,
                       const std::filesystem::path& to) {
  if (log.empty()) return log;
  const std::filesystem::path inside =
      std::filesystem::path(log).lexically_normal().lexically_relative(from.lexically_normal());
  return inside.empty() || *inside.begin() == ".." ? log : (to / inside).string();
}

// Returns the time to wait for another leader after a killed one: a little more than the other
// ranks may need to meet again.
std::chrono::seconds next_leader_time(const config::Config& config) {
  constexpr std::chrono::seconds kMore{10};
  return kSurviveTime + kMore + std::chrono::seconds(std::llround(config.pipeline.timeout_s));
}

// Sets `where` to the leader to ask next, after one said `said`. Returns false if there is none.
bool find_next(const JoinOptions& join, const Expected<elastic::Reply>& said,
               Clock::time_point until, elastic::ControlEndpoint& where) {
  // A leader that leaves names the next one, whose endpoint is already written.
  const auto now = said && said->leader ? elastic::endpoint_of(*said->leader, where.secret)
                                        : elastic::find_leader(join.run, join.secret_file);
  // After a leader was killed, the files name it until the next one leads.
  const bool may_come = now && !said && Clock::now() < until;
  if (!may_come && (!now || now->is_at(where))) return false;
  if (now->is_at(where)) std::this_thread::sleep_for(kLook);
  where = *now;
  return true;
}

// Returns the run's settings as text. `where` follows the leader if it changes.
Expected<std::string> settings_of_run(const JoinOptions& join, const TrainOptions& options,
                                      elastic::ControlEndpoint& where) {
  // If the run has asked for this process, it goes on, or the launcher ends this process.
  auto until = Clock::now();
  if (process::has_launcher()) until += next_leader_time(options.config);
  while (true) {
    LineClient leader;
    const auto said =
        ask(where, {.kind = elastic::RequestKind::kConfig, .secret = where.secret}, leader);
    if (said && said->done) return said->text;
    const Error why = said ? Error{said->code, said->text} : said.error();
    if (!find_next(join, said, until, where)) return why;
  }
}

// Returns the options of a newcomer: the run's settings, and its own paths.
Expected<ValidOptions> options_in_run(elastic::ControlEndpoint& where, const JoinOptions& join,
                                      TrainOptions options) {
  DYNMO_ASSIGN(const std::string settings, settings_of_run(join, options, where));
  config::Config& config = options.config;
  config = {};
  DYNMO_TRY(apply_text(config, settings, "the run's settings"));
  if (!join.data.empty()) config.data.path = join.data;
  // The run's folder may have another path here. Records of this rank are written there.
  std::error_code fault;
  if (std::filesystem::is_directory(join.run, fault)) {
    config.run.log = moved_with(config.run.log, config.run.directory, join.run);
    config.run.directory = join.run;
  } else {
    DYNMO_TRY(check_is_here(config.run.directory, where));
  }
  return validated(std::move(options));
}

// Checks that the device of a newcomer has the kernels that the run's ranks compute with.
Expected<void> check_kernels(const ResolvedRun& run) {
  const std::string& why = run.options().rank_device.no_kernels;
  if (why.empty() || !run.config().run.fused_kernels) return {};
  return make_error(ErrorCode::kBadInput,
                    "the ranks of the run compute with kernels of their own, and this one cannot: "
                    "{}: wanted the same kernels, or a run with run.fused_kernels = false",
                    why);
}

// Waits until the run gives this process a place. `where` follows the leader if it changes.
Expected<elastic::Place> stand_by(const JoinOptions& join, const elastic::Request& request,
                                  const Reporter& reporter, std::chrono::seconds patience,
                                  elastic::ControlEndpoint& where, LineClient& leader) {
  auto until = Clock::now() + patience;
  while (true) {
    auto said = ask(where, request, leader);
    if (said && said->done) {
      reporter.line(said->text);
      said = hear(leader, kStandby);
      until = Clock::now() + patience;
    }
    if (said && said->place) return *said->place;
    if (said && said->done) {
      return make_error(ErrorCode::kPeerLost, "the run's leader gave no place: {}", said->text);
    }
    const Error why = said ? Error{said->code, said->text} : said.error();
    if (!find_next(join, said, until, where)) return why;
  }
}

c10d::GroupOptions group_at(const elastic::Place& place, const config::Config& config) {
  c10d::GroupOptions group;
  group.rank = place.rank;
  group.size = place.size;
  group.generation = place.generation;
  group.names = place.numbers;
  group.meeting_place = meeting_place(place);
  group.join_timeout = kJoinTime;
  const MessageLimits limits = message_limits(config);
  group.message_timeout = limits.message;
  group.silence = limits.silence;
  return group;
}

// Joins a run. Sets `taken` once this process is a rank.
Expected<void> join_run(const JoinOptions& join, const RankProcess& process, bool& taken) {
  DYNMO_ASSIGN(elastic::ControlEndpoint where, elastic::find_leader(join.run, join.secret_file));
  DYNMO_ASSIGN(const ValidOptions valid, options_in_run(where, join, process.options));
  at::set_num_threads(1);
  elastic::Request request{.kind = elastic::RequestKind::kJoin, .secret = where.secret};
  DYNMO_ASSIGN(ResolvedRun run, resolve(valid));
  const config::Config& config = run.config();
  request.build = this_build(run);
  if (on_device(config)) DYNMO_TRY(c10d::device_kind(config.run.device).load());
  DYNMO_TRY(check_log_folder(config));
  // Tries several times: a group may fail because of another newcomer, or a broken route to a rank.
  const auto environment = process::rank_environment();
  const bool launched = environment && *environment;
  for (int tries = 1;; ++tries) {
    // In each try it is another member. Ranks that count the one before find that it has ended.
    elastic::Member self = this_member();
    request.newcomer = self;
    LineClient leader;
    DYNMO_ASSIGN(const elastic::Place place, stand_by(join, request, process.reporter,
                                                      next_leader_time(config), where, leader));
    // Member numbers continue those of the launcher, so that newcomers share the devices of a host.
    DYNMO_TRY(open_rank_device(run, launched ? (*environment)->local_rank : place.member));
    DYNMO_TRY(check_kernels(run));
    // Before this point the process may simply end. From here on other ranks depend on it, and
    // would lose it without notice.
    leave_on_sigterm();
    self.number = place.member;
    LoggedReporter logged(process.reporter);
    const Expected<void> opened =
        logged.open(config, WorldRank(place.member),
                    process_text(run.options(), WorldRank(place.member), place.size));
    if (!opened) {
      process.reporter.line(fmt::format("log      {}; training goes on", opened.error().message));
    }
    check_context().rank = place.rank.value;
    auto groups = C10dGroups::join(group_at(place, config), self, process.decorate,
                                   message_limits(config).hang, connects_devices(run));
    if (groups) use_devices_of(**groups, run);
    const auto note_taken = [&] {
      taken = true;
      leader = LineClient();
      process::tell_launcher_met(place.member);
      logged.reporter().say(fmt::format("joined as rank {}", place.member));
    };
    const auto work = [&] { return train::join(**groups, run, logged.reporter(), note_taken); };
    const Expected<void> done = groups ? in_groups(**groups, work) : groups.error();
    logged.end(done);
    if (taken || done || done.error().code != ErrorCode::kPeerLost) return done;
    if (end_on_sigterm()) {
      return make_error(ErrorCode::kInterrupted, "was asked to end before it had joined");
    }
    if (tries == kTries) {
      return make_error(ErrorCode::kPeerLost, "joined no group in {} tries: {}", tries,
                        done.error().message);
    }
    process.reporter.line(fmt::format("waits again: {}", done.error().message));
  }
}

}  // namespace

bool run_goes_on(const std::string& run) {
  const auto where = elastic::find_leader(run, "");
  LineClient leader;
  return where &&
         ask(*where, {.kind = elastic::RequestKind::kStatus, .secret = where->secret}, leader);
}

Expected<void> join_run(const JoinOptions& join, const RankProcess& process) {
  bool taken = false;
  auto done = join_run(join, process, taken);
  // The run may end while a requested process is still starting. That is no error.
  std::error_code fault;
  const bool ended = !std::filesystem::exists(elastic::job_path(join.run), fault);
  if (!done && !taken && ended && process::has_launcher()) return {};
  return done;
}

}  // namespace dynmo::train
