// SPDX-License-Identifier: Apache-2.0
#pragma once

// Moves layers to other ranks while a step runs. Before its update a step changes no parameter and
// no moment, so these travel between the actions of the schedule; at the end of the step follow the
// gradients, and both ends make the same update. Training waits for the gradients alone.
//
// The source keeps its layer, and copies that arrive are verified, as in a migration (migrate.h).
// The figures of the step (exchange.h) tell whether all ranks hold what was sent.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <list>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/model/layer.h"
#include "dynmo/runtime/migrate.h"
#include "dynmo/runtime/rank_state.h"
#include "dynmo/runtime/staging.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

// One rank's part of a move. One thread calls it and posts its messages; a thread of its own waits
// for what arrives and computes the digests, but posts nothing.
class BackgroundMove {
 public:
  // Called by all ranks of the group with equal `moves` at a step boundary, each with the layers
  // that it sends `from`. Posts all that this rank receives. `actions`: calls of send_some() until
  // the end of the step. The group, the model and, until finish(), the tensors of the layers
  // outlive it, and nothing but gradients changes in them.
  BackgroundMove(transport::Transport& group, const model::Model& model,
                 const std::vector<LayerTransfer>& moves, const LayerStates& from,
                 std::size_t actions, const Staging& staging = {});
  ~BackgroundMove();
  BackgroundMove(const BackgroundMove&) = delete;
  BackgroundMove& operator=(const BackgroundMove&) = delete;

  // Sends the next few pieces, so few that the step's own messages do not wait for long behind
  // them. Does not block.
  void send_some();
  // The gradients of the step are complete in `from`, which has the layers that this rank sends.
  // Sends the rest and waits for what arrives. Returns the seconds that this took; a wait for
  // another rank to come to the end of its step is not among them. Called once. kPeerLost where a
  // rank is gone; the group is finished then.
  [[nodiscard]] Expected<double> finish(const LayerStates& from);
  // Ends the group where the move is not finished, as others wait for this rank, and the use of the
  // group in any case.
  void give_up();

  // After finish(): the verified copies, with the gradients of the step, where they train.
  [[nodiscard]] LayerStates& arrived() { return arrived_; }
  // The first layer whose copy is not among them, and why.
  struct Refusal {
    LayerId layer;
    std::string why;
  };
  [[nodiscard]] const std::optional<Refusal>& refusal() const { return refusal_; }
  [[nodiscard]] Bytes sent() const;
  [[nodiscard]] Bytes received() const;

 private:
  struct Outgoing;
  struct Incoming;
  // The thread leaves this when it has ended.
  struct Received {
    Expected<void> status = {};
    std::exception_ptr fault = {};
    // The first source has come to the end of its step.
    std::chrono::steady_clock::time_point since = std::chrono::steady_clock::time_point::max();
  };
  void work();
  [[nodiscard]] Expected<void> receive_all();
  void post_pieces(std::size_t end);
  void send_header(Outgoing& layer);
  void send_gradients(Outgoing& layer, const model::LayerState& state);
  void keep_arrived();

  transport::Transport& group_;
  const model::Model& model_;
  const Staging staging_;
  std::list<Outgoing> outgoing_;
  std::list<Incoming> incoming_;
  std::size_t a_call_ = 1;  // pieces of a call of send_some()
  std::size_t calls_ = 0;
  std::size_t posted_ = 0;             // of the pieces of all layers
  std::atomic<std::size_t> ready_{0};  // pieces that the thread has been through
  Received all_received_;              // by the thread; read once it has ended
  LayerStates arrived_;
  std::optional<Refusal> refusal_;
  std::jthread thread_;
};

}  // namespace dynmo::runtime
