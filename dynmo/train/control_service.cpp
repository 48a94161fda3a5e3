// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/control_service.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "dynmo/process/sockets.h"

namespace dynmo::train {

using elastic::Reply;
using elastic::Request;
using elastic::RequestKind;
using process::ClientId;
using process::LineServer;

ControlService::ControlService(Options options)
    : options_(std::move(options)),
      secret_(options_.secret.empty() ? elastic::make_secret() : options_.secret),
      status_(Json::object()),
      next_member_(options_.first_member) {}

Expected<std::unique_ptr<ControlService>> ControlService::open(Options options) {
  std::unique_ptr<ControlService> service(new ControlService(std::move(options)));
  DYNMO_ASSIGN(service->server_,
               LineServer::listen(
                   {.address = service->options_.address, .max_line = elastic::kMaxRequest},
                   [self = service.get()](ClientId client, std::string_view line) {
                     return self->hear(client, line);
                   },
                   [self = service.get()](ClientId client) { self->gone(client); }));
  service->door_ = {.address = service->options_.address,
                    .port = service->server_->port(),
                    .host = service->options_.leader.host,
                    .pid = service->options_.leader.pid};
  DYNMO_TRY(elastic::write_job(service->options_.run, service->door_, service->secret_));
  return service;
}

ControlService::~ControlService() {
  if (!next_door_) elastic::remove_job(options_.run);
  if (server_ == nullptr) return;
  Reply over = elastic::refusal(make_error(ErrorCode::kPeerLost, "the run has ended"));
  if (next_door_) {
    over.text = fmt::format("another rank leads the run now: ask again at {}:{} of host '{}'",
                            next_door_->address, next_door_->port, next_door_->host);
    over.again = true;
    over.leader = next_door_;
  }
  std::vector<ClientId> present;
  {
    const std::lock_guard lock(mutex_);
    present.swap(present_);
  }
  for (const ClientId client : present) {
    server_->send(client, to_line(over), /*done=*/true);
  }
  server_->flush();
  server_.reset();
}

LineServer::Answer ControlService::hear(ClientId client, std::string_view line) {
  const auto refuse = [](const Error& why) {
    return LineServer::Answer{.line = to_line(elastic::refusal(why)), .done = true};
  };
  const auto request = elastic::parse_request(line);
  // Who does not know the secret hears nothing about what it has said.
  if (!request || !elastic::same_secret(request->secret, secret_)) {
    return refuse(make_error(ErrorCode::kBadInput,
                             "the leader does not take this request: wanted the run's secret, "
                             "which stands in '{}' on its host",
                             elastic::secret_path(options_.run).string()));
  }
  if (request->kind == RequestKind::kConfig) {
    return {.line = to_line(Reply{.done = true, .text = options_.config}), .done = true};
  }
  if (request->kind == RequestKind::kStatus) {
    const std::lock_guard lock(mutex_);
    return {.line = to_line(Reply{.done = true, .text = "", .status = status_}), .done = true};
  }
  if (request->kind == RequestKind::kJoin) return hear_join(client, *request);
  const std::lock_guard lock(mutex_);
  wishes_.push_back({.kind = request->kind,
                     .client = client,
                     .ranks = request->ranks,
                     .member = request->member});
  present_.push_back(client);
  note_waiting();
  return {.line = "", .done = false};
}

LineServer::Answer ControlService::hear_join(ClientId client, const Request& request) {
  if (process::is_loopback(options_.group_address) &&
      request.newcomer.host != options_.leader.host) {
    const Error why = make_error(
        ErrorCode::kBadInput,
        "the ranks of the run meet at {} of host '{}', which host '{}' does not reach: wanted a "
        "run that was started with elastic.listen = an address of its host, or by ranks whose "
        "MASTER_ADDR is one",
        options_.group_address, options_.leader.host, request.newcomer.host);
    return {.line = to_line(elastic::refusal(why)), .done = true};
  }
  if (const auto same = check_same(request.build, options_.build()); !same) {
    return {.line = to_line(elastic::refusal(same.error())), .done = true};
  }
  const std::lock_guard lock(mutex_);
  elastic::Member member = request.newcomer;
  const auto [known, first] = numbers_.try_emplace(member.id, next_member_);
  if (first) ++next_member_;
  member.number = known->second;
  standbys_.push_back({.client = client, .member = member});
  present_.push_back(client);
  note_waiting();
  Reply reply{.done = true, .text = fmt::format("standing by as rank {}", member.number)};
  reply.standby = member.number;
  return {.line = to_line(reply), .done = false};
}

void ControlService::forget(ClientId client) {
  std::erase(present_, client);
  std::erase_if(standbys_, [&](const Standby& standby) { return standby.client == client; });
  note_waiting();
}

void ControlService::note_waiting() {
  const auto stands_by = [](const Standby& standby) { return !standby.admitted; };
  waiting_ = !wishes_.empty() || std::ranges::count_if(standbys_, stands_by) >= options_.replicas;
}

void ControlService::gone(ClientId client) {
  const std::lock_guard lock(mutex_);
  for (const Standby& standby : standbys_) {
    if (standby.client != client || !standby.admitted) continue;
    missing_ = make_error(ErrorCode::kPeerLost, "rank {} has gone before it had joined",
                          standby.member.number);
  }
  forget(client);
}

int ControlService::next_member() {
  const std::lock_guard lock(mutex_);
  return next_member_;
}

std::vector<Wish> ControlService::take() {
  const std::lock_guard lock(mutex_);
  std::vector<Wish> taken = std::exchange(wishes_, {});
  note_waiting();
  return taken;
}

std::vector<Standby> ControlService::standbys() {
  const std::lock_guard lock(mutex_);
  std::vector<Standby> some = standbys_;
  std::erase_if(some, [](const Standby& standby) { return standby.admitted; });
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

void ControlService::admit(ClientId client, const elastic::Place& place) {
  Reply reply{.done = true, .text = "join"};
  reply.place = place;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(standbys_, client, &Standby::client);
    if (found == standbys_.end()) {
      missing_ =
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
  return missing_;
}

void ControlService::dismiss_admitted() {
  std::vector<ClientId> admitted;
  {
    // At once: one that goes from here on is missing no more.
    const std::lock_guard lock(mutex_);
    for (const Standby& standby : standbys_) {
      if (standby.admitted) admitted.push_back(standby.client);
    }
    for (const ClientId client : admitted) forget(client);
    missing_.reset();
  }
  for (const ClientId client : admitted) {
    server_->send(client, to_line(Reply{.done = true, .text = "done"}), /*done=*/true);
  }
}

void ControlService::set_status(Json status) {
  const std::lock_guard lock(mutex_);
  status_ = std::move(status);
}

}  // namespace dynmo::train
