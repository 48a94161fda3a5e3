// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/control_service.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "dynmo/process/sockets.h"

namespace dynmo::elastic {

using process::ClientId;
using process::LineServer;

namespace {

MemberId id_of(const Newcomer& newcomer) { return newcomer.member.id; }

}  // namespace

ControlService::ControlService(Options options)
    : options_(std::move(options)),
      secret_(options_.secret.empty() ? make_secret() : options_.secret),
      joining_{.next_number = options_.first_member},
      status_(Json::object()) {}

Expected<std::unique_ptr<ControlService>> ControlService::open(Options options) {
  std::unique_ptr<ControlService> service(new ControlService(std::move(options)));
  DYNMO_ASSIGN(service->server_,
               LineServer::listen(
                   {.address = service->options_.address, .max_line = kMaxRequest},
                   [self = service.get()](ClientId client, std::string_view line) {
                     return self->on_line(client, line);
                   },
                   [self = service.get()](ClientId client) { self->gone(client); }));
  service->endpoint_ = {.address = service->options_.address,
                        .port = service->server_->port(),
                        .host = service->options_.leader.host,
                        .pid = service->options_.leader.pid};
  return service;
}

Expected<void> ControlService::publish() {
  DYNMO_TRY(write_job(options_.run, endpoint_, secret_));
  published_ = true;
  return {};
}

void ControlService::hand_over(JobFile next) {
  const std::lock_guard lock(mutex_);
  next_endpoint_ = std::move(next);
}

Reply ControlService::over() const {
  Reply over = refusal(make_error(ErrorCode::kPeerLost, "the run has ended"));
  if (!next_endpoint_) return over;
  over.text = fmt::format("another rank leads the run now: ask again at {}:{} of host '{}'",
                          next_endpoint_->address, next_endpoint_->port, next_endpoint_->host);
  over.again = true;
  over.leader = next_endpoint_;
  return over;
}

ControlService::~ControlService() {
  if (published_ && !next_endpoint_) remove_job_of(options_.run, endpoint_);
  if (server_ == nullptr) return;
  std::vector<ClientId> present;
  {
    const std::lock_guard lock(mutex_);
    present.swap(present_);
  }
  for (const ClientId client : present) {
    server_->send(client, to_line(over()), /*done=*/true);
  }
  server_->flush();
  server_.reset();
}

LineServer::Answer ControlService::on_line(ClientId client, std::string_view line) {
  const auto refuse = [](const Error& why) {
    return LineServer::Answer{.line = to_line(refusal(why)), .done = true};
  };
  const auto request = parse_request(line);
  // A client without the secret learns nothing about its request.
  if (!request || !same_secret(request->secret, secret_)) {
    return refuse(make_error(ErrorCode::kBadInput,
                             "the leader does not take this request: wanted the run's secret, "
                             "which stands in '{}' on its host",
                             secret_path(options_.run).string()));
  }
  if (request->kind == RequestKind::kConfig) {
    return {.line = to_line(Reply{.done = true, .text = options_.config}), .done = true};
  }
  if (request->kind == RequestKind::kStatus) {
    const std::lock_guard lock(mutex_);
    if (next_endpoint_) return {.line = to_line(over()), .done = true};
    return {.line = to_line(Reply{.done = true, .text = "", .status = status_}), .done = true};
  }
  if (request->kind == RequestKind::kJoin) return on_join(client, *request);
  const std::lock_guard lock(mutex_);
  requests_.push_back({.kind = request->kind,
                       .client = client,
                       .ranks = request->ranks,
                       .member = request->member});
  present_.push_back(client);
  note_waiting();
  return {.line = "", .done = false};
}

LineServer::Answer ControlService::on_join(ClientId client, const Request& request) {
  if (process::is_loopback(options_.group_address) &&
      request.newcomer.host != options_.leader.host) {
    const Error why = make_error(
        ErrorCode::kBadInput,
        "the ranks of the run meet at {} of host '{}', which host '{}' does not reach: wanted a "
        "run that was started with elastic.listen = an address of its host, or by ranks whose "
        "MASTER_ADDR is one",
        options_.group_address, options_.leader.host, request.newcomer.host);
    return {.line = to_line(refusal(why)), .done = true};
  }
  if (const auto same = check_same(request.build, options_.build()); !same) {
    return {.line = to_line(refusal(same.error())), .done = true};
  }
  const std::lock_guard lock(mutex_);
  Member member = request.newcomer;
  // It may come again before its old connection is seen as closed.
  const auto same = std::ranges::find(joining_.newcomers, member.id, id_of);
  if (same != joining_.newcomers.end()) lose(same->client);
  const auto [known, first] = joining_.numbers.try_emplace(member.id, joining_.next_number);
  if (first) ++joining_.next_number;
  member.number = known->second;
  joining_.newcomers.push_back({.client = client, .member = member});
  present_.push_back(client);
  note_waiting();
  Reply reply{.done = true, .text = fmt::format("waiting as rank {}", member.number)};
  reply.standby = member.number;
  return {.line = to_line(reply), .done = false};
}

void ControlService::forget(ClientId client) {
  std::erase(present_, client);
  std::erase_if(joining_.newcomers,
                [&](const Newcomer& newcomer) { return newcomer.client == client; });
  note_waiting();
}

void ControlService::note_waiting() {
  const auto waits = [](const Newcomer& newcomer) { return !newcomer.admitted; };
  waiting_ =
      !requests_.empty() || std::ranges::count_if(joining_.newcomers, waits) >= options_.replicas;
}

void ControlService::gone(ClientId client) {
  const std::lock_guard lock(mutex_);
  lose(client);
}

void ControlService::lose(ClientId client) {
  for (const Newcomer& newcomer : joining_.newcomers) {
    if (newcomer.client != client || !newcomer.admitted) continue;
    joining_.missing = make_error(ErrorCode::kPeerLost, "rank {} has gone before it had joined",
                                  newcomer.member.number);
  }
  forget(client);
}

int ControlService::next_member() {
  const std::lock_guard lock(mutex_);
  return joining_.next_number;
}

std::vector<ClientRequest> ControlService::take() {
  const std::lock_guard lock(mutex_);
  std::vector<ClientRequest> taken = std::exchange(requests_, {});
  note_waiting();
  return taken;
}

std::vector<Newcomer> ControlService::newcomers() {
  const std::lock_guard lock(mutex_);
  std::vector<Newcomer> some = joining_.newcomers;
  std::erase_if(some, [](const Newcomer& newcomer) { return newcomer.admitted; });
  some.resize(some.size() - some.size() % static_cast<std::size_t>(options_.replicas));
  return some;
}

void ControlService::answer(ClientId client, const Reply& reply) {
  if (client == 0) return;
  {
    const std::lock_guard lock(mutex_);
    forget(client);
  }
  server_->send(client, to_line(reply), /*done=*/true);
}

void ControlService::admit(ClientId client, const Place& place) {
  Reply reply{.done = true, .text = "join"};
  reply.place = place;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(joining_.newcomers, client, &Newcomer::client);
    if (found == joining_.newcomers.end()) {
      joining_.missing =
          make_error(ErrorCode::kPeerLost, "rank {} has gone before it had joined", place.member);
      return;
    }
    found->admitted = true;
    note_waiting();
  }
  server_->send(client, to_line(reply), /*done=*/false);
}

std::optional<Error> ControlService::missing() {
  const std::lock_guard lock(mutex_);
  return joining_.missing;
}

void ControlService::dismiss_admitted() {
  std::vector<ClientId> admitted;
  {
    // Forgets them at once. From here on none can be missing.
    const std::lock_guard lock(mutex_);
    for (const Newcomer& newcomer : joining_.newcomers) {
      if (newcomer.admitted) admitted.push_back(newcomer.client);
    }
    for (const ClientId client : admitted) forget(client);
    joining_.missing.reset();
  }
  for (const ClientId client : admitted) {
    server_->send(client, to_line(Reply{.done = true, .text = "done"}), /*done=*/true);
  }
}

void ControlService::set_status(Json status) {
  const std::lock_guard lock(mutex_);
  status_ = std::move(status);
}

}  // namespace dynmo::elastic
