// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sums the gradients of a step over data-parallel replicas while the rest of the step runs. A
// layer's messages are posted as soon as its last weight gradient is done.
//
// It is a direct reduce-scatter, then an all-gather. Replica i of D sums the i-th part of a layer's
// gradients and sends the sum to the others. So each replica sends and receives 2 (D - 1) / D of
// the bytes, the minimum for any order of messages.
//
// Every element is added in the order of the replicas, ((g0 + g1) + g2) + ..., on any replica. So
// all replicas get the same bits: those of one rank that keeps an accumulator for each replica. (A
// ring adds each part in a different order.)

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

// The reduction of one step on one rank. Belongs to one thread, like its transport.
class Reduction {
 public:
  // Prepares a reduction over `peers`: the ranks that hold the same layers, by replica. With one
  // peer nothing is done. The first two arguments must outlive the object.
  Reduction(transport::Transport& peers, LayerStates& states, const Staging& staging = {})
      : peers_(peers), states_(states), staging_(staging) {}

  // Begins to sum a layer's gradients. They are complete on this rank and do not change before
  // finish(). All peers call it for the same layers in the same order.
  //
  // Also completes the sums of all layers but this one and the previous one. It waits only if a
  // peer is behind. So at most two layers' gradients are held twice. Messages have at most
  // kPieceBytes, on transport::reduction_tag(layer).
  void start(LayerId layer);

  // Waits for all reductions. Then the states hold the sums. Returns the first error of any call,
  // which is kPeerLost and ends the group.
  [[nodiscard]] Expected<void> finish();

  // Returns the seconds that this thread has spent in the calls so far. Compute did not hide them.
  [[nodiscard]] double seconds() const { return seconds_; }

 private:
  // A layer between start() and finish().
  struct Bucket {
    LayerId layer;
    model::LayerState host;  // gradients only, in host memory
    // The gradients of the part that is summed here, from each other replica, by piece.
    std::vector<std::vector<at::Tensor>> arrived;
    std::vector<std::unique_ptr<transport::Operation>> operations;
  };

  [[nodiscard]] Expected<void> sum(Bucket& bucket);
  [[nodiscard]] Expected<void> sum_all_but(std::size_t newest);

  transport::Transport& peers_;
  LayerStates& states_;
  Staging staging_;
  // Parts on their way to the ranks that sum them, in order.
  std::list<Bucket> scattered_;
  std::list<Bucket> gathered_;  // sums in flight
  Expected<void> status_;
  double seconds_ = 0;
};

// Returns part `part` of the elements of all gradients of `state`, in the order of its parameters.
// The `parts` parts have equal sizes, up to one element. A part is cut into views of at most
// kPieceBytes of one gradient each. The result depends only on the shapes, and is empty for a
// frozen layer.
[[nodiscard]] std::vector<at::Tensor> gradient_pieces(const model::LayerState& state, int part,
                                                      int parts);

}  // namespace dynmo::runtime
