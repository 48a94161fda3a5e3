// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/leader_options.h"

#include <ATen/Parallel.h>
#include <torch/version.h>

#include <chrono>
#include <cmath>
#include <string>

#include "dynmo/core/digest.h"
#include "dynmo/core/files.h"
#include "dynmo/kernels/processor.h"
#include "dynmo/process/sockets.h"

namespace dynmo::train {

elastic::Build this_build(const ResolvedRun& run) {
  config::Config decides = run.config();
  decides.data.path = decides.data.validation_path = decides.run.directory = decides.run.log = "";
  const auto program = read_file("/proc/self/exe");
  return {.program = program ? digest_of(*program).hex() : "unknown",
          .libtorch = TORCH_VERSION,
          .instruction_set = kernels::instruction_set_name(),
          .threads = at::get_num_threads(),
          .config = digest_of(to_toml(decides)).hex(),
          .data = run.batches().fingerprint()};
}

elastic::SizeOptions size_options(const config::Config& config) {
  const config::Config::Elastic& elastic = config.elastic;
  return {.pack_ranks = static_cast<int>(elastic.pack_ranks),
          .release_after = elastic.release_after,
          .ranks_min = static_cast<int>(elastic.ranks_min)};
}

// Returns the leader's options. If elastic.listen has an address, it is that of the host where the
// run began. So the leader listens at the address of its own host instead.
elastic::Leader::Options leader_options(const elastic::Groups& groups, const elastic::Member& self,
                                        const ResolvedRun& run) {
  const config::Config& config = run.config();
  const std::string meets_at = groups.address();
  elastic::Leader::Options options;
  options.service = {.run = config.run.directory,
                     .group_address = meets_at,
                     .leader = self,
                     .config = to_toml(config),
                     .build = [&run] { return this_build(run); },
                     .replicas = static_cast<int>(config.pipeline.replicas)};
  if (config.elastic.listen != "loopback") {
    options.service.address = meets_at;
  } else if (const auto loopback = process::loopback_address()) {
    options.service.address = *loopback;
  }
  options.releases = {
      .command = config.elastic.release_command,
      .timeout = std::chrono::milliseconds(std::llround(1e3 * config.elastic.release_timeout_s)),
      .run = config.run.directory};
  return options;
}

}  // namespace dynmo::train
