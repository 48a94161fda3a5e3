// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/rank_process.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>

#include "dynmo/c10d/c10d_transport.h"
#include "dynmo/c10d/device_kinds.h"
#include "dynmo/core/check.h"
#include "dynmo/elastic/job_file.h"
#include "dynmo/kernels/device/launcher.h"
#include "dynmo/observe/table.h"
#include "dynmo/process/late_ranks.h"
#include "dynmo/process/launcher.h"
#include "dynmo/process/processors.h"
#include "dynmo/process/rank_environment.h"
#include "dynmo/process/sockets.h"
#include "dynmo/runtime/side_copies.h"
#include "dynmo/train/c10d_groups.h"
#include "dynmo/train/losses.h"
#include "dynmo/train/rank_devices.h"
#include "dynmo/train/run.h"
#include "dynmo/train/setup/dry_run.h"
#include "dynmo/train/setup/earlier_run.h"
#include "dynmo/train/setup/rank_log.h"
#include "dynmo/train/setup/resolved_run.h"

namespace dynmo::train {
namespace {

// Takes the run's locks on rank 0, unless a launcher holds them.
Expected<RunLocks> locks_of(WorldRank rank, const TrainOptions& options) {
  if (rank != WorldRank(0) || std::getenv(kLockedByLauncher) != nullptr) return RunLocks();
  return lock_run(options);
}

// Returns kBadInput if elastic.listen has an address, but another program has started the ranks,
// which then meet at MASTER_ADDR.
Expected<void> check_meets_elsewhere(const config::Config& config) {
  if (own_meeting_address(config).empty() || std::getenv(kLockedByLauncher) != nullptr) return {};
  return make_error(ErrorCode::kBadInput,
                    "elastic.listen is {}, wanted auto or loopback: `dynmo train` has not started "
                    "these ranks, so they meet at MASTER_ADDR, where auto listens",
                    config.elastic.listen);
}

// Returns whether the config asks for another number of ranks than a launcher has started.
bool asks_for_others(const config::Config& config, const process::RankEnvironment& environment) {
  const std::int64_t asked = config.pipeline.ranks * config.pipeline.replicas;
  const bool same = config.pipeline.ranks == 0 || asked == environment.size;
  return !same && std::getenv(kLockedByLauncher) == nullptr;
}

Expected<void> check_meets_here(const std::string& address) {
  const auto own = process::check_own_address(address);
  if (own) return {};
  return make_error(ErrorCode::kBadInput,
                    "elastic.listen: {}; wanted auto, loopback or an address of this host",
                    own.error().message);
}

}  // namespace

Expected<bool> is_rank_process() {
  DYNMO_ASSIGN(const auto environment, process::rank_environment());
  return environment.has_value();
}

Expected<void> check_asked_ranks(const config::Config& config) {
  DYNMO_ASSIGN(const auto environment, process::rank_environment());
  if (!environment || !asks_for_others(config, *environment)) return {};
  return make_error(ErrorCode::kBadInput,
                    "-n (pipeline.ranks) is {}, but a launcher has started {} (RANK is set), and "
                    "-n counts what `dynmo train` starts: wanted no -n, or a launcher that starts "
                    "{}",
                    config.pipeline.ranks, observe::format_count(environment->size, "rank"),
                    config.pipeline.ranks * config.pipeline.replicas);
}

Expected<void> open_rank_device(ValidOptions& options, int local_rank) {
  if (!on_device(options.config())) return {};
  const c10d::DeviceKind kind = c10d::device_kind(options.config().run.device);
  TrainOptions::RankDevice opened;
  const auto determinism = options.config().run.deterministic ? c10d::Determinism::kDemanded
                                                              : c10d::Determinism::kNotDemanded;
  DYNMO_ASSIGN(opened.device, kind.open(local_rank, determinism));
  DYNMO_CHECK(opened.device.type() == kind.type, "a device of '{}', got {}", kind.name,
              opened.device.str());
  opened.copies = std::make_shared<runtime::SideCopies>(opened.device);
  if (kind.memory != nullptr) opened.memory = kind.memory(opened.device);
  kernels::device::use_kernels(options.config().run.fused_kernels);
  opened.no_kernels = kernels::device::why_no_kernels(opened.device);
  options.use(std::move(opened));
  return {};
}

namespace {

// Does the work of the rank, with a log.
Expected<void> run_logged(const RankProcess& process, ValidOptions valid,
                          const process::RankEnvironment& environment, const Reporter& reporter) {
  const config::Config& config = valid.config();
  DYNMO_TRY(open_rank_device(valid, environment.local_rank));
  at::set_num_threads(1);
  check_context().rank = environment.rank.value;
  c10d::GroupOptions options = c10d::group_options(environment);
  const MessageLimits limits = message_limits(config);
  options.message_timeout = limits.message;
  options.silence = limits.silence;
  leave_on_sigterm();
  auto joined = C10dGroups::join(options, this_member(), process.decorate, limits.hang,
                                 connects_devices(valid));
  if (!joined) {
    return config.elastic.enabled ? named_as_early(joined.error()) : joined.error();
  }
  process::tell_launcher_met(environment.rank.value);
  const std::unique_ptr<C10dGroups> groups = *std::move(joined);
  use_devices_of(*groups, valid);
  if (environment.rank == WorldRank(0) && asks_for_others(config, environment)) {
    reporter.say(
        fmt::format("ranks    {} of the launcher: pipeline.ranks = {} counts ranks that `dynmo "
                    "train` starts",
                    environment.size, config.pipeline.ranks));
  }
  return in_groups(*groups, [&]() -> Expected<void> {
    DYNMO_ASSIGN(const RunLocks locks, locks_of(environment.rank, valid.options()));
    return train(*groups, valid, reporter);
  });
}

}  // namespace

Expected<void> run_rank(const RankProcess& process) {
  DYNMO_ASSIGN(const auto environment, process::rank_environment());
  DYNMO_CHECK(environment.has_value(), "a process that was started as a rank");
  // Before joining, because that waits for all other ranks.
  DYNMO_ASSIGN(const ValidOptions valid, validated(process.options));
  DYNMO_TRY(check_meets_elsewhere(valid.config()));
  DYNMO_TRY(pipeline_ranks(valid.config(), environment->size));
  LoggedReporter logged(process.reporter);
  DYNMO_TRY(logged.open(valid.config(), environment->rank,
                        process_text(valid.options(), environment->rank, environment->size)));
  const Expected<void> done = run_logged(process, valid, *environment, logged.reporter());
  logged.end(done);
  return done;
}

int ranks_to_start(const config::Config& config) {
  if (config.pipeline.ranks > 0) return static_cast<int>(config.pipeline.ranks);
  const auto replicas = static_cast<int>(config.pipeline.replicas);
  return std::clamp(process::usable_processors().usable() / replicas, replicas > 1 ? 1 : 2, 4);
}

Expected<std::string> dry_run_text(const TrainOptions& options,
                                   const std::optional<cost::Cluster>& cluster) {
  DYNMO_ASSIGN(const auto environment, process::rank_environment());
  if (environment && environment->rank != WorldRank(0)) return std::string();
  DYNMO_ASSIGN(ValidOptions here, validated(options));
  const config::Config& config = here.config();
  DYNMO_TRY(open_rank_device(here, 0));
  at::set_num_threads(1);
  const std::int64_t wanted = config.pipeline.ranks;
  if (cluster && wanted > 0 && wanted != cluster->size()) {
    return make_error(ErrorCode::kBadInput,
                      "the cluster has {} ranks, pipeline.ranks (-n) is {}: wanted the same",
                      cluster->size(), wanted);
  }
  int ranks = ranks_to_start(config);
  if (environment) {
    DYNMO_ASSIGN(ranks, pipeline_ranks(config, environment->size));
  }
  return dry_run(here, cluster.value_or(cost::equal_ranks(ranks)));
}

Expected<int> launch(const TrainOptions& options, const std::vector<std::string>& command,
                     const std::vector<std::string>& late_command) {
  DYNMO_ASSIGN(const ValidOptions valid, validated(options));
  const config::Config& config = valid.config();
  const std::string meeting_address = own_meeting_address(config);
  if (!meeting_address.empty()) DYNMO_TRY(check_meets_here(meeting_address));
  std::string meets_at = meeting_address;
  if (meets_at.empty()) {
    DYNMO_ASSIGN(meets_at, process::loopback_address());
  }
  const int ranks = ranks_to_start(config);
  // An existing folder may belong to an active run, whose checkpoints must not be checked.
  std::error_code fault;
  RunLocks locks;
  if (std::filesystem::exists(config.run.directory, fault)) {
    DYNMO_ASSIGN(locks, lock_run(options));
  }
  {
    DYNMO_ASSIGN(const ResolvedRun run, resolve_for(valid, ranks));
    if (!on_device(config)) DYNMO_TRY(check_host_memory(run));
  }
  DYNMO_TRY(check_folder_is_free(options));
  DYNMO_TRY(check_log_folder(config));
  if (locks.empty()) {
    DYNMO_ASSIGN(locks, lock_run(options));
  }
  if (on_device(config)) {
    DYNMO_TRY(c10d::device_kind(config.run.device).load());
  }
  const int world = ranks * static_cast<int>(config.pipeline.replicas);
  process::LaunchOptions launch_options{
      .ranks = world, .command = command, .environment = {{kLockedByLauncher, "1"}}};
  launch_options.address = meets_at;
  if (config.elastic.enabled) {
    launch_options.late_command = late_command;
    launch_options.survives = true;
    launch_options.all_report = true;  // any rank may become leader
  }
  if (config.pipeline.pin) {
    const std::vector<int> cores = process::usable_processors().to_pin();
    if (static_cast<int>(cores.size()) >= world) launch_options.cores = cores;
  }
  auto code = process::launch_ranks(launch_options);
  // A leader that was killed has left the file with its endpoint.
  elastic::remove_job_of_ended(config.run.directory);
  return code;
}

}  // namespace dynmo::train
