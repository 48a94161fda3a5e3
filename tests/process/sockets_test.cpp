// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/sockets.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <string>
#include <thread>

namespace dynmo::process {
namespace {

constexpr std::chrono::seconds kConnectTime{20};

TEST(Sockets, AddressesOfThisHostAreTold) {
  EXPECT_TRUE(check_own_address("127.0.0.1"));
  EXPECT_TRUE(check_own_address("localhost"));
  // An address for documentation, which no host has, and a name that cannot be one.
  for (const char* address : {"192.0.2.1", "no name at all"}) {
    const auto own = check_own_address(address);
    ASSERT_FALSE(own) << address;
    EXPECT_EQ(own.error().code, ErrorCode::kBadInput);
    EXPECT_NE(own.error().message.find(address), std::string::npos) << own.error().message;
  }
}

// A network of its own, as a container may have it: its loopback interface has no address.
TEST(Sockets, WithoutALoopbackAddressThatIsSaidAtOnce) {
  std::array<int, 2> said{};
  ASSERT_EQ(::pipe(said.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) ::_exit(77);
    const auto loopback = loopback_address();
    const std::string text = loopback ? *loopback : loopback.error().message;
    (void)!::write(said[1], text.data(), text.size());
    ::_exit(0);
  }
  ::close(said[1]);
  std::array<char, 512> buffer{};
  const ssize_t size = ::read(said[0], buffer.data(), buffer.size());
  ::close(said[0]);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "no network of its own";
  EXPECT_EQ(std::string(buffer.data(), static_cast<std::size_t>(size)),
            "this host has neither 127.0.0.1 nor ::1, by which its ranks would reach each other: "
            "bring its loopback interface up (ip link set lo up)");
}

TEST(Sockets, AddressesAndNamesAreToldApart) {
  for (const char* address : {"127.0.0.1", "10.0.0.255", "::1", "fe80::1"}) {
    EXPECT_TRUE(is_numeric(address)) << address;
  }
  for (const char* name : {"", "localhost", "node-3", "10.0.0", "10.0.0.256", "::1 "}) {
    EXPECT_FALSE(is_numeric(name)) << name;
  }
}

TEST(Sockets, AConnectionThatIsKeptAliveAsksForSigns) {
  const auto listener = listen_on("127.0.0.1", 0);
  ASSERT_TRUE(listener) << listener.error().message;
  const auto socket = connect_to("127.0.0.1", local_port(*listener),
                                 std::chrono::steady_clock::now() + kConnectTime);
  ASSERT_TRUE(socket) << socket.error().message;
  const auto value = [&](int level, int option) {
    int found = -1;
    socklen_t length = sizeof found;
    return getsockopt(socket->get(), level, option, &found, &length) == 0 ? found : -1;
  };
  EXPECT_EQ(value(SOL_SOCKET, SO_KEEPALIVE), 0);
  keep_alive(*socket);
  EXPECT_EQ(value(SOL_SOCKET, SO_KEEPALIVE), 1);
  const int silence = value(IPPROTO_TCP, TCP_KEEPIDLE) +
                      value(IPPROTO_TCP, TCP_KEEPCNT) * value(IPPROTO_TCP, TCP_KEEPINTVL);
  EXPECT_EQ(silence, 30) << "seconds, as docs/elasticity.md says";
  EXPECT_EQ(value(IPPROTO_TCP, TCP_USER_TIMEOUT), 1000 * silence);
}

// Both ends of a connection within this process.
std::array<UniqueFd, 2> joined_ends() {
  std::array<int, 2> ends{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

TEST(Sockets, SendAndReceiveWhatThereIs) {
  auto [here, there] = joined_ends();
  std::string in = "old ";
  EXPECT_TRUE(receive_present(there, in, 100));
  EXPECT_EQ(in, "old ") << "nothing has arrived";
  std::string out = "new";
  EXPECT_TRUE(send_present(here, out) && out.empty());
  EXPECT_TRUE(receive_present(there, in, 100));
  EXPECT_EQ(in, "old new");
  out.assign(std::size_t{16} << 20, 'x');  // more than the system takes
  EXPECT_TRUE(send_present(here, out));
  EXPECT_FALSE(out.empty());
  EXPECT_TRUE(receive_present(there, in, 1));
  EXPECT_LE(in.size(), 7U + (1U << 16)) << "the others wait";
  here.reset();
  while (receive_present(there, in, 1 << 20)) {
  }
  EXPECT_EQ(errno, 0) << "closed";
  EXPECT_EQ(in.size(), 7 + (std::size_t{16} << 20) - out.size());
  out = "more";
  EXPECT_FALSE(send_present(there, out));
  EXPECT_EQ(errno, EPIPE);
}

TEST(Sockets, AWaitOutlivesSignals) {
  const auto [here, there] = joined_ends();
  EXPECT_FALSE(wait_for(there, POLLIN, {})) << "a deadline that has passed";
  EXPECT_TRUE(wait_for(there, POLLOUT, {}));
  struct sigaction before {
  }, nothing{};
  nothing.sa_handler = [](int) {};
  ASSERT_EQ(sigaction(SIGUSR2, &nothing, &before), 0);
  bool came = false;
  std::thread waits([&, &there = there] {
    came = wait_for(there, POLLIN, std::chrono::steady_clock::now() + kConnectTime);
  });
  for (int i = 0; i < 50; ++i) {
    pthread_kill(waits.native_handle(), SIGUSR2);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::string out = "x";
  EXPECT_TRUE(send_present(here, out));
  waits.join();
  EXPECT_TRUE(came);
  sigaction(SIGUSR2, &before, nullptr);
}

}  // namespace
}  // namespace dynmo::process
