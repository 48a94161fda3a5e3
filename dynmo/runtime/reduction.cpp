// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/reduction.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/runtime/pieces.h"
#include "dynmo/transport/tags.h"

namespace dynmo::runtime {
namespace {

using Clock = std::chrono::steady_clock;

// Adds the seconds of its lifetime to a sum.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() { seconds_ += seconds_since(start_); }

 private:
  double& seconds_;
  Clock::time_point start_ = Clock::now();
};

model::LayerState gradients_of(const model::LayerState& state, const Staging& staging) {
  model::LayerState gradients;
  for (const model::Parameter& parameter : state.parameters) {
    gradients.parameters.emplace_back().gradient = staging.to_host_later(parameter.gradient);
  }
  staging.wait();
  return gradients;
}

}  // namespace

std::vector<at::Tensor> gradient_pieces(const model::LayerState& state, int part, int parts) {
  std::int64_t elements = 0;
  for (const model::Parameter& parameter : state.parameters) {
    if (parameter.gradient.defined()) elements += parameter.gradient.numel();
  }
  const std::int64_t first = elements * part / parts;
  const std::int64_t end = elements * (part + 1) / parts;
  std::vector<at::Tensor> pieces;
  std::int64_t start = 0;  // of the parameter, among all elements
  for (const model::Parameter& parameter : state.parameters) {
    if (!parameter.gradient.defined()) continue;
    const at::Tensor flat = parameter.gradient.view(-1);
    const std::int64_t most = kPieceBytes / static_cast<std::int64_t>(flat.element_size());
    const std::int64_t to = std::min(end - start, flat.numel());
    for (std::int64_t from = std::max<std::int64_t>(first - start, 0); from < to; from += most) {
      pieces.push_back(flat.narrow(0, from, std::min(most, to - from)));
    }
    start += flat.numel();
  }
  return pieces;
}

void Reduction::start(LayerId layer) {
  if (peers_.size() == 1 || !status_.has_value()) return;
  const Stopwatch stopwatch(seconds_);
  status_ = sum_all_but(1);
  if (!status_.has_value()) return;
  const transport::Tag tag = transport::reduction_tag(layer);
  const int self = peers_.rank().value;
  Bucket& bucket = scattered_.emplace_back();
  bucket.layer = layer;
  bucket.host = gradients_of(states_.at(layer), staging_);
  const auto mine = gradient_pieces(bucket.host, self, peers_.size());
  bucket.arrived.resize(static_cast<std::size_t>(peers_.size()));
  for (int i = 0; i < peers_.size(); ++i) {
    if (i == self) continue;
    auto& arrived = bucket.arrived[static_cast<std::size_t>(i)];
    for (const at::Tensor& piece : mine) {
      arrived.push_back(at::empty_like(piece));
      bucket.operations.push_back(
          peers_.receive(transport::Member(i), tag, bytes_of(arrived.back())));
    }
    for (const at::Tensor& piece : gradient_pieces(bucket.host, i, peers_.size())) {
      bucket.operations.push_back(peers_.send(transport::Member(i), tag, bytes_of(piece)));
    }
  }
}

// Adds the parts of a layer, which have arrived, and posts the exchange of the sums. The sums
// replace the gradients, or on a device their copies in host memory.
Expected<void> Reduction::sum(Bucket& bucket) {
  for (const auto& operation : bucket.operations) DYNMO_TRY(operation->wait());
  bucket.operations.clear();
  const transport::Tag tag = transport::reduction_tag(bucket.layer);
  const auto self = peers_.rank().index();
  std::vector<at::Tensor> mine = gradient_pieces(bucket.host, peers_.rank().value, peers_.size());
  for (std::size_t k = 0; k < mine.size(); ++k) {
    // Replica 1 may add in place, because g1 + g0 has the bits of g0 + g1.
    const bool in_place = self <= 1;
    at::Tensor total = in_place ? mine[k] : bucket.arrived[0][k];
    for (std::size_t i = in_place ? 0 : 1; i < bucket.arrived.size(); ++i) {
      if (i != self) total.add_(bucket.arrived[i][k]);
      if (i == self && !in_place) total.add_(mine[k]);
    }
    if (!in_place) mine[k].copy_(total);
  }
  bucket.arrived.clear();
  for (int i = 0; i < peers_.size(); ++i) {
    if (transport::Member(i) == peers_.rank()) continue;
    for (const at::Tensor& piece : gradient_pieces(bucket.host, i, peers_.size())) {
      bucket.operations.push_back(peers_.receive(transport::Member(i), tag, bytes_of(piece)));
    }
    for (const at::Tensor& piece : mine) {
      bucket.operations.push_back(peers_.send(transport::Member(i), tag, bytes_of(piece)));
    }
  }
  return {};
}

Expected<void> Reduction::sum_all_but(std::size_t newest) {
  while (scattered_.size() > newest) {
    gathered_.splice(gathered_.end(), scattered_, scattered_.begin());
    DYNMO_TRY(sum(gathered_.back()));
  }
  return {};
}

Expected<void> Reduction::finish() {
  const Stopwatch stopwatch(seconds_);
  DYNMO_TRY(status_);
  DYNMO_TRY(sum_all_but(0));
  for (const Bucket& bucket : gathered_) {
    for (const auto& operation : bucket.operations) DYNMO_TRY(operation->wait());
    const model::LayerState& state = states_.at(bucket.layer);
    for (std::size_t i = 0; i < state.parameters.size(); ++i) {
      staging_.put(bucket.host.parameters[i].gradient, state.parameters[i].gradient);
    }
  }
  gathered_.clear();
  return {};
}

}  // namespace dynmo::runtime
