// SPDX-License-Identifier: Apache-2.0
// RUN/job.json, which says where a run's leader listens.
#include "dynmo/core/json.h"
#include "dynmo/elastic/job_file.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {
namespace {

std::string text_of(const elastic::JobFile& job) {
  return Json{{"format", "dynmo-job-1"},
              {"address", job.address},
              {"port", job.port},
              {"host", job.host},
              {"pid", job.pid}}
      .dump(2);
}

}  // namespace

Outcome run_target(std::string_view text) {
  const auto taken = elastic::parse_job(text, "job.json");
  if (!taken) return refused(taken.error());
  DYNMO_CHECK(taken->port != 0, "a port");
  const auto again = elastic::parse_job(text_of(*taken), "again");
  DYNMO_CHECK(again.has_value() && *again == *taken, "a job that reads back, got {}", text);
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  return {text_of({.address = "127.0.0.1", .port = 4321, .host = "node-0", .pid = 77}),
          text_of({.address = "::1", .port = 1, .host = "", .pid = -1})};
}

}  // namespace dynmo::fuzz
