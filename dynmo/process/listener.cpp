// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/listener.h"

#include <sys/socket.h>

#include <cerrno>

namespace dynmo::process {
namespace {

constexpr std::chrono::milliseconds kPause{100};

}  // namespace

void Listener::listen(UniqueFd socket) {
  make_prompt(socket);
  socket_ = std::move(socket);
}

UniqueFd Listener::accept() {
  if (!socket_ || pause_end()) return {};
  UniqueFd client(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (client) {
    make_prompt(client);
  } else if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
    int none = 0;
    error_.compare_exchange_strong(none, errno);
    pause_end_ = Clock::now() + kPause;
  }
  return client;
}

std::optional<Listener::Clock::time_point> Listener::pause_end() const {
  return Clock::now() < pause_end_ ? std::optional(pause_end_) : std::nullopt;
}

std::optional<std::string> Listener::take_failure() {
  int error = error_;
  if (error <= 0 || !error_.compare_exchange_strong(error, -error)) return std::nullopt;
  return fmt::format(
      "new connections wait: {}; close some, or raise the limit of open files (ulimit -n)",
      system_reason(error));
}

}  // namespace dynmo::process
