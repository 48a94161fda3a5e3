// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/metrics/endpoint.h"

#include <algorithm>
#include <utility>

namespace dynmo::observe {
namespace {

constexpr std::string_view kPath = "/metrics";

std::string http_answer(std::string_view status, std::string_view type, std::string_view body,
                        bool with_body) {
  return fmt::format(
      "HTTP/1.1 {}\r\nContent-Type: {}; charset=utf-8\r\nContent-Length: {}\r\n"
      "Connection: close\r\n\r\n{}",
      status, type, body.size(), with_body ? body : "");
}

}  // namespace

std::string answer_http(std::string_view head, std::string_view text) {
  const std::string_view line = head.substr(0, head.find('\r'));
  const std::size_t method_end = line.find(' ');
  const std::size_t target_end = line.rfind(' ');
  if (method_end == std::string_view::npos || target_end <= method_end ||
      !line.substr(target_end).starts_with(" HTTP/1.")) {
    return http_answer("400 Bad Request", "text/plain", "wanted a request of HTTP/1.1\n", true);
  }
  const std::string_view method = line.substr(0, method_end);
  std::string_view target = line.substr(method_end + 1, target_end - method_end - 1);
  target = target.substr(0, target.find('?'));
  const bool with_body = method != "HEAD";
  if (method != "GET" && method != "HEAD") {
    return http_answer("405 Method Not Allowed", "text/plain", "wanted GET\n", true);
  }
  if (target != kPath) {
    return http_answer("404 Not Found", "text/plain", "wanted /metrics\n", with_body);
  }
  return http_answer("200 OK", "text/plain; version=0.0.4", text, with_body);
}

Expected<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::open(std::uint16_t port) {
  std::unique_ptr<MetricsEndpoint> endpoint(new MetricsEndpoint());
  process::LineServer::Options options;
  options.port = port;
  options.end = "\r\n\r\n";
  options.max_line = 16 << 10;
  auto server = process::LineServer::listen(
      options,
      [raw = endpoint.get()](process::ClientId, std::string_view head) {
        return process::LineServer::Answer{.line = answer_http(head, raw->text()), .done = true};
      },
      [](process::ClientId) {});
  if (!server) {
    return make_error(ErrorCode::kBadInput, "no metrics at 127.0.0.1: {}", server.error().message);
  }
  endpoint->server_ = *std::move(server);
  return endpoint;
}

void MetricsEndpoint::set(std::vector<MetricGroup> groups) {
  auto made = std::make_shared<const Groups>(std::move(groups));
  const std::scoped_lock lock(mutex_);
  groups_.swap(made);
}

std::string MetricsEndpoint::text() {
  std::shared_ptr<const Groups> groups;
  {
    const std::scoped_lock lock(mutex_);
    groups = groups_;
  }
  return prometheus_text(*groups);
}

}  // namespace dynmo::observe
