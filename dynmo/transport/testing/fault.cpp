// SPDX-License-Identifier: Apache-2.0
#include "dynmo/transport/testing/fault.h"

#include <thread>

#include "dynmo/core/check.h"

namespace dynmo::transport {
namespace {

using Clock = std::chrono::steady_clock;

void flip(std::span<std::byte> bytes, std::size_t byte) {
  bytes[byte % bytes.size()] ^= std::byte{1};
}

class Dropped final : public Operation {
 public:
  Expected<void> wait() override { return {}; }
};

class Delayed final : public Operation {
 public:
  Delayed(std::unique_ptr<Operation> inner, Clock::time_point ready)
      : inner_(std::move(inner)), ready_(ready) {}
  Expected<void> wait() override {
    const auto done = inner_->wait();
    if (done) std::this_thread::sleep_until(ready_);
    return done;
  }

 private:
  std::unique_ptr<Operation> inner_;
  Clock::time_point ready_;
};

class CorruptSend final : public Operation {
 public:
  CorruptSend(Transport& inner, Member to, Tag tag, std::span<const std::byte> bytes,
              std::size_t byte)
      : copy_(bytes.begin(), bytes.end()) {
    flip(copy_, byte);
    inner_ = inner.send(to, tag, copy_);
  }
  Expected<void> wait() override { return inner_->wait(); }

 private:
  std::vector<std::byte> copy_;  // before inner_, so that it outlives it
  std::unique_ptr<Operation> inner_;
};

class CorruptReceive final : public Operation {
 public:
  CorruptReceive(std::unique_ptr<Operation> inner, std::span<std::byte> bytes, std::size_t byte)
      : inner_(std::move(inner)), bytes_(bytes), byte_(byte) {}
  Expected<void> wait() override {
    const auto done = inner_->wait();
    if (done) flip(bytes_, byte_);
    return done;
  }

 private:
  std::unique_ptr<Operation> inner_;
  std::span<std::byte> bytes_;
  std::size_t byte_;
};

class FaultyTransport final : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> owned, Transport& inner, std::vector<Fault> faults)
      : owned_(std::move(owned)), inner_(inner), faults_(std::move(faults)) {
    for (const Fault& fault : faults_) {
      DYNMO_CHECK(fault.kind != Fault::Kind::kDrop || fault.on == Fault::On::kSend,
                  "a dropped message to be a send");
      DYNMO_CHECK(fault.kind != Fault::Kind::kCall || fault.call, "something to call");
    }
    seen_.resize(faults_.size());
  }

  [[nodiscard]] Member rank() const override { return inner_.rank(); }
  [[nodiscard]] int size() const override { return inner_.size(); }
  [[nodiscard]] int number_of(Member rank) const override { return inner_.number_of(rank); }
  void abort(const Error& why) override { inner_.abort(why); }

  std::unique_ptr<Operation> send(Member to, Tag tag, std::span<const std::byte> bytes) override {
    const Fault* fault = match(Fault::On::kSend, to, tag);
    if (fault == nullptr) return inner_.send(to, tag, bytes);
    if (fault->kind == Fault::Kind::kDrop) return std::make_unique<Dropped>();
    if (fault->kind == Fault::Kind::kCorrupt) {
      return std::make_unique<CorruptSend>(inner_, to, tag, bytes, fault->byte);
    }
    before_post(*fault);
    return after_post(*fault, inner_.send(to, tag, bytes));
  }

  std::unique_ptr<Operation> receive(Member from, Tag tag, std::span<std::byte> bytes) override {
    const Fault* fault = match(Fault::On::kReceive, from, tag);
    if (fault == nullptr) return inner_.receive(from, tag, bytes);
    before_post(*fault);
    auto operation = inner_.receive(from, tag, bytes);
    if (fault->kind == Fault::Kind::kCorrupt) {
      return std::make_unique<CorruptReceive>(std::move(operation), bytes, fault->byte);
    }
    return after_post(*fault, std::move(operation));
  }

 private:
  const Fault* match(Fault::On on, Member peer, Tag tag) {
    const Fault* found = nullptr;
    for (std::size_t i = 0; i < faults_.size(); ++i) {
      const Fault& fault = faults_[i];
      if (fault.on != on || fault.peer.value_or(peer) != peer) continue;
      if (tag < fault.first_tag || tag > fault.last_tag) continue;
      const int number = seen_[i]++;
      const bool acts = number >= fault.first && number - fault.first < fault.count;
      if (acts && found == nullptr) found = &fault;
    }
    return found;
  }

  void before_post(const Fault& fault) {
    if (fault.kind == Fault::Kind::kFail) inner_.abort(fault.error);
    if (fault.kind == Fault::Kind::kCall) fault.call();
  }

  static std::unique_ptr<Operation> after_post(const Fault& fault,
                                               std::unique_ptr<Operation> operation) {
    if (fault.kind != Fault::Kind::kDelay) return operation;
    return std::make_unique<Delayed>(std::move(operation), Clock::now() + fault.delay);
  }

  std::unique_ptr<Transport> owned_;  // or null
  Transport& inner_;
  std::vector<Fault> faults_;
  std::vector<int> seen_;  // by fault: messages that matched so far
};

}  // namespace

std::unique_ptr<Transport> with_faults(std::unique_ptr<Transport> inner,
                                       std::vector<Fault> faults) {
  Transport& borrowed = *inner;
  return std::make_unique<FaultyTransport>(std::move(inner), borrowed, std::move(faults));
}

std::unique_ptr<Transport> with_faults(Transport& inner, std::vector<Fault> faults) {
  return std::make_unique<FaultyTransport>(nullptr, inner, std::move(faults));
}

}  // namespace dynmo::transport
