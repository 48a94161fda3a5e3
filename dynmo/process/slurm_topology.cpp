// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/slurm_topology.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string_view>

namespace dynmo::process {
namespace {

constexpr std::string_view kAddress = "SLURM_TOPOLOGY_ADDR";
constexpr std::string_view kPattern = "SLURM_TOPOLOGY_ADDR_PATTERN";
constexpr std::size_t kMaxBytes = 4096;

// The text before the `count`-th dot; nullopt: there are fewer.
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
  // Names of hosts may have dots, so the switches are what the pattern has before the host.
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
