// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/rank_environment.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string_view>

#include "dynmo/process/sockets.h"

namespace dynmo::process {
namespace {

constexpr int kMaxRanks = 1 << 20;

// The variables by which a launcher gives a process its place. A name is null if the launcher has
// no variable for that value.
struct Names {
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
  const char* job;    // differs between launches that may share a host
  const char* step;   // number within the job
  const char* hosts;  // rank 0 runs on the first
  const char* say;    // how a user sets MASTER_ADDR
};

constexpr Names kTorchrun = {"RANK",  "WORLD_SIZE", "LOCAL_RANK", nullptr,
                             nullptr, nullptr,      nullptr,      nullptr};
// If mpirun runs within Slurm, it starts its daemons by srun, on all hosts but its own. The
// variables of the Slurm step describe the daemons, not the ranks.
constexpr std::array<Names, 3> kOthers = {{
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE", nullptr, "SLURM_JOB_NODELIST",
     "mpirun -x MASTER_ADDR=HOST"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID", nullptr,
     "SLURM_STEP_NODELIST", "mpiexec -genv MASTER_ADDR HOST"},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr, "SLURM_JOB_ID",
     "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "MASTER_ADDR=HOST srun"},
}};

bool is_set(const GetVariable& get, const char* name) {
  const char* value = name == nullptr ? nullptr : get(name);
  return value != nullptr && *value != '\0';
}

Expected<int> integer(const GetVariable& get, const char* name, int low, int high) {
  const std::string_view text = get(name);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    return make_error(ErrorCode::kBadInput,
                      "the environment has {}='{}', wanted a whole number from {} to {}", name,
                      text, low, high);
  }
  return value;
}

// Returns the variables that give this process's rank, or null if it was not started as a rank.
Expected<const Names*> names_in_use(const GetVariable& get) {
  if (is_set(get, "RANK") || is_set(get, "WORLD_SIZE")) return &kTorchrun;
  for (const Names& names : kOthers) {
    if (!is_set(get, names.rank) || !is_set(get, names.size)) continue;
    DYNMO_ASSIGN(const int size, integer(get, names.size, 1, kMaxRanks));
    // Later names are not examined, because they may belong to the launcher's own helpers.
    return size > 1 ? &names : nullptr;
  }
  const bool has_place = is_set(get, "MASTER_ADDR") || is_set(get, "MASTER_PORT");
  // A batch script sets these for the srun that it calls.
  if (has_place && !is_set(get, "SLURM_JOB_ID")) return &kTorchrun;
  return nullptr;
}

Expected<void> require_all(const GetVariable& get) {
  std::string missing;
  std::string given;
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    std::string& list = is_set(get, name) ? given : missing;
    list += (list.empty() ? "" : ", ") + std::string(name);
  }
  if (missing.empty()) return {};
  return make_error(ErrorCode::kBadInput,
                    "the environment has {} but not {}: set all of them to join ranks that were "
                    "started elsewhere, or none to start the ranks here",
                    given, missing);
}

// Returns the first host of Slurm's list: "gpu01" for "gpu[01-03,07],login".
std::string first_host(std::string_view list) {
  const std::size_t end = list.find_first_of(",[");
  std::string host(list.substr(0, end));
  if (end == std::string_view::npos || list[end] == ',') return host;
  list.remove_prefix(end + 1);
  host += list.substr(0, list.find_first_of("-,]"));
  const std::size_t close = list.find(']');
  if (close == std::string_view::npos) return host;
  list.remove_prefix(close + 1);  // what follows the brackets: a domain
  host += list.substr(0, list.find_first_of(",["));
  return host;
}

bool is_on_one_host(const GetVariable& get, const Names& names, int size) {
  if (is_set(get, names.local_size)) return get(names.local_size) == std::to_string(size);
  return is_set(get, "SLURM_STEP_NUM_NODES") &&
         std::string_view(get("SLURM_STEP_NUM_NODES")) == "1";
}

Expected<std::string> address_of(const GetVariable& get, const Names& names, int size) {
  if (is_set(get, "MASTER_ADDR")) return std::string(get("MASTER_ADDR"));
  if (is_on_one_host(get, names, size)) return loopback_address();
  if (is_set(get, names.hosts)) return first_host(get(names.hosts));
  return make_error(ErrorCode::kBadInput,
                    "the environment has {} and {} but does not say where rank 0 is: start the "
                    "ranks by '{} ...' with the name or number of its host",
                    names.rank, names.size, names.say);
}

// Returns the port. One from the job is below the ports that Linux assigns by itself (32768 and
// up).
Expected<int> port_of(const GetVariable& get, const Names& names) {
  if (is_set(get, "MASTER_PORT")) return integer(get, "MASTER_PORT", 1, 65535);
  std::uint64_t job = 0;
  for (const char* name : {names.job, names.step}) {
    const std::string_view text = is_set(get, name) ? get(name) : "";
    for (const char letter : text) job = 31 * job + static_cast<unsigned char>(letter);
  }
  return static_cast<int>(15000 + job % 15000);
}

}  // namespace

Expected<std::optional<RankEnvironment>> rank_environment(const GetVariable& get) {
  DYNMO_ASSIGN(const Names* const found, names_in_use(get));
  if (found == nullptr) return std::optional<RankEnvironment>();
  const Names& names = *found;
  if (found == &kTorchrun) DYNMO_TRY(require_all(get));
  RankEnvironment result;
  DYNMO_ASSIGN(result.size, integer(get, names.size, 1, kMaxRanks));
  DYNMO_ASSIGN(const int rank, integer(get, names.rank, 0, result.size - 1));
  result.rank = WorldRank(rank);
  result.local_rank = rank;
  if (is_set(get, names.local_rank)) {
    DYNMO_ASSIGN(result.local_rank, integer(get, names.local_rank, 0, kMaxRanks));
  }
  DYNMO_ASSIGN(result.address, address_of(get, names, result.size));
  DYNMO_ASSIGN(const int port, port_of(get, names));
  result.port = static_cast<std::uint16_t>(port);
  if (rank == 0 && is_set(get, "DYNMO_STORE_FD")) {
    DYNMO_ASSIGN(result.store_fd,
                 integer(get, "DYNMO_STORE_FD", 0, std::numeric_limits<int>::max()));
  }
  if (is_set(get, "TORCHELASTIC_USE_AGENT_STORE") &&
      std::string_view(get("TORCHELASTIC_USE_AGENT_STORE")) == "True") {
    result.store_host = StoreHost::kElsewhere;
    if (is_set(get, "TORCHELASTIC_RESTART_COUNT"))
      result.attempt = get("TORCHELASTIC_RESTART_COUNT");
  }
  return std::optional(result);
}

Expected<std::optional<RankEnvironment>> rank_environment() {
  return rank_environment([](const char* name) { return std::getenv(name); });
}

namespace {

constexpr std::string_view kAddress = "SLURM_TOPOLOGY_ADDR";
constexpr std::string_view kPattern = "SLURM_TOPOLOGY_ADDR_PATTERN";
constexpr std::size_t kMaxBytes = 4096;

// Returns the text before the `count`-th dot, or nullopt if there are fewer.
std::optional<std::string_view> before_dot(std::string_view text, std::ptrdiff_t count) {
  std::size_t end = 0;
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    end = text.find('.', i == 0 ? 0 : end + 1);
    if (end == std::string_view::npos) return std::nullopt;
  }
  return text.substr(0, end);
}

}  // namespace

Expected<std::string> switches_of_host(const GetVariable& get) {
  const auto value = [&](std::string_view name) -> std::string_view {
    const char* text = get(name.data());
    return text == nullptr ? std::string_view() : std::string_view(text);
  };
  const std::string_view address = value(kAddress);
  const std::string_view pattern = value(kPattern);
  if (address.empty() && pattern.empty()) return std::string();
  if (std::max(address.size(), pattern.size()) > kMaxBytes) {
    return make_error(ErrorCode::kBadInput, "{} and {} have {} and {} bytes, wanted at most {}",
                      kAddress, kPattern, address.size(), pattern.size(), kMaxBytes);
  }
  if (pattern != "node" && !pattern.ends_with(".node")) {
    return make_error(ErrorCode::kBadInput,
                      "{}='{}' with {}='{}', wanted a pattern that ends in 'node'", kAddress,
                      address, kPattern, pattern);
  }
  // Hosts' names may have dots, so the pattern's parts before the host give the number of switches.
  const std::ptrdiff_t levels = std::ranges::count(pattern, '.');
  const auto switches = before_dot(address, levels);
  const std::size_t host = switches && levels > 0 ? switches->size() + 1 : 0;
  if (!switches || host >= address.size()) {
    return make_error(ErrorCode::kBadInput,
                      "{}='{}' with {}='{}', wanted a part of the address for each of the pattern",
                      kAddress, address, kPattern, pattern);
  }
  return std::string(*switches);
}

Expected<std::string> switches_of_host() {
  return switches_of_host([](const char* name) { return std::getenv(name); });
}

}  // namespace dynmo::process
