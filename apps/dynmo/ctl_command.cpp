// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <memory>
#include <string>

#include "apps/dynmo/command.h"
#include "dynmo/core/fields.h"
#include "dynmo/core/units.h"
#include "dynmo/elastic/control_messages.h"
#include "dynmo/elastic/job_file.h"
#include "dynmo/observe/table.h"
#include "dynmo/process/line_server.h"

namespace dynmo::app {
namespace {

using elastic::Request;
using elastic::RequestKind;

struct CtlFlags {
  std::string run;
  std::string secret;
  bool json = false;
  double timeout_s = 600;
  int ranks = 0;
  int member = 0;
};

Expected<elastic::Reply> ask_at(const elastic::ControlEndpoint& leader, const CtlFlags& flags,
                                Request request) {
  request.secret = leader.secret;
  const auto wait = std::chrono::milliseconds(static_cast<std::int64_t>(1000 * flags.timeout_s));
  auto client =
      process::LineClient::connect(leader.address, leader.port, std::chrono::milliseconds(2000));
  if (!client) {
    return make_error(ErrorCode::kPeerLost,
                      "no run listens at {}:{}: {}; a run that was killed leaves its job.json",
                      leader.address, leader.port, client.error().message);
  }
  DYNMO_TRY(client->send(to_line(request)));
  const auto line = client->receive(elastic::kMaxReply, wait);
  if (!line) {
    return make_error(ErrorCode::kPeerLost, "the run does not answer: {}", line.error().message);
  }
  DYNMO_ASSIGN(elastic::Reply reply, elastic::parse_reply(*line));
  return reply;
}

// Sends a request to the leader. A leaving leader refuses requests that it has not begun, and names
// the next leader. The request is then sent there. Later clients find the job file of the next
// leader.
Expected<elastic::Reply> ask(const CtlFlags& flags, const Request& request) {
  DYNMO_ASSIGN(elastic::ControlEndpoint leader, elastic::find_leader(flags.run, flags.secret));
  while (true) {
    const auto reply = ask_at(leader, flags, request);
    if (reply && reply->done) return reply;
    const Error why = reply ? Error{reply->code, reply->text} : reply.error();
    const bool harmless = request.kind == RequestKind::kStatus || (reply && reply->again);
    const auto now = reply && reply->leader ? elastic::endpoint_of(*reply->leader, leader.secret)
                                            : elastic::find_leader(flags.run, flags.secret);
    if (!harmless || !now || now->is_at(leader)) return why;
    leader = *now;
  }
}

// Returns the status as text. The leader's answer is checked like any file from outside.
Expected<std::string> describe(const Json& status) {
  JsonObject object(status, "the run's status");
  if (status.empty()) return std::string("the run has not done a step yet\n");
  std::string text =
      fmt::format("step      {} of {}\n", object.integer("step"), object.integer("steps"));
  double loss = 0;  // null in JSON if it is NaN
  FieldReader(object).optional_measured("loss", loss);
  text += fmt::format("loss      {:.4f}\n", loss);
  text += fmt::format("tokens/s  {:.0f}\n", object.number("tokens_per_s"));
  text += fmt::format("imbalance {:.3f}, bubble {:.1f} %, {} frozen layers\n",
                      object.number("imbalance"), 100 * object.number("bubble"),
                      object.integer("frozen_layers"));
  const std::int64_t lost = object.integer("lost_ranks");
  const std::int64_t again = object.integer("steps_again");
  if (lost > 0) {
    text += fmt::format("lost      {}, survived; {} run again\n",
                        observe::format_count(lost, "rank"), observe::format_count(again, "step"));
  }
  text += fmt::format("plan      {}, generation {}\n", object.string("plan"),
                      object.integer("generation"));
  object.ignore("replicas");
  for (JsonObject& rank : object.objects("ranks")) {
    text += fmt::format("rank      {:<4} {:>3} layers  {} on {}\n", rank.integer("rank"),
                        rank.integer("layers"), rank.integer("pid"), rank.string("host"));
    DYNMO_TRY(rank.finish());
  }
  text += fmt::format("waiting   {}\n", object.integer("standbys"));
  DYNMO_TRY(object.finish());
  return text;
}

Expected<int> run_status(const CtlFlags& flags) {
  DYNMO_ASSIGN(const elastic::Reply reply, ask(flags, {.kind = RequestKind::kStatus}));
  if (flags.json) {
    fmt::print("{}\n", reply.status.dump(2));
    return 0;
  }
  DYNMO_ASSIGN(const std::string text, describe(reply.status));
  fmt::print("{}", text);
  return 0;
}

Expected<int> run_request(const CtlFlags& flags, const Request& request) {
  DYNMO_ASSIGN(const elastic::Reply reply, ask(flags, request));
  fmt::print("{}\n", reply.text);
  return 0;
}

}  // namespace

void add_ctl_command(CLI::App& app, Command& chosen) {
  CLI::App* command = app.add_subcommand(
      "ctl", "Ask or command an elastic run that goes on: its ranks, checkpoints, end");
  const auto flags = std::make_shared<CtlFlags>();
  command
      ->add_option("run", flags->run,
                   "Folder of the run, or HOST:PORT of its leader (with --secret)")
      ->required();
  command->add_option("--secret", flags->secret, "File with the run's secret; default RUN/secret");
  command->add_option("--timeout", flags->timeout_s, "Seconds to wait for the run's answer")
      ->check(CLI::Validator(
          [](const std::string& text) {
            double seconds = 0;  // NaN is out of range, but CLI::Range accepts it
            const bool good =
                CLI::detail::lexical_cast(text, seconds) && seconds >= 0.1 && seconds <= 1e6;
            return good ? std::string() : "Value " + text + " not in range 0.1 to 1000000 seconds";
          },
          "FLOAT in [0.1 - 1e+06]"));
  command->require_subcommand(1);
  const auto add = [&](const char* name, const char* what, const Request& request) {
    CLI::App* sub = command->add_subcommand(name, what);
    sub->fallthrough();
    sub->callback([flags, request, &chosen] {
      chosen = [flags, request] {
        Request full = request;
        full.ranks = flags->ranks;
        full.member = flags->member;
        return run_request(*flags, full);
      };
    });
    return sub;
  };
  CLI::App* status = command->add_subcommand("status", "Print step, speed, plan and ranks");
  status->fallthrough();
  status->add_flag("--json", flags->json, "Print what the run says as JSON");
  status->callback([flags, &chosen] { chosen = [flags] { return run_status(*flags); }; });
  add("pack", "Train on N ranks (of each replica) from the next step on; the others end",
      {.kind = RequestKind::kPack})
      ->add_option("ranks", flags->ranks, "How many")
      ->required()
      ->check(CLI::Range(1, 4096));
  add("grow", "Start N more ranks (of each replica) on this host, which join the run",
      {.kind = RequestKind::kGrow})
      ->add_option("ranks", flags->ranks, "How many")
      ->required()
      ->check(CLI::Range(1, 4096));
  add("drain", "Take all layers from rank R, which then ends", {.kind = RequestKind::kDrain})
      ->add_option("rank", flags->member, "Its number, as `status` prints it")
      ->required()
      ->check(CLI::Range(0, 1 << 30));
  add("release", "Call the hook again for releases that are parked",
      {.kind = RequestKind::kRelease});
  add("checkpoint", "Write a checkpoint now, and wait until it is on the disk",
      {.kind = RequestKind::kCheckpoint});
  add("stop", "Write a checkpoint, and end the run", {.kind = RequestKind::kStop});
}

}  // namespace dynmo::app
