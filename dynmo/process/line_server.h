// SPDX-License-Identifier: Apache-2.0
#pragma once

// Listens for people and programs outside a run that say a line and hear one: what is behind
// `dynmo ctl` and a rank that joins. It knows lines, not what they mean. Its thread never blocks on
// a client; a client that says nothing, too much, or does not read is dropped.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
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
    std::size_t max_line = 64 << 10;
    int max_clients = 64;              // more: those that have said nothing go first
    std::size_t max_unread = 4 << 20;  // bytes that a client may leave unread
    // For a client to say its line, and to read the last one that it gets.
    std::chrono::milliseconds first_line{10000};
  };
  // The server's decision on a client after its line.
  struct Answer {
    std::string line;  // with its end; empty: none yet
    bool done = true;  // it is closed once it has the line
  };
  // On the server's thread, one call at a time. They must not call back.
  using OnLine = std::function<Answer(ClientId, std::string_view line)>;
  using OnGone = std::function<void(ClientId)>;  // of one that was not done

  // On a free port of the address. kBadInput.
  [[nodiscard]] static Expected<std::unique_ptr<LineServer>> listen(const Options& options,
                                                                    OnLine on_line, OnGone on_gone);
  LineServer(const LineServer&) = delete;
  LineServer& operator=(const LineServer&) = delete;
  // Data that was sent before is delivered as far as it is read at once.
  ~LineServer();

  [[nodiscard]] std::uint16_t port() const;
  // A line to a client that waits, if it is still there; `done` as above. Any thread.
  void send(ClientId client, std::string line, bool done);
  // Returns when what was sent is with the system, or after half a second.
  void flush();

 private:
  class Loop;
  explicit LineServer(std::unique_ptr<Loop> loop);
  std::unique_ptr<Loop> loop_;
};

// One client's end. Blocking.
class LineClient {
 public:
  LineClient() = default;  // of no use until another is assigned
  // kPeerLost where nobody listens, with the system's reason.
  [[nodiscard]] static Expected<LineClient> connect(const std::string& address, std::uint16_t port,
                                                    std::chrono::milliseconds time);
  [[nodiscard]] Expected<void> send(std::string_view line);
  // The next line without its end. kPeerLost: the other end closed; or nothing came for `time`;
  // or more than `max_line` bytes.
  [[nodiscard]] Expected<std::string> receive(std::size_t max_line, std::chrono::milliseconds time);
  [[nodiscard]] const UniqueFd& socket() const { return socket_; }

 private:
  explicit LineClient(UniqueFd socket) : socket_(std::move(socket)) {}
  UniqueFd socket_;
  std::string in_;
};

}  // namespace dynmo::process
