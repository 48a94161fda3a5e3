// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sums the gradients of a step over data-parallel replicas while the rest of the step still runs: a
// layer's messages are posted as soon as its last weight gradient is done.
//
// Direct reduce-scatter, then all-gather: of D replicas, replica i sums the i-th part of a layer's
// gradients and gives the sum to the others, so each sends and receives 2 (D - 1) / D of the bytes,
// which no order of messages can undercut. Every element is added in the order of the replicas,
// ((g0 + g1) + g2) + ..., whoever sums it: all replicas get the same bits, and they are those of
// one rank that keeps an accumulator a replica. (A ring adds each part in an order of its own.)

#include <ATen/core/Tensor.h>

#include <list>
#include <memory>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/model/layer.h"
#include "dynmo/runtime/engine.h"
#include "dynmo/runtime/staging.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

// The reduction of one step on one rank. One thread, as its transport.
class Reduction {
 public:
  // `peers`: the ranks that hold the same layers, by replica; with one of them nothing is done.
  // The first two arguments must outlive it.
  Reduction(transport::Transport& peers, LayerStates& states, const Staging& staging = {})
      : peers_(peers), states_(states), staging_(staging) {}

  // The layer's gradients are complete on this rank and will not be touched before finish(). All
  // peers call it in the same order of layers. Sums the layers before the previous one, which waits
  // only where a peer is behind; so at most two layers' gradients are held twice. Messages are of
  // at most kPieceBytes on transport::reduction_tag(layer).
  void start(LayerId layer);

  // Waits for all that was started; then the states hold the sums. The first error of any call:
  // kPeerLost, the group is finished.
  [[nodiscard]] Expected<void> finish();

  // This thread's time in the calls so far: what the reduction did not hide.
  [[nodiscard]] double seconds() const { return seconds_; }

 private:
  // A layer between start() and finish().
  struct Bucket {
    LayerId layer;
    model::LayerState host;  // its gradients alone, in host memory
    // For each replica, piece by piece: its gradients of the part that is summed here (none for
    // this one).
    std::vector<std::vector<at::Tensor>> arrived;
    std::vector<std::unique_ptr<transport::Operation>> operations;
  };

  [[nodiscard]] Expected<void> sum(Bucket& bucket);
  [[nodiscard]] Expected<void> sum_all_but(std::size_t newest);

  transport::Transport& peers_;
  LayerStates& states_;
  Staging staging_;
  std::list<Bucket> scattered_;  // parts under way to whom they are summed by, in order
  std::list<Bucket> gathered_;   // sums under way
  Expected<void> status_;
  double seconds_ = 0;
};

// Elements of all gradients of `state`, in the order of its parameters, cut into `parts` parts of
// equal size (up to one element) and those into views of at most kPieceBytes of one gradient each.
// A function of the shapes alone. Empty for a frozen layer.
[[nodiscard]] std::vector<at::Tensor> gradient_pieces(const model::LayerState& state, int part,
                                                      int parts);

}  // namespace dynmo::runtime
