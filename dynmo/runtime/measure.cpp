// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/measure.h"

#include <ATen/ATen.h>

#include <chrono>

#include "dynmo/core/check.h"
#include "dynmo/core/median.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/runtime/pieces.h"
#include "dynmo/runtime/reduction.h"

namespace dynmo::runtime {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

Expected<double> message_time_s(transport::Transport& pipeline, transport::Tag tag,
                                const std::vector<std::int64_t>& shape, at::ScalarType type) {
  constexpr int kTrips = 9;
  const at::Tensor there = at::zeros(shape, type);
  const at::Tensor back = at::empty_like(there);
  double message_s = 0;
  for (int first = 0; first + 1 < pipeline.size(); ++first) {
    const bool asks = pipeline.rank() == transport::Member(first);
    if (!asks && pipeline.rank() != transport::Member(first + 1)) continue;
    const transport::Member peer(asks ? first + 1 : first);
    std::vector<double> seconds;
    for (int trip = 0; trip < kTrips; ++trip) {
      const auto start = Clock::now();
      const auto receive = pipeline.receive(peer, tag, bytes_of(back));
      if (!asks) DYNMO_TRY(receive->wait());
      DYNMO_TRY(pipeline.send(peer, tag, bytes_of(there))->wait());
      if (asks) DYNMO_TRY(receive->wait());
      seconds.push_back(seconds_since(start) / 2);
    }
    // (The median leaves out the first message, which waits for the other rank, and outliers.)
    if (asks) message_s = median(std::move(seconds));
  }
  return message_s;
}

Expected<double> reduction_bytes_per_s(transport::Transport& peers, LayerStates& states,
                                       const Staging& staging) {
  DYNMO_CHECK(peers.size() > 1, "two or more replicas, got {}", peers.size());
  double bytes = 0;
  const auto start = Clock::now();
  Reduction reduction(peers, states, staging);
  for (auto state = states.rbegin(); state != states.rend(); ++state) {
    for (const model::Parameter& parameter : state->second.parameters) {
      if (parameter.gradient.defined()) bytes += static_cast<double>(parameter.gradient.nbytes());
    }
    if (!state->second.frozen) reduction.start(state->first);
  }
  DYNMO_TRY(reduction.finish());
  const double replicas = peers.size();
  return 2 * (replicas - 1) / replicas * bytes / seconds_since(start);
}

}  // namespace dynmo::runtime
