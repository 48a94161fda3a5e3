// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/late_ranks.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <string>

namespace dynmo::process {
namespace {

constexpr int kMaxAtOnce = 4096;
constexpr std::string_view kWanted = "wanted ";
constexpr std::string_view kJoined = "joined ";

// The whole number that the text begins with, which is taken off it.
std::optional<int> take_number(std::string_view& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

bool tell(const std::string& text) {
  const char* name = std::getenv(kLauncherFd);
  std::string_view rest = name == nullptr ? "" : name;
  const auto fd = take_number(rest);
  return fd && rest.empty() &&
         send(*fd, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

}  // namespace

Expected<void> ask_for_ranks(int ranks) {
  if (ranks < 1 || ranks > kMaxAtOnce) {
    return make_error(ErrorCode::kBadInput, "{} ranks are asked for, wanted 1 to {}", ranks,
                      kMaxAtOnce);
  }
  if (tell(fmt::format("{}{}", kWanted, ranks))) return {};
  return make_error(ErrorCode::kBadInput,
                    "`dynmo train` has not started the rank that leads: wanted `dynmo train "
                    "--join RUN` on the host of each new rank");
}

void tell_launcher_joined(int number) { tell(fmt::format("{}{} {}", kJoined, getpid(), number)); }

std::optional<LaunchRequest> parse_launch_request(std::string_view text) {
  if (text.starts_with(kWanted)) {
    text.remove_prefix(kWanted.size());
    const auto ranks = take_number(text);
    if (!ranks || !text.empty() || *ranks < 1 || *ranks > kMaxAtOnce) return std::nullopt;
    return WantedRanks{*ranks};
  }
  if (!text.starts_with(kJoined)) return std::nullopt;
  text.remove_prefix(kJoined.size());
  const auto pid = take_number(text);
  if (!pid || !text.starts_with(' ')) return std::nullopt;
  text.remove_prefix(1);
  const auto number = take_number(text);
  if (!number || !text.empty()) return std::nullopt;
  return JoinedRank{.pid = *pid, .number = *number};
}

}  // namespace dynmo::process
