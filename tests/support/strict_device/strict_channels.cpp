// SPDX-License-Identifier: Apache-2.0
#include "strict_channels.h"

#include <ATen/ATen.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "dynmo/process/sockets.h"
#include "machine_impl.h"

namespace dynmo::strict {
namespace {

using process::UniqueFd;

constexpr std::chrono::seconds kMeetTime{30};
constexpr std::chrono::milliseconds kMeetLook{20};
constexpr const char* kPort = "port";

std::atomic<int> spinning{0};

// Streams of groups that have ended serve again: a machine has few.
class SpareStreams {
 public:
  std::size_t take(at::Device device) {
    const std::lock_guard lock(mutex_);
    for (auto at = spare_.begin(); at != spare_.end(); ++at) {
      if (at->first != device.index()) continue;
      const std::size_t found = at->second;
      spare_.erase(at);
      return found;
    }
    return stream_number(Machine::get().new_stream(device));
  }
  void give_back(at::Device device, std::size_t stream) {
    const std::lock_guard lock(mutex_);
    spare_.emplace_back(device.index(), stream);
  }
  static SpareStreams& get() {
    static SpareStreams streams;
    return streams;
  }

 private:
  std::mutex mutex_;
  std::deque<std::pair<at::DeviceIndex, std::size_t>> spare_;
};

// One message, until its bytes have passed.
struct Passing {
  std::vector<std::byte> sent = {};  // read from the device already
  std::byte* to = nullptr;           // on the device, of a receive
  std::size_t bytes = 0;
  bool done = false;
  std::string fault = {};
};

// The connection of a group, and the thread that stands for the device's kernels.
class Wire {
 public:
  Wire(UniqueFd socket, bool sends) : socket_(std::move(socket)), sends_(sends) {
    TORCH_CHECK(wake_, "no descriptor is left");
    thread_ = std::thread([this] { run(); });
  }
  ~Wire() { end(); }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  void post(std::shared_ptr<Passing> passing) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(passing));
    changed_.notify_all();
  }
  // Returns whether the bytes have passed before the end.
  [[nodiscard]] bool wait(const Passing& passing) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return passing.done || ended_; });
    TORCH_CHECK(passing.fault.empty(), passing.fault);
    return passing.done;
  }
  [[nodiscard]] bool is_done(const Passing& passing) {
    const std::lock_guard lock(mutex_);
    return passing.done || ended_;
  }
  // Returns when nothing is in flight, or at the end.
  void flush() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return queue_.empty() || ended_; });
  }
  void end() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
      changed_.notify_all();
    }
    const std::uint64_t one = 1;
    static_cast<void>(::write(wake_.get(), &one, sizeof(one)));
    const std::lock_guard lock(joining_);
    if (thread_.joinable()) thread_.join();
  }

 private:
  // Waits until the socket is ready. Returns false at the end.
  [[nodiscard]] bool ready(short events) const {
    std::array<pollfd, 2> polled = {pollfd{socket_.get(), events, 0},
                                    pollfd{wake_.get(), POLLIN, 0}};
    while (::poll(polled.data(), 2, -1) < 0 && errno == EINTR) {
    }
    return polled[1].revents == 0;
  }
  // Waits for the end: the peer is lost, which no device notices.
  [[nodiscard]] bool spin() const {
    ++spinning;
    pollfd polled{wake_.get(), POLLIN, 0};
    while (::poll(&polled, 1, -1) < 0 && errno == EINTR) {
    }
    --spinning;
    return false;
  }
  [[nodiscard]] bool write_all(const void* from, std::size_t bytes) const {
    const auto* at = static_cast<const std::byte*>(from);
    while (bytes > 0) {
      if (!ready(POLLOUT)) return false;
      const ssize_t written = ::send(socket_.get(), at, bytes, MSG_NOSIGNAL);
      if (written < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (written <= 0) return spin();
      at += written;
      bytes -= static_cast<std::size_t>(written);
    }
    return true;
  }
  [[nodiscard]] bool read_all(void* to, std::size_t bytes) const {
    auto* at = static_cast<std::byte*>(to);
    while (bytes > 0) {
      if (!ready(POLLIN)) return false;
      const ssize_t read = ::recv(socket_.get(), at, bytes, 0);
      if (read < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (read <= 0) return spin();
      at += read;
      bytes -= static_cast<std::size_t>(read);
    }
    return true;
  }
  // A send ends when its bytes are received.
  [[nodiscard]] bool pass(Passing& passing) const {
    std::uint64_t size = passing.bytes;
    std::byte received{1};
    if (sends_) {
      return write_all(&size, sizeof(size)) && write_all(passing.sent.data(), passing.bytes) &&
             read_all(&received, 1);
    }
    if (!read_all(&size, sizeof(size))) return false;
    if (size != passing.bytes) {
      passing.fault = c10::str("strict device: ", size, " bytes for a receive of ", passing.bytes);
      return true;
    }
    return read_all(passing.to, passing.bytes) && write_all(&received, 1);
  }
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ended_ || !queue_.empty(); });
      if (ended_) return;
      const std::shared_ptr<Passing> next = queue_.front();
      lock.unlock();
      const bool passed = pass(*next);
      lock.lock();
      if (!passed) return;
      next->done = true;
      queue_.pop_front();
      changed_.notify_all();
    }
  }

  UniqueFd socket_;
  UniqueFd wake_{::eventfd(0, EFD_CLOEXEC)};
  bool sends_;
  std::mutex mutex_;  // guards the queue, what is in it, and ended_
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Passing>> queue_;
  bool ended_ = false;
  std::mutex joining_;
  std::thread thread_;
};

class PairWork final : public ::c10d::Work {
 public:
  PairWork(std::shared_ptr<Wire> wire, std::shared_ptr<Passing> passing, Event end,
           at::DeviceIndex device)
      : wire_(std::move(wire)),
        passing_(std::move(passing)),
        end_(std::move(end)),
        device_(device) {}
  bool isCompleted() override { return wire_->is_done(*passing_); }
  bool wait(std::chrono::milliseconds /*limit*/) override {
    static_cast<void>(wire_->wait(*passing_));
    Machine::get().block(end_, current_stream(device_));
    return true;
  }

 private:
  std::shared_ptr<Wire> wire_;
  std::shared_ptr<Passing> passing_;
  Event end_;
  at::DeviceIndex device_;
};

class PairGroup final : public ::c10d::Backend {
 public:
  PairGroup(UniqueFd socket, int rank, at::Device device, OnAbort on_abort)
      : ::c10d::Backend(rank, 2),
        device_(device),
        on_abort_(on_abort),
        stream_(SpareStreams::get().take(device)),
        wire_(std::make_shared<Wire>(std::move(socket), rank == 0)) {}
  ~PairGroup() override {
    if (on_abort_ == OnAbort::kEnds) wire_->end();  // else what waits keeps it
    SpareStreams::get().give_back(device_, stream_);
  }

  c10::intrusive_ptr<::c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int) override {
    TORCH_CHECK(to == 1 && getRank() == 0, "a channel has one direction");
    return post(tensors.front(), /*writes=*/false);
  }
  c10::intrusive_ptr<::c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int) override {
    TORCH_CHECK(from == 0 && getRank() == 1, "a channel has one direction");
    return post(tensors.front(), /*writes=*/true);
  }
  void abort() override {
    if (on_abort_ == OnAbort::kEnds) wire_->end();
  }
  void shutdown() override {
    wire_->flush();
    wire_->end();
  }

 private:
  c10::intrusive_ptr<::c10d::Work> post(const at::Tensor& tensor, bool writes) {
    Machine& machine = Machine::get();
    TORCH_CHECK(machine.mode() == Mode::kAtOnce && machine.is_device(tensor.data_ptr()),
                "a tensor of the strict device, not in its late mode");
    const auto passing = std::make_shared<Passing>();
    passing->bytes = tensor.nbytes();
    std::byte* const at = machine.open(tensor.data_ptr());
    Block* const block = machine.block_at(tensor.data_ptr());
    std::size_t& current = current_stream(device_.index());
    Event before;
    machine.record(before, current);
    machine.block(before, stream_);
    Event end;
    {
      const std::size_t computes = std::exchange(current, stream_);
      try {
        if (writes) {
          machine.launch(device_.index(), "receive", {}, {&block, 1}, [] {});
          passing->to = at;
        } else {
          machine.launch(device_.index(), "send", {&block, 1}, {},
                         [&] { passing->sent.assign(at, at + passing->bytes); });
        }
      } catch (...) {
        current = computes;
        throw;
      }
      current = computes;
    }
    machine.record(end, stream_);
    wire_->post(passing);
    return c10::make_intrusive<PairWork>(wire_, passing, end, device_.index());
  }

  at::Device device_;
  OnAbort on_abort_;
  std::size_t stream_;
  std::shared_ptr<Wire> wire_;
};

// Accepts the peer, or throws if the store says that it does not come.
UniqueFd accept_peer(const UniqueFd& listener, ::c10d::Store& store) {
  const auto until = std::chrono::steady_clock::now() + kMeetTime;
  pollfd polled{listener.get(), POLLIN, 0};
  while (::poll(&polled, 1, static_cast<int>(kMeetLook.count())) <= 0) {
    TORCH_CHECK(store.check({kPort}), "the group of the ranks has ended");
    TORCH_CHECK(std::chrono::steady_clock::now() < until, "the other rank does not come");
  }
  return UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
}

}  // namespace

c10::intrusive_ptr<::c10d::Backend> connect_pair(const c10::intrusive_ptr<::c10d::Store>& store,
                                                 int rank, at::Device device, OnAbort on_abort) {
  UniqueFd socket;
  if (rank == 0) {
    auto listener = process::listen_on("127.0.0.1", 0);
    TORCH_CHECK(listener.has_value(), listener.error().message);
    store->set(kPort, std::to_string(process::local_port(*listener)));
    socket = accept_peer(*listener, *store);
  } else {
    const auto port = static_cast<std::uint16_t>(std::stoi(store->get_to_str(kPort)));
    auto connected =
        process::connect_to("127.0.0.1", port, std::chrono::steady_clock::now() + kMeetTime);
    TORCH_CHECK(connected.has_value(), connected.error().message);
    socket = *std::move(connected);
  }
  TORCH_CHECK(socket, "no connection to the other rank");
  process::make_prompt(socket);
  return c10::make_intrusive<PairGroup>(std::move(socket), rank, device, on_abort);
}

int pairs_that_spin() { return spinning; }

}  // namespace dynmo::strict
