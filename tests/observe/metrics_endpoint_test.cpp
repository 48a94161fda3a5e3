// SPDX-License-Identifier: Apache-2.0
// Clients of the endpoint for Prometheus, on threads of this process. Times bound hangs; none
// decides what a test finds.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <thread>

#include "dynmo/observe/metrics/endpoint.h"
#include "dynmo/observe/metrics/metrics_log.h"
#include "dynmo/process/sockets.h"
#include "tests/support/no_free_descriptor.h"
#include "tests/support/temp_folder.h"

namespace dynmo::observe {
namespace {

constexpr std::chrono::seconds kHang{60};

process::UniqueFd connected(std::uint16_t port) {
  auto socket = process::connect_to("127.0.0.1", port, std::chrono::steady_clock::now() + kHang);
  if (!socket) throw std::runtime_error(socket.error().message);
  return *std::move(socket);
}

void send_text(const process::UniqueFd& socket, std::string_view text) {
  (void)::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL);
}

// Reads to the end of the connection.
std::string read_text(const process::UniqueFd& socket) {
  std::string text;
  std::array<char, 4096> piece;
  while (true) {
    pollfd wait{.fd = socket.get(), .events = POLLIN, .revents = 0};
    if (poll(&wait, 1, 60000) <= 0) throw std::runtime_error("no answer");
    const ssize_t got = ::recv(socket.get(), piece.data(), piece.size(), 0);
    if (got <= 0) return text;
    text.append(piece.data(), static_cast<std::size_t>(got));
  }
}

std::string asked(std::uint16_t port, std::string_view request) {
  const process::UniqueFd socket = connected(port);
  send_text(socket, request);
  return read_text(socket);
}

const std::string_view kGet = "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";

std::string body_of(const std::string& answer) {
  const std::size_t end = answer.find("\r\n\r\n");
  return end == std::string::npos ? "no end of the head" : answer.substr(end + 4);
}

std::string status_of(const std::string& answer) { return answer.substr(0, answer.find('\r')); }

std::vector<MetricGroup> one_metric(double value, std::size_t label_bytes = 1) {
  return {{.labels = "{a=\"" + std::string(label_bytes, 'b') + "\"}",
           .metrics = {{"dynmo/x", "dynmo_x", value}}}};
}

TEST(MetricsEndpoint, GivesTheNewestMetrics) {
  const auto endpoint = MetricsEndpoint::open(0).value();
  EXPECT_EQ(body_of(asked(endpoint->port(), kGet)), "");
  for (const double value : {1.0, 2.5}) {
    endpoint->set(one_metric(value));
    const std::string answer = asked(endpoint->port(), kGet);
    EXPECT_EQ(status_of(answer), "HTTP/1.1 200 OK");
    EXPECT_NE(answer.find("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"),
              std::string::npos);
    EXPECT_EQ(body_of(answer), prometheus_text(one_metric(value)));
    EXPECT_NE(answer.find(fmt::format("Content-Length: {}\r\n", body_of(answer).size())),
              std::string::npos);
  }
}

TEST(MetricsEndpoint, AnswersOtherRequestsByWhatItWants) {
  const auto status = [](std::string_view head) { return status_of(answer_http(head, "text")); };
  EXPECT_EQ(status("GET /metrics HTTP/1.0"), "HTTP/1.1 200 OK");
  EXPECT_EQ(status("GET /metrics?name[]=dynmo_x HTTP/1.1\r\nHost: a"), "HTTP/1.1 200 OK");
  EXPECT_EQ(body_of(answer_http("HEAD /metrics HTTP/1.1", "text")), "");
  EXPECT_EQ(status("HEAD /metrics HTTP/1.1"), "HTTP/1.1 200 OK");
  EXPECT_EQ(status("GET / HTTP/1.1"), "HTTP/1.1 404 Not Found");
  EXPECT_EQ(status("GET /metricsx HTTP/1.1"), "HTTP/1.1 404 Not Found");
  EXPECT_EQ(status("POST /metrics HTTP/1.1"), "HTTP/1.1 405 Method Not Allowed");
  for (const char* head : {"", " ", "GET", "GET /metrics", "GET /metrics FTP", "GET HTTP/1.1",
                           "\r\nGET /metrics HTTP/1.1", "\xff\xfe"}) {
    EXPECT_EQ(status(head), "HTTP/1.1 400 Bad Request") << head;
  }
}

TEST(MetricsEndpoint, ServesOthersWhileClientsAskOrReadSlowly) {
  const auto endpoint = MetricsEndpoint::open(0).value();
  endpoint->set(one_metric(1, 3 << 20));  // more than a socket holds
  const process::UniqueFd unread = connected(endpoint->port());
  send_text(unread, kGet);
  const process::UniqueFd silent = connected(endpoint->port());
  const process::UniqueFd half = connected(endpoint->port());
  send_text(half, kGet.substr(0, kGet.size() - 2));
  endpoint->set(one_metric(2));
  EXPECT_EQ(body_of(asked(endpoint->port(), kGet)), prometheus_text(one_metric(2)));
  // A request in two parts is one.
  send_text(half, "\r\n");
  EXPECT_EQ(body_of(read_text(half)), prometheus_text(one_metric(2)));
  EXPECT_EQ(asked(endpoint->port(), std::string(40000, 'x')), "");
}

TEST(MetricsEndpoint, IsReachedFromThisHostAlone) {
  const auto endpoint = MetricsEndpoint::open(0).value();
  const std::string own = process::address_towards("192.0.2.1");
  if (own.empty()) GTEST_SKIP() << "this host has only loopback";
  EXPECT_TRUE(
      process::dial(own, endpoint->port(), std::chrono::steady_clock::now() + kHang).refused);
}

TEST(MetricsLog, ServesTheLeadersNumbersAndEvents) {
  const TempFolder temp;
  const auto free = MetricsEndpoint::open(0).value()->port();
  MetricsLog other(RunFolder(temp.path()), WorldRank(1), {.port = free});
  EXPECT_FALSE(other.take_failure());
  MetricsLog log(RunFolder(temp.path()), WorldRank(0), {.port = free});
  ASSERT_FALSE(log.take_failure());
  StepRecord record;
  record.step = 7;
  record.loss = 2.5;
  log.event("validation", 7, {{"loss", 3.5}});
  log.add(record);
  const std::string text = body_of(asked(free, kGet));
  const std::string labels = fmt::format("{{run=\"{}\"}}", temp.path().string());
  EXPECT_NE(text.find("\ndynmo_loss" + labels + " 2.5\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\ndynmo_step" + labels + " 7\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\ndynmo_validation_loss" + labels + " 3.5\n"), std::string::npos) << text;
  EXPECT_NE(text.find("rank=\"0\"} "), std::string::npos) << text;
  EXPECT_TRUE(std::filesystem::is_empty(temp.path()));
}

TEST(MetricsLog, GoesOnIfItsPortIsInUse) {
  const TempFolder temp;
  const auto endpoint = MetricsEndpoint::open(0).value();
  MetricsLog log(RunFolder(temp.path()), WorldRank(0),
                 {.prometheus = true, .port = endpoint->port()});
  log.add(StepRecord{});
  log.flush();
  EXPECT_EQ(log.take_failure(),
            fmt::format("no metrics at 127.0.0.1: port {} on 127.0.0.1 is in use: end the program "
                        "that listens there",
                        endpoint->port()));
  EXPECT_FALSE(log.take_failure());
  EXPECT_TRUE(std::filesystem::exists(RunFolder(temp.path()).prometheus_of(WorldRank(0))));
}

TEST(MetricsLog, SaysOnceThatClientsWaitForDescriptors) {
  const TempFolder temp;
  const std::uint16_t free = process::local_port(process::listen_on("127.0.0.1", 0).value());
  MetricsLog log(RunFolder(temp.path()), WorldRank(0), {.port = free});
  process::UniqueFd last(::dup(STDERR_FILENO));
  std::optional<std::string> failure;
  {
    const NoFreeDescriptor none;
    last.reset();  // for the client
    const process::UniqueFd client = connected(free);
    for (int i = 0; i < 60000 && !failure; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      log.add(StepRecord{});
      failure = log.take_failure();
    }
  }
  EXPECT_EQ(failure.value_or("").substr(0, 41), "new connections wait: Too many open files");
  log.add(StepRecord{});
  EXPECT_FALSE(log.take_failure());
}

}  // namespace
}  // namespace dynmo::observe
