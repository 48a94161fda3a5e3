// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/rank_process.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "dynmo/core/check.h"
#include "dynmo/core/exception_error.h"
#include "dynmo/data/sampler.h"
#include "dynmo/process/launcher.h"
#include "dynmo/process/processors.h"
#include "dynmo/process/rank_environment.h"
#include "dynmo/runtime/c10d_transport.h"
#include "dynmo/runtime/cuda.h"
#include "dynmo/runtime/nccl_transport.h"
#include "dynmo/train/inputs.h"
#include "dynmo/train/run.h"
#include "dynmo/train/run_lock.h"

namespace dynmo::train {
namespace {

// Set for the ranks of a launcher, which holds the locks of their run.
constexpr const char* kLockedByLauncher = "DYNMO_RUN_LOCKED";

// The transport of a group that somebody else owns and ends.
class Borrowed final : public transport::Transport {
 public:
  explicit Borrowed(transport::Transport& group) : group_(group) {}
  transport::Member rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  std::unique_ptr<transport::Operation> send(transport::Member to, transport::Tag tag,
                                             std::span<const std::byte> bytes) override {
    return group_.send(to, tag, bytes);
  }
  std::unique_ptr<transport::Operation> receive(transport::Member from, transport::Tag tag,
                                                std::span<std::byte> bytes) override {
    return group_.receive(from, tag, bytes);
  }
  void abort(const Error& why) override { group_.abort(why); }

 private:
  transport::Transport& group_;
};

// Exceptions of libtorch and failed checks become the run's error here, so that the others learn of
// it.
Expected<void> train_guarded(transport::Transport& transport, const TrainOptions& options,
                             const Reporter& reporter) {
  try {
    RunLocks locks;
    if (transport.rank() == transport::Member(0) && std::getenv(kLockedByLauncher) == nullptr) {
      DYNMO_ASSIGN(locks, lock_run(options));
    }
    return train(transport, options, reporter);
  } catch (const CheckFailure& failure) {
    return make_error(ErrorCode::kInternal, "{}", failure.what());
  } catch (const data::ForeignShard& fault) {
    return make_error(ErrorCode::kBadInput, "{}", fault.what());
  } catch (const std::exception& fault) {
    return error_of(fault);
  }
}

}  // namespace

Expected<bool> is_rank_process() {
  DYNMO_ASSIGN(const auto environment, process::rank_environment());
  return environment.has_value();
}

Expected<void> run_rank(const RankProcess& process) {
  DYNMO_ASSIGN(const auto environment, process::rank_environment());
  DYNMO_CHECK(environment.has_value(), "a process that was started as a rank");
  // Before joining, which waits for all others.
  DYNMO_TRY(validate(process.options.config));
  DYNMO_TRY(pipeline_ranks(process.options.config, environment->size));
  TrainOptions train_options = process.options;
  at::Device& device = train_options.rank_device.device;
  if (uses_cuda(train_options.config)) {
    DYNMO_ASSIGN(device, runtime::open_cuda(environment->local_rank));
  }
  at::set_num_threads(1);
  check_context().rank = environment->rank.value;
  runtime::GroupOptions options = runtime::group_options(*environment);
  options.message_timeout =
      std::chrono::milliseconds(std::llround(1e3 * process.options.config.pipeline.timeout_s));
  DYNMO_ASSIGN(const auto group, runtime::join_group(options));
  runtime::NcclTransport nccl;
  if (device.is_cuda()) {
    DYNMO_ASSIGN(nccl, runtime::connect_nccl(*group, options, device));
    train_options.rank_device.channels = nccl.channels.get();
    train_options.rank_device.text =
        fmt::format("{}: activations and gradients pass {}", device.str(),
                    nccl.channels ? "by NCCL" : "through host memory: " + nccl.why_not);
  }
  std::unique_ptr<transport::Transport> transport = std::make_unique<Borrowed>(*group);
  if (process.decorate) transport = process.decorate(std::move(transport));
  const Expected<void> done = train_guarded(*transport, train_options, process.reporter);
  // The communicators end while all their ranks are there; after a failure none waits for another.
  if (done.has_value()) {
    nccl.channels.reset();
    return group->leave();
  }
  group->abort(done.error());
  if (nccl.channels) nccl.channels->abort(done.error());
  return done.error();
}

int ranks_to_start(const Config& config) {
  if (config.pipeline.ranks > 0) return static_cast<int>(config.pipeline.ranks);
  const auto replicas = static_cast<int>(config.pipeline.replicas);
  return std::clamp(process::usable_processors().usable() / replicas, replicas > 1 ? 1 : 2, 4);
}

Expected<std::string> say_dry_run(const TrainOptions& options) {
  DYNMO_ASSIGN(const auto environment, process::rank_environment());
  if (environment && environment->rank != WorldRank(0)) return std::string();
  DYNMO_TRY(validate(options.config));
  TrainOptions here = options;
  if (uses_cuda(here.config)) {
    DYNMO_ASSIGN(here.rank_device.device, runtime::open_cuda(0));
  }
  at::set_num_threads(1);
  if (!environment) return dry_run(here, ranks_to_start(here.config));
  DYNMO_ASSIGN(const int ranks, pipeline_ranks(here.config, environment->size));
  return dry_run(here, ranks);
}

Expected<int> launch(const TrainOptions& options, const std::vector<std::string>& command) {
  DYNMO_TRY(validate(options.config));
  const int ranks = ranks_to_start(options.config);
  // A folder that is there may belong to a run that goes on: its checkpoints are then not to be
  // judged.
  std::error_code fault;
  RunLocks locks;
  if (std::filesystem::exists(options.config.run.directory, fault)) {
    DYNMO_ASSIGN(locks, lock_run(options));
  }
  {
    DYNMO_ASSIGN(const Inputs inputs, check_inputs(options, ranks));
    if (!uses_cuda(options.config)) DYNMO_TRY(check_host_memory(inputs, options.config));
  }
  if (locks.empty()) {
    DYNMO_ASSIGN(locks, lock_run(options));
  }
  if (uses_cuda(options.config)) DYNMO_TRY(runtime::load_cuda());
  const int world = ranks * static_cast<int>(options.config.pipeline.replicas);
  process::LaunchOptions launch_options{
      .ranks = world, .command = command, .environment = {{kLockedByLauncher, "1"}}};
  if (options.config.pipeline.pin) {
    const std::vector<int> cores = process::usable_processors().to_pin();
    if (static_cast<int>(cores.size()) >= world) launch_options.cores = cores;
  }
  return process::launch_ranks(launch_options);
}

}  // namespace dynmo::train
