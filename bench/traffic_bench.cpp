// SPDX-License-Identifier: Apache-2.0
// Measures what counting messages costs: a send through CountingTransport and one without it, over
// a transport that does nothing; and gathering the rows of a rank at the end of an interval.
#include <benchmark/benchmark.h>

#include <array>
#include <cstdlib>

#include "dynmo/transport/tags.h"
#include "dynmo/transport/traffic.h"

namespace dynmo::transport {
namespace {

class Nowhere final : public Transport {
 public:
  explicit Nowhere(int ranks) : ranks_(ranks) {}
  [[nodiscard]] Member rank() const override { return Member(0); }
  [[nodiscard]] int size() const override { return ranks_; }
  [[nodiscard]] std::unique_ptr<Operation> send(Member, Tag,
                                                std::span<const std::byte> bytes) override {
    benchmark::DoNotOptimize(bytes.data());
    return nullptr;
  }
  [[nodiscard]] std::unique_ptr<Operation> receive(Member, Tag, std::span<std::byte>) override {
    return nullptr;
  }
  void abort(const Error&) override {}

 private:
  int ranks_;
};

// Messages of a step to all other ranks: activations, gradients, reductions and moves.
void send_all(benchmark::State& state, Transport& transport) {
  const std::array<std::byte, 64> bytes{};
  const std::array<Tag, 4> tags = {schedule_tag(0, 2), schedule_tag(0, 3),
                                   reduction_tag(LayerId(5)), migration_tag(LayerId(7))};
  std::int64_t messages = 0;
  for (auto _ : state) {
    for (int to = 1; to < transport.size(); ++to) {
      for (const Tag tag : tags) {
        benchmark::DoNotOptimize(transport.send(Member(to), tag, bytes));
      }
    }
    messages += static_cast<std::int64_t>(tags.size()) * (transport.size() - 1);
  }
  state.SetItemsProcessed(messages);
  state.counters["per_message"] = benchmark::Counter(
      static_cast<double>(messages), benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

void BM_Send(benchmark::State& state) {
  Nowhere nowhere(static_cast<int>(state.range(0)));
  send_all(state, nowhere);
}
BENCHMARK(BM_Send)->Arg(4)->Arg(64)->Arg(512);

void BM_CountedSend(benchmark::State& state) {
  Nowhere nowhere(static_cast<int>(state.range(0)));
  CountingTransport counting(nowhere);
  send_all(state, counting);
  // Every message was counted.
  std::int64_t counted = 0;
  for (const MessageCount& count : counting.row()) counted += count.messages;
  if (counted != state.items_processed()) state.SkipWithError("messages were not counted");
}
BENCHMARK(BM_CountedSend)->Arg(4)->Arg(64)->Arg(512);

}  // namespace
}  // namespace dynmo::transport
