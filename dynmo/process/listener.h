// SPDX-License-Identifier: Apache-2.0
#pragma once

// A listening socket of an event loop.
//
// Without a free descriptor accept() fails, and poll() returns at once for the same socket. A loop
// would spin. So the listener pauses for a tenth of a second after such a failure. New connections
// wait in the system meanwhile, and the loop serves those that it has. A spare descriptor that
// closes new connections would be no remedy: a rank takes a closed connection for a loss.

#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "dynmo/process/sockets.h"

namespace dynmo::process {

// For the thread of the loop, apart from take_failure().
class Listener {
 public:
  using Clock = std::chrono::steady_clock;

  Listener() = default;  // accepts nothing
  // Makes the socket non-blocking.
  void listen(UniqueFd socket);
  void close() { socket_.reset(); }
  [[nodiscard]] const UniqueFd& socket() const { return socket_; }

  // Returns the next connection, which is prompt. Returns none if no client waits, or in a pause.
  [[nodiscard]] UniqueFd accept();
  // Returns the end of the pause. Until then the socket is not polled. Returns none without a
  // pause.
  [[nodiscard]] std::optional<Clock::time_point> pause_end() const;
  // Returns why new connections wait, or have waited, once. Any thread may call.
  [[nodiscard]] std::optional<std::string> take_failure();

 private:
  UniqueFd socket_;
  Clock::time_point pause_end_ = {};
  // The error of the first failure, negative once it was taken; 0: none.
  std::atomic<int> error_ = 0;
};

}  // namespace dynmo::process
