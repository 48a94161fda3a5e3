// SPDX-License-Identifier: Apache-2.0
#include "tests/support/golden.h"

#include "dynmo/elastic/control_messages.h"
#include "dynmo/elastic/job_file.h"
#include "dynmo/elastic/quorum.h"
#include "dynmo/elastic/size_changes.h"

namespace dynmo::elastic {
namespace {

TEST(ElasticGoldens, AJobFileIsWrittenAsItWasRead) {
  expect_rewritten("elastic/goldens/job.json", [](const Json& json) -> Expected<Json> {
    DYNMO_ASSIGN(const JobFile job, parse_job(json.dump(), "golden"));
    return to_json(job);
  });
}

TEST(ElasticGoldens, ARequestIsWrittenAsItWasRead) {
  expect_lines_rewritten("elastic/goldens/requests.jsonl",
                         [](std::string_view line) -> Expected<std::string> {
                           DYNMO_ASSIGN(const Request request, parse_request(line));
                           return to_line(request);
                         });
}

TEST(ElasticGoldens, AReplyIsWrittenAsItWasRead) {
  expect_lines_rewritten("elastic/goldens/replies.jsonl",
                         [](std::string_view line) -> Expected<std::string> {
                           DYNMO_ASSIGN(const Reply reply, parse_reply(line));
                           return to_line(reply);
                         });
}

TEST(ElasticGoldens, ViewsThatCountAreWrittenAsTheyWereRead) {
  expect_rewritten("elastic/goldens/views.json", [](const Json& json) -> Expected<Json> {
    DYNMO_ASSIGN(const Standing standing, parse_standing(json, "golden"));
    return to_json(standing);
  });
}

TEST(ElasticGoldens, RequestsOfARankAreWrittenAsTheyWereRead) {
  expect_rewritten("elastic/goldens/rank_request.json", [](const Json& json) -> Expected<Json> {
    DYNMO_ASSIGN(const RankRequest request, parse_rank_request(json));
    return to_json(request);
  });
}

TEST(ElasticGoldens, TheStateOfSizeChangesIsWrittenAsItWasRead) {
  expect_rewritten("elastic/goldens/size_changes.json", [](const Json& json) -> Expected<Json> {
    SizeChanges changes({});
    DYNMO_TRY(changes.restore(json));
    return changes.state();
  });
}

}  // namespace
}  // namespace dynmo::elastic
