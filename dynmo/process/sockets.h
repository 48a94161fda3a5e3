// SPDX-License-Identifier: Apache-2.0
#pragma once

// The few calls on TCP sockets that the control plane, the launcher and the c10d transport share.
// All sockets are closed on exec.

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "dynmo/core/expected.h"

namespace dynmo::process {

// Owns a file descriptor; -1 is none.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd();

  [[nodiscard]] int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  [[nodiscard]] int release() { return std::exchange(fd_, -1); }
  void reset() { *this = UniqueFd(); }

 private:
  int fd_ = -1;
};

// Listens at a name or number of this host; port 0 is any free one. All addresses are meant by a
// name that cannot be bound (the outside address of a container) and by one that others know this
// host by but that is loopback to itself (Debian's /etc/hosts: 127.0.1.1 for the host's own name).
// kBadInput: "port 29500 on host is in use: ...".
[[nodiscard]] Expected<UniqueFd> listen_on(const std::string& address, std::uint16_t port);

// kBadInput where `address` is no address or name of this host: nothing can listen at it.
[[nodiscard]] Expected<void> check_own_address(const std::string& address);

// Connects, trying again until the deadline where nobody listens yet. kBadInput for a name that
// does not resolve, kPeerLost if nobody answered; the messages are the system's reason alone, for
// the caller to say what was wanted.
[[nodiscard]] Expected<UniqueFd> connect_to(const std::string& address, std::uint16_t port,
                                            std::chrono::steady_clock::time_point deadline);

// One try to connect, at most until the deadline.
struct Dialled {
  UniqueFd socket;       // none: nobody answered
  bool refused = false;  // the host says that nobody listens there
};
[[nodiscard]] Dialled dial(const std::string& address, std::uint16_t port,
                           std::chrono::steady_clock::time_point deadline);

// The socket's own address, numeric, without the port.
[[nodiscard]] std::string local_address(const UniqueFd& socket);
[[nodiscard]] std::uint16_t local_port(const UniqueFd& socket);
// Whether it is an address, not a name.
[[nodiscard]] bool is_numeric(const std::string& address);
// Whether only this host can reach it: a numeric address, or "localhost". Another name may be
// loopback here and mean this host elsewhere.
[[nodiscard]] bool is_loopback(const std::string& address);
// The address of this host from which packets to `to` would leave; nothing is sent. Empty: no way.
[[nodiscard]] std::string address_towards(const std::string& to);

// As hosts are told apart by people and job managers: what gethostname says.
[[nodiscard]] std::string host_name();

// Small messages leave at once, reads and writes do not block.
void make_prompt(const UniqueFd& socket);
// Waits on the socket fail half a minute after the other end's host has gone or can no longer be
// reached; without, a connection on which nobody speaks would never know.
void keep_alive(const UniqueFd& socket);

// "Connection refused": what errno says.
[[nodiscard]] std::string system_reason(int error);

}  // namespace dynmo::process
