// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/line_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "dynmo/process/listener.h"
#include "dynmo/process/signals_blocked.h"

namespace dynmo::process {
namespace {

using ServerClock = std::chrono::steady_clock;

using std::chrono::milliseconds;

constexpr milliseconds kTick{500};  // between two looks for clients that say nothing
constexpr milliseconds kFlush{500};

}  // namespace

class LineServer::Loop {
 public:
  Loop(Options options, UniqueFd socket, UniqueFd wake, OnLine on_line, OnGone on_gone)
      : options_(std::move(options)),
        on_line_(std::move(on_line)),
        on_gone_(std::move(on_gone)),
        wake_(std::move(wake)) {
    listener_.listen(std::move(socket));
    const SignalsBlocked blocked;
    thread_ = std::thread([this] { run(); });
  }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;
  ~Loop() {
    {
      const std::lock_guard lock(mutex_);
      wanted_.stop = true;
    }
    wake();
    thread_.join();
  }

  [[nodiscard]] std::uint16_t port() const { return local_port(listener_.socket()); }
  [[nodiscard]] std::optional<std::string> take_failure() { return listener_.take_failure(); }
  void send(ClientId client, std::string line, bool done) {
    {
      const std::lock_guard lock(mutex_);
      wanted_.sends.push_back({client, std::move(line), done});
    }
    wake();
  }
  void flush() {
    std::unique_lock lock(mutex_);
    wanted_.flush = true;
    wake();
    flushed_.wait_for(lock, kFlush, [this] { return !wanted_.flush; });
  }

 private:
  struct LineConnection {
    ClientId id = 0;
    UniqueFd socket;
    std::string in;
    std::string out;
    bool heard = false;  // it has said its line
    bool done = false;
    ServerClock::time_point since = ServerClock::now();  // it has something to say or to read
  };
  struct Send {
    ClientId client = 0;
    std::string line;
    bool done = false;
  };

  // The requests of other threads to the loop's.
  struct Wanted {
    std::vector<Send> sends;
    bool flush = false;
    bool stop = false;
  };

  void wake() const {
    const std::uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof one);
  }
  void run();
  void wait_for_events();
  void accept_all();
  [[nodiscard]] bool has_room() const;
  [[nodiscard]] bool make_room();
  void take_sends();
  void serve(LineConnection& client);
  void drop_silent();
  [[nodiscard]] bool write_out(LineConnection& client) const;

  const Options options_;
  const OnLine on_line_;
  const OnGone on_gone_;
  Listener listener_;
  const UniqueFd wake_;
  std::list<LineConnection> clients_;  // the thread's own
  ClientId next_ = 1;                  // the thread's own, too

  std::mutex mutex_;
  std::condition_variable flushed_;
  Wanted wanted_;  // guarded by mutex_

  std::thread thread_;
};

void LineServer::Loop::run() {
  while (true) {
    wait_for_events();
    accept_all();
    take_sends();
    for (LineConnection& client : clients_) {
      if (client.socket) serve(client);
    }
    drop_silent();
    for (const LineConnection& client : clients_) {
      if (!client.socket && !client.done) on_gone_(client.id);
    }
    clients_.remove_if([](const LineConnection& client) { return !client.socket; });
    const bool empty = std::ranges::all_of(
        clients_, [](const LineConnection& client) { return client.out.empty(); });
    const std::lock_guard lock(mutex_);
    if (wanted_.flush && empty && wanted_.sends.empty()) {
      wanted_.flush = false;
      flushed_.notify_all();
    }
    if (wanted_.stop && wanted_.sends.empty()) return;
  }
}

void LineServer::Loop::wait_for_events() {
  const auto pause_end = listener_.pause_end();
  std::vector<pollfd> events = {
      {.fd = wake_.get(), .events = POLLIN, .revents = 0},
      {.fd = pause_end ? -1 : listener_.socket().get(), .events = POLLIN, .revents = 0}};
  for (const LineConnection& client : clients_) {
    const int wanted = POLLIN | (client.out.empty() ? 0 : POLLOUT);
    events.push_back(
        {.fd = client.socket.get(), .events = static_cast<short>(wanted), .revents = 0});
  }
  auto at_most = clients_.empty() ? milliseconds(-1) : kTick;
  if (pause_end) {
    at_most =
        std::max(std::chrono::ceil<milliseconds>(*pause_end - ServerClock::now()), milliseconds(0));
  }
  poll(events.data(), events.size(), static_cast<int>(at_most.count()));
  std::uint64_t ignored = 0;
  (void)!read(wake_.get(), &ignored, sizeof ignored);
}

void LineServer::Loop::accept_all() {
  while (UniqueFd socket = listener_.accept()) {
    if (!make_room()) continue;  // closed at once
    keep_alive(socket);
    LineConnection& client = clients_.emplace_back();
    client.id = next_++;
    client.socket = std::move(socket);
  }
}

bool LineServer::Loop::has_room() const {
  const auto counts = [](const LineConnection& client) {
    return client.socket && (!client.heard || client.done);
  };
  return std::ranges::count_if(clients_, counts) < options_.max_clients;
}

// Closes the oldest connections whose clients have sent nothing yet, until there is room. So silent
// clients cannot keep others out. Returns false if the rest have sent their line.
bool LineServer::Loop::make_room() {
  for (LineConnection& client : clients_) {
    if (has_room()) return true;
    if (!client.socket || client.heard) continue;
    serve(client);  // its line may have come meanwhile
    if (!client.socket || client.heard) continue;
    client.done = true;
    client.socket.reset();
  }
  return has_room();
}

void LineServer::Loop::take_sends() {
  std::vector<Send> sends;
  {
    const std::lock_guard lock(mutex_);
    sends.swap(wanted_.sends);
  }
  for (Send& each : sends) {
    for (LineConnection& client : clients_) {
      if (client.id != each.client || client.done) continue;
      client.out += each.line;
      client.done = each.done;
      client.since = ServerClock::now();
    }
  }
}

// Sends what the socket takes at once. Returns false if the connection is to be closed.
bool LineServer::Loop::write_out(LineConnection& client) const {
  if (!send_present(client.socket, client.out)) return false;
  if (!client.out.empty()) return client.out.size() <= options_.max_unread;
  return !client.done;
}

void LineServer::Loop::serve(LineConnection& client) {
  // Other clients wait for this one, so it is read in parts.
  bool open = receive_present(client.socket, client.in, options_.max_line);
  if (client.heard) client.in.clear();
  const std::size_t end = client.in.find(options_.end);
  if (!client.heard && end != std::string::npos && end <= options_.max_line) {
    client.heard = true;
    Answer answer = on_line_(client.id, std::string_view(client.in).substr(0, end));
    client.in.clear();
    client.out += answer.line;
    client.done = answer.done;
    client.since = ServerClock::now();
  } else if (!client.heard && client.in.size() > options_.max_line) {
    client.done = true;  // no client waits for it
    open = false;
  }
  if (!write_out(client) || !open) client.socket.reset();
  if (!client.socket && !client.heard) client.done = true;  // it has asked for nothing
}

void LineServer::Loop::drop_silent() {
  const auto now = ServerClock::now();
  for (LineConnection& client : clients_) {
    if ((client.heard && !client.done) || now - client.since <= options_.first_line) continue;
    client.done = true;
    client.socket.reset();
  }
}

LineServer::LineServer(std::unique_ptr<Loop> loop) : loop_(std::move(loop)) {}
LineServer::~LineServer() = default;

Expected<std::unique_ptr<LineServer>> LineServer::listen(const Options& options, OnLine on_line,
                                                         OnGone on_gone) {
  DYNMO_ASSIGN(UniqueFd socket, listen_on(options.address, options.port));
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake) {
    return make_error(ErrorCode::kBadInput, "cannot listen on port {} of {}: {}", options.port,
                      options.address, system_reason(errno));
  }
  return std::unique_ptr<LineServer>(new LineServer(std::make_unique<Loop>(
      options, std::move(socket), std::move(wake), std::move(on_line), std::move(on_gone))));
}

std::uint16_t LineServer::port() const { return loop_->port(); }
void LineServer::send(ClientId client, std::string line, bool done) {
  loop_->send(client, std::move(line), done);
}
void LineServer::flush() { loop_->flush(); }
std::optional<std::string> LineServer::take_failure() { return loop_->take_failure(); }

Expected<LineClient> LineClient::connect(const std::string& address, std::uint16_t port,
                                         std::chrono::milliseconds time) {
  auto socket = connect_to(address, port, ServerClock::now() + time);
  if (!socket) return Error{ErrorCode::kPeerLost, socket.error().message};
  make_prompt(*socket);
  keep_alive(*socket);
  return LineClient(*std::move(socket));
}

Expected<void> LineClient::send(std::string_view line) {
  for (std::string rest(line); send_present(socket_, rest);) {
    if (rest.empty()) return {};
    wait_for(socket_, POLLOUT, ServerClock::now() + std::chrono::seconds(1));
  }
  return make_error(ErrorCode::kPeerLost, "{}", system_reason(errno));
}

Expected<std::string> LineClient::receive(std::size_t max_line, std::chrono::milliseconds time) {
  const auto deadline = ServerClock::now() + time;
  while (true) {
    if (const std::size_t end = in_.find('\n'); end != std::string::npos) {
      std::string line = in_.substr(0, end);
      in_.erase(0, end + 1);
      return line;
    }
    if (in_.size() > max_line) {
      return make_error(ErrorCode::kPeerLost, "it says more than {} bytes without an end",
                        max_line);
    }
    if (!wait_for(socket_, POLLIN, deadline)) {
      return make_error(ErrorCode::kPeerLost, "it said nothing for {} ms", time.count());
    }
    if (receive_present(socket_, in_, max_line) || in_.find('\n') != std::string::npos) continue;
    if (errno == 0) return make_error(ErrorCode::kPeerLost, "it closed the connection");
    return make_error(ErrorCode::kPeerLost, "{}", system_reason(errno));
  }
}

}  // namespace dynmo::process
