// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/late_ranks.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <string>

namespace dynmo::process {
namespace {

constexpr int kMaxAtOnce = 4096;
constexpr std::string_view kWanted = "wanted ";
constexpr std::string_view kMet = "met ";
constexpr std::string_view kHook = "hook ";
constexpr std::string_view kEnded = "ended ";

// Removes the whole number with which the text begins, and returns it.
std::optional<int> take_number(std::string_view& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

// Returns the number if the text is `word` and a number.
std::optional<int> number_behind(std::string_view word, std::string_view text) {
  if (!text.starts_with(word)) return std::nullopt;
  text.remove_prefix(word.size());
  const auto number = take_number(text);
  return text.empty() ? number : std::nullopt;
}

std::optional<int> launcher_fd() {
  const char* name = std::getenv(kLauncherFd);
  return number_behind("", name == nullptr ? "" : name);
}

bool send_to(int fd, const std::string& text) {
  return send(fd, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

bool tell(const std::string& text) {
  const auto fd = launcher_fd();
  return fd && send_to(*fd, text);
}

}  // namespace

bool has_launcher() { return launcher_fd().has_value(); }

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

void tell_launcher_met(int number) { tell(fmt::format("{}{} {}", kMet, getpid(), number)); }

void tell_launcher_hook(pid_t pid) { tell(fmt::format("{}{}", kHook, pid)); }

void tell_leader_ended(int fd, int exit_code) {
  send_to(fd, fmt::format("{}{}", kEnded, exit_code));
}

std::vector<int> take_ended_ranks() {
  std::vector<int> codes;
  const auto fd = launcher_fd();
  std::array<char, 64> bytes{};
  while (fd) {
    const ssize_t got = recv(*fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got <= 0) break;
    const auto code = number_behind(kEnded, {bytes.data(), static_cast<std::size_t>(got)});
    if (code) codes.push_back(*code);
  }
  return codes;
}

std::optional<LaunchRequest> parse_launch_request(std::string_view text) {
  if (const auto ranks = number_behind(kWanted, text)) {
    if (*ranks < 1 || *ranks > kMaxAtOnce) return std::nullopt;
    return WantedRanks{*ranks};
  }
  if (const auto pid = number_behind(kHook, text)) {
    if (*pid < 2) return std::nullopt;  // kill() would signal other processes for 0 and -1
    return StartedHook{*pid};
  }
  if (!text.starts_with(kMet)) return std::nullopt;
  text.remove_prefix(kMet.size());
  const auto pid = take_number(text);
  if (!pid || !text.starts_with(' ')) return std::nullopt;
  text.remove_prefix(1);
  const auto number = take_number(text);
  if (!number || !text.empty()) return std::nullopt;
  return MetRank{.pid = *pid, .number = *number};
}

}  // namespace dynmo::process
