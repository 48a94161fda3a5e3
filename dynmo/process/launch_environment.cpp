// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>

#include "dynmo/process/late_ranks.h"
#include "dynmo/process/launch_environment_impl.h"
#include "dynmo/process/spawn_impl.h"

namespace dynmo::process {

std::vector<std::string> environment_of(const LaunchOptions& options, int requests,
                                        const Variables& place) {
  Variables set = options.environment;
  const auto set_unless_given = [&set](const char* name, const char* value) {
    const bool given = std::getenv(name) != nullptr ||
                       std::ranges::any_of(set, [&](const auto& one) { return one.first == name; });
    if (!given) set.emplace_back(name, value);
  };
  set_unless_given("OMP_NUM_THREADS", "1");
  set_unless_given("MKL_NUM_THREADS", "1");
  set.emplace_back("TORCHELASTIC_USE_AGENT_STORE", "");
  set.emplace_back(kLauncherFd, requests >= 0 ? std::to_string(requests) : "");
  set.insert(set.end(), place.begin(), place.end());
  return environment_with(set);
}

Variables place_of(const LaunchOptions& options, int rank, const UniqueFd& store) {
  return {{"RANK", std::to_string(rank)},
          {"LOCAL_RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(options.ranks)},
          {"MASTER_ADDR", options.address},
          {"MASTER_PORT", std::to_string(local_port(store))},
          {"DYNMO_STORE_FD", rank == 0 ? std::to_string(store.get()) : ""}};
}

Variables no_place() {
  Variables none;
  for (const char* name :
       {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DYNMO_STORE_FD"}) {
    none.emplace_back(name, "");
  }
  return none;
}

}  // namespace dynmo::process
