// SPDX-License-Identifier: Apache-2.0
#pragma once

// Serves the newest metrics to Prometheus at http://127.0.0.1:PORT/metrics. Only programs of this
// host reach it. Clients are served by a thread of its own, which drops a client that asks or reads
// too slowly. So no client delays training.

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/observe/metrics/prometheus.h"
#include "dynmo/process/line_server.h"

namespace dynmo::observe {

// Returns the answer to a request's head: the text for GET and HEAD of /metrics, else an HTTP error
// that names /metrics.
[[nodiscard]] std::string answer_http(std::string_view head, std::string_view text);

// Serves the newest metrics over HTTP. Any thread may call any function.
class MetricsEndpoint {
 public:
  // Listens on the port, or on any free one if it is 0. Returns kBadInput with port and reason.
  [[nodiscard]] static Expected<std::unique_ptr<MetricsEndpoint>> open(std::uint16_t port);
  [[nodiscard]] std::uint16_t port() const { return server_->port(); }
  // Sets the metrics that clients get from now on. The text is made when a client asks.
  void set(std::vector<MetricGroup> groups);
  [[nodiscard]] std::optional<std::string> take_failure() { return server_->take_failure(); }

 private:
  using Groups = std::vector<MetricGroup>;
  MetricsEndpoint() = default;
  [[nodiscard]] std::string text();

  std::mutex mutex_;  // of groups_
  std::shared_ptr<const Groups> groups_ = std::make_shared<const Groups>();
  std::unique_ptr<process::LineServer> server_;  // its thread ends first
};

}  // namespace dynmo::observe
