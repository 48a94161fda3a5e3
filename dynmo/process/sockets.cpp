// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>

namespace dynmo::process {
namespace {

using Clock = std::chrono::steady_clock;
using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Seconds of silence before the first probe of the other end, seconds between probes, and their
// number.
constexpr int kKeepIdle = 10;
constexpr int kKeepInterval = 5;
constexpr int kKeepProbes = 4;

Expected<Addresses> resolve(const std::string& address, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int status = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) {
    return make_error(ErrorCode::kBadInput, "the address '{}' does not resolve: {}", address,
                      status == EAI_SYSTEM ? system_reason(errno) : gai_strerror(status));
  }
  return Addresses(found, freeaddrinfo);
}

// Returns the error's number, or 0 and the listening socket.
int try_listen(int family, const sockaddr* address, socklen_t length, UniqueFd& socket) {
  UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return errno;
  const int on = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(fd.get(), address, length) != 0) return errno;
  if (listen(fd.get(), SOMAXCONN) != 0) return errno;
  socket = std::move(fd);
  return 0;
}

int try_listen_everywhere(std::uint16_t port, UniqueFd& socket) {
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_ANY);
  any.sin_port = htons(port);
  return try_listen(AF_INET, reinterpret_cast<const sockaddr*>(&any), sizeof any, socket);
}

sockaddr_storage own_name(const UniqueFd& socket) {
  sockaddr_storage name{};
  socklen_t length = sizeof name;
  getsockname(socket.get(), reinterpret_cast<sockaddr*>(&name), &length);
  return name;
}

// Returns the numeric address without the port.
std::string text_of(const sockaddr& name) {
  char text[INET6_ADDRSTRLEN] = {};
  if (name.sa_family == AF_INET6) {
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6&>(name).sin6_addr, text, sizeof text);
  } else {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(name).sin_addr, text, sizeof text);
  }
  return text;
}

// Returns whether TCP has connected a socket to itself. That happens if its own ephemeral port is
// the requested one and no program listens there. It is likely if a free port of this host is tried
// repeatedly.
bool is_connected_to_itself(const UniqueFd& socket) {
  const sockaddr_storage own = own_name(socket);
  sockaddr_storage peer{};
  socklen_t length = sizeof peer;
  if (getpeername(socket.get(), reinterpret_cast<sockaddr*>(&peer), &length) != 0) return false;
  return std::memcmp(&own, &peer, length) == 0;
}

// Returns the error's number, or 0 and the connected socket.
int try_connect(const addrinfo& to, Clock::time_point deadline, UniqueFd& socket) {
  UniqueFd fd(::socket(to.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return errno;
  if (connect(fd.get(), to.ai_addr, to.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return errno;
    const auto end = std::min(deadline, Clock::now() + std::chrono::seconds(5));
    if (!wait_for(fd, POLLOUT, end)) return ETIMEDOUT;
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return error;
  }
  if (is_connected_to_itself(fd)) return ECONNREFUSED;
  socket = std::move(fd);
  return 0;
}

bool worth_another_try(int error) {
  return error == ECONNREFUSED || error == ETIMEDOUT || error == EINTR || error == ECONNRESET ||
         error == EHOSTUNREACH || error == ENETUNREACH || error == EAGAIN;
}

}  // namespace

UniqueFd::~UniqueFd() {
  if (fd_ >= 0) close(fd_);
}

std::string system_reason(int error) { return std::system_category().message(error); }

Expected<UniqueFd> listen_on(const std::string& address, std::uint16_t port) {
  DYNMO_ASSIGN(const Addresses addresses, resolve(address, port));
  UniqueFd socket;
  int error = EADDRNOTAVAIL;
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
    if (is_loopback(text_of(*one->ai_addr)) && !is_loopback(address)) {
      error = EADDRNOTAVAIL;
      break;
    }
    error = try_listen(one->ai_family, one->ai_addr, one->ai_addrlen, socket);
    if (error == 0) return socket;
    if (error == EADDRINUSE) break;
  }
  // A missing loopback address is no reason to listen everywhere, where no rank would connect.
  if (error == EADDRNOTAVAIL && !is_loopback(address)) error = try_listen_everywhere(port, socket);
  if (error == 0) return socket;
  if (error == EADDRINUSE) {
    return make_error(ErrorCode::kBadInput,
                      "port {} on {} is in use: end the program that listens there", port, address);
  }
  return make_error(ErrorCode::kBadInput, "cannot listen on port {} of {}: {}", port, address,
                    system_reason(error));
}

Expected<void> check_own_address(const std::string& address) {
  DYNMO_ASSIGN(const Addresses addresses, resolve(address, 0));
  int error = EADDRNOTAVAIL;
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
    UniqueFd socket;
    error = try_listen(one->ai_family, one->ai_addr, one->ai_addrlen, socket);
    if (error == 0) return {};
  }
  return make_error(ErrorCode::kBadInput, "'{}' is no address of this host: {}", address,
                    system_reason(error));
}

Expected<std::string> loopback_address() {
  // If the interface is down, a socket may listen at its address, but no client reaches it.
  constexpr std::chrono::seconds kHere{2};
  for (const char* address : {"127.0.0.1", "::1"}) {
    const auto listener = listen_on(address, 0);
    if (listener && dial(address, local_port(*listener), Clock::now() + kHere).socket) {
      return std::string(address);
    }
  }
  return make_error(ErrorCode::kBadInput,
                    "this host has neither 127.0.0.1 nor ::1, by which its ranks would reach each "
                    "other: bring its loopback interface up (ip link set lo up)");
}

Expected<UniqueFd> connect_to(const std::string& address, std::uint16_t port,
                              Clock::time_point deadline) {
  int error = ETIMEDOUT;
  for (auto pause = std::chrono::milliseconds(2);;
       pause = std::min(2 * pause, decltype(pause)(100))) {
    // Resolved again each time: the name of a pod may appear only after this one has started.
    auto addresses = resolve(address, port);
    if (addresses) {
      for (const addrinfo* one = addresses->get(); one != nullptr; one = one->ai_next) {
        UniqueFd socket;
        error = try_connect(*one, deadline, socket);
        if (error == 0) return socket;
      }
    }
    if (Clock::now() + pause >= deadline || (addresses && !worth_another_try(error))) {
      if (!addresses) return addresses.error();
      return Error{ErrorCode::kPeerLost, system_reason(error)};
    }
    std::this_thread::sleep_for(pause);
  }
}

Dialled dial(const std::string& address, std::uint16_t port, Clock::time_point deadline) {
  Dialled dialled;
  const auto addresses = resolve(address, port);
  if (!addresses) return dialled;
  dialled.refused = true;  // at each address of the name
  for (const addrinfo* one = addresses->get(); one != nullptr; one = one->ai_next) {
    const int error = try_connect(*one, deadline, dialled.socket);
    dialled.refused = dialled.refused && error == ECONNREFUSED;
    if (error == 0) break;
  }
  return dialled;
}

std::string local_address(const UniqueFd& socket) {
  const sockaddr_storage name = own_name(socket);
  return text_of(reinterpret_cast<const sockaddr&>(name));
}

std::uint16_t local_port(const UniqueFd& socket) {
  const sockaddr_storage name = own_name(socket);
  return ntohs(name.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(name).sin6_port
                                          : reinterpret_cast<const sockaddr_in&>(name).sin_port);
}

bool is_numeric(const std::string& address) {
  in6_addr ignored{};
  return inet_pton(AF_INET, address.c_str(), &ignored) == 1 ||
         inet_pton(AF_INET6, address.c_str(), &ignored) == 1;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1" || address == "localhost";
}

std::string address_towards(const std::string& to) {
  const auto addresses = resolve(to, 9);  // connecting a datagram socket only chooses the route
  if (!addresses) return "";
  const addrinfo& first = **addresses;
  const UniqueFd fd(::socket(first.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd || connect(fd.get(), first.ai_addr, first.ai_addrlen) != 0) return "";
  return local_address(fd);
}

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

void make_prompt(const UniqueFd& socket) {
  const int on = 1;
  setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  fcntl(socket.get(), F_SETFL, fcntl(socket.get(), F_GETFL) | O_NONBLOCK);
}

bool send_present(const UniqueFd& socket, std::string& out) {
  while (!out.empty()) {
    const ssize_t sent = send(socket.get(), out.data(), out.size(), MSG_NOSIGNAL);
    if (sent > 0) out.erase(0, static_cast<std::size_t>(sent));
    if (sent > 0 || (sent < 0 && errno == EINTR)) continue;
    return sent < 0 && errno == EAGAIN;
  }
  return true;
}

bool receive_present(const UniqueFd& socket, std::string& in, std::size_t most) {
  std::array<char, 4096> bytes;
  for (const std::size_t before = in.size(); in.size() - before <= most;) {
    const ssize_t got = recv(socket.get(), bytes.data(), bytes.size(), 0);
    if (got > 0) in.append(bytes.data(), static_cast<std::size_t>(got));
    if (got > 0 || (got < 0 && errno == EINTR)) continue;
    if (got == 0) errno = 0;
    return got < 0 && errno == EAGAIN;
  }
  return true;
}

bool wait_for(const UniqueFd& fd, short events, Clock::time_point deadline) {
  pollfd event{.fd = fd.get(), .events = events, .revents = 0};
  int ready = 0;
  do {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    ready = poll(&event, 1, static_cast<int>(std::clamp<long>(left, 0, 1 << 30)));
  } while (ready < 0 && errno == EINTR);
  return ready > 0;
}

void keep_alive(const UniqueFd& socket) {
  const auto set = [&](int level, int option, int value) {
    setsockopt(socket.get(), level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdle);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kKeepInterval);
  set(IPPROTO_TCP, TCP_KEEPCNT, kKeepProbes);
  // The same limit applies if sent data is not acknowledged.
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 1000 * (kKeepIdle + kKeepProbes * kKeepInterval));
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
}

}  // namespace dynmo::process
