// SPDX-License-Identifier: Apache-2.0
#pragma once

// The calls on TCP sockets that the control plane, the launcher and the c10d transport share. All
// sockets are closed on exec.

#include <chrono>
#include <cstddef>
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

// Listens at a name or number of this host. Port 0 is any free one. Two kinds of names stand for
// all addresses. The first is a name that cannot be bound (the outside address of a container). The
// second is a name by which others know this host, but which is loopback on it (Debian's
// /etc/hosts: 127.0.1.1 for the host's own name).
//
// Returns kBadInput with the port, the address and the reason.
[[nodiscard]] Expected<UniqueFd> listen_on(const std::string& address, std::uint16_t port);

// Returns kBadInput if `address` is no address or name of this host, so that nothing can listen at
// it.
[[nodiscard]] Expected<void> check_own_address(const std::string& address);

// Returns the address by which processes of this host reach each other: 127.0.0.1, or ::1 if the
// host or container has no IPv4. Fails with kBadInput if it has neither.
[[nodiscard]] Expected<std::string> loopback_address();

// Connects, and tries again until the deadline if nothing listens yet. Returns kBadInput for a name
// that does not resolve, and kPeerLost if no answer came. The message is only the system's reason.
// The caller adds what it wanted.
[[nodiscard]] Expected<UniqueFd> connect_to(const std::string& address, std::uint16_t port,
                                            std::chrono::steady_clock::time_point deadline);

// The result of one try to connect, at most until the deadline.
struct Dialled {
  UniqueFd socket;       // none if no answer came
  bool refused = false;  // the host says that nothing listens there
};
[[nodiscard]] Dialled dial(const std::string& address, std::uint16_t port,
                           std::chrono::steady_clock::time_point deadline);

// Returns the socket's own address, numeric, without the port.
[[nodiscard]] std::string local_address(const UniqueFd& socket);
[[nodiscard]] std::uint16_t local_port(const UniqueFd& socket);
// Returns whether `address` is a numeric address, not a name.
[[nodiscard]] bool is_numeric(const std::string& address);
// Returns whether `address` is "localhost" or a numeric address that only this host can reach.
// Another name may be loopback here and mean this host elsewhere.
[[nodiscard]] bool is_loopback(const std::string& address);
// Returns the address of this host from which packets to `to` would leave, or "" if there is none.
// Nothing is sent.
[[nodiscard]] std::string address_towards(const std::string& to);

// Returns the name that gethostname gives, by which users and job managers distinguish hosts.
[[nodiscard]] std::string host_name();

// Makes small messages leave at once, and reads and writes non-blocking.
void make_prompt(const UniqueFd& socket);
// Sends what the system takes at once, and removes it from `out`. Returns false, with errno, if the
// connection fails.
[[nodiscard]] bool send_present(const UniqueFd& socket, std::string& out);
// Adds to `in` what has arrived, about `most` bytes at once. Returns false, with errno, if the
// connection fails, and with 0 if the other end has closed it.
[[nodiscard]] bool receive_present(const UniqueFd& socket, std::string& in, std::size_t most);
// Waits until the descriptor has such an event of poll(), at most until the deadline. Returns
// whether it has one.
bool wait_for(const UniqueFd& fd, short events, std::chrono::steady_clock::time_point deadline);
// Makes waits on the socket fail half a minute after the other end's host is down or unreachable.
// Without it, an idle connection would never notice.
void keep_alive(const UniqueFd& socket);

// Returns the text of errno: "Connection refused".
[[nodiscard]] std::string system_reason(int error);

}  // namespace dynmo::process
