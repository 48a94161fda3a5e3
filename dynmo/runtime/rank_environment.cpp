// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/rank_environment.h"

#include <array>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <string_view>

namespace dynmo::runtime {
namespace {

constexpr int kMostRanks = 1 << 20;

struct Names {
  const char* rank;
  const char* size;
  const char* local_rank;
};

constexpr std::array<Names, 4> kLaunchers = {{
    {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"},
}};

bool is_set(const GetVariable& get, const char* name) {
  const char* value = get(name);
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

// The names under which rank and size are given; torchrun's where none are.
const Names& names_in_use(const GetVariable& get) {
  if (is_set(get, "RANK") || is_set(get, "WORLD_SIZE")) return kLaunchers[0];
  for (const Names& names : kLaunchers) {
    if (is_set(get, names.rank) && is_set(get, names.size)) return names;
  }
  return kLaunchers[0];
}

Expected<void> require(const GetVariable& get, const Names& names) {
  std::string missing;
  std::string given;
  for (const char* name : {names.rank, names.size, "MASTER_ADDR", "MASTER_PORT"}) {
    std::string& list = is_set(get, name) ? given : missing;
    list += (list.empty() ? "" : ", ") + std::string(name);
  }
  if (missing.empty()) return {};
  return make_error(ErrorCode::kBadInput,
                    "the environment has {} but not {}: set all of them to join ranks that were "
                    "started elsewhere, or none to start the ranks here",
                    given, missing);
}

}  // namespace

Expected<std::optional<RankEnvironment>> rank_environment(const GetVariable& get) {
  if (!is_set(get, "RANK") && !is_set(get, "WORLD_SIZE") && !is_set(get, "MASTER_ADDR") &&
      !is_set(get, "MASTER_PORT")) {
    return std::optional<RankEnvironment>();
  }
  const Names& names = names_in_use(get);
  DYNMO_TRY(require(get, names));
  RankEnvironment result;
  DYNMO_ASSIGN(result.size, integer(get, names.size, 1, kMostRanks));
  DYNMO_ASSIGN(const int rank, integer(get, names.rank, 0, result.size - 1));
  result.rank = Rank(rank);
  result.local_rank = rank;
  if (is_set(get, names.local_rank)) {
    DYNMO_ASSIGN(result.local_rank, integer(get, names.local_rank, 0, kMostRanks));
  }
  result.address = get("MASTER_ADDR");
  DYNMO_ASSIGN(const int port, integer(get, "MASTER_PORT", 1, 65535));
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

}  // namespace dynmo::runtime
