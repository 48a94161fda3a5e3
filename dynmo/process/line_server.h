// SPDX-License-Identifier: Apache-2.0
#pragma once

// Listens for users and programs outside a run that send a line and get one. It serves `dynmo ctl`
// and ranks that join. It knows lines, not their meaning. Its thread never blocks on a client. A
// client that sends nothing or too much, or does not read, is dropped.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/process/sockets.h"

namespace dynmo::process {

using ClientId = std::uint64_t;

class LineServer {
 public:
  struct Options {
    std::string address = "127.0.0.1";
    std::uint16_t port = 0;  // 0: any free one
    std::string end = "\n";  // of a line
    std::size_t max_line = 64 << 10;
    // Limit of clients that do not wait for an answer. Beyond it, those that have sent nothing are
    // dropped first. A client waits only if OnLine has decided so.
    int max_clients = 64;
    std::size_t max_unread = 4 << 20;  // bytes that a client may leave unread
    // Time for a client to send its line, and to read the last one that it gets.
    std::chrono::milliseconds first_line{10000};
  };
  // The server's decision on a client after its line.
  struct Answer {
    std::string line;  // with its end; empty: none yet
    bool done = true;  // closes the client once it has the line
  };
  // Called on the server's thread, one call at a time. They must not call back.
  using OnLine = std::function<Answer(ClientId, std::string_view line)>;
  using OnGone = std::function<void(ClientId)>;  // for a client that was not done

  // Listens at the address. Returns kBadInput if that fails, such as for a port in use.
  [[nodiscard]] static Expected<std::unique_ptr<LineServer>> listen(const Options& options,
                                                                    OnLine on_line, OnGone on_gone);
  LineServer(const LineServer&) = delete;
  LineServer& operator=(const LineServer&) = delete;
  // Stops. Data that was sent before is delivered if the client reads it at once.
  ~LineServer();

  [[nodiscard]] std::uint16_t port() const;
  // Sends a line to a waiting client, if it is still there. `done` is that of Answer. Any thread
  // may call.
  void send(ClientId client, std::string line, bool done);
  // Returns when the system has taken all sent lines, or after half a second.
  void flush();
  // Returns why new clients wait, once. For example, no descriptor is free. Any thread may call.
  [[nodiscard]] std::optional<std::string> take_failure();

 private:
  class Loop;
  explicit LineServer(std::unique_ptr<Loop> loop);
  std::unique_ptr<Loop> loop_;
};

// One client's end. Blocking.
class LineClient {
 public:
  LineClient() = default;  // unusable until another is assigned
  // Connects. Returns kPeerLost, with the system's reason, if no server listens.
  [[nodiscard]] static Expected<LineClient> connect(const std::string& address, std::uint16_t port,
                                                    std::chrono::milliseconds time);
  [[nodiscard]] Expected<void> send(std::string_view line);
  // Returns the next line without its end. Returns kPeerLost if the other end closed, if nothing
  // came for `time`, or for more than `max_line` bytes.
  [[nodiscard]] Expected<std::string> receive(std::size_t max_line, std::chrono::milliseconds time);
  [[nodiscard]] const UniqueFd& socket() const { return socket_; }

 private:
  explicit LineClient(UniqueFd socket) : socket_(std::move(socket)) {}
  UniqueFd socket_;
  std::string in_;
};

}  // namespace dynmo::process
