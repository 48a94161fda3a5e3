// SPDX-License-Identifier: Apache-2.0
#pragma once

// Moves layers to other ranks while a step runs. A step changes no parameter and no moment before
// its update. So these travel between the actions of the schedule. The gradients follow at the end
// of the step, and both ends make the same update. Training waits only for the gradients.
//
// The source keeps its layer, and the receiver verifies its copies, as in a migration (migrate.h).
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

// One rank's part of a move. The caller's thread posts all messages. The object's own thread waits
// for messages and computes the digests, but posts nothing.
class BackgroundMove {
 public:
  // Begins a move and posts all receives of this rank. All ranks of the group call it at a step
  // boundary with equal `moves`. Each passes the layers that it sends in `from`. `actions` is the
  // number of send_some() calls until the end of the step.
  //
  // The group and the model must outlive the object. The tensors of the layers must exist until
  // finish(), and only gradients may change in them.
  BackgroundMove(transport::Transport& group, const model::Model& model,
                 const std::vector<LayerTransfer>& moves, const LayerStates& from,
                 std::size_t actions, const Staging& staging = {});
  ~BackgroundMove();
  BackgroundMove(const BackgroundMove&) = delete;
  BackgroundMove& operator=(const BackgroundMove&) = delete;

  // Sends the next few pieces. Their number is small, so that the step's own messages do not wait
  // long behind them. Does not block.
  void send_some();
  // Sends the rest and waits for all copies. `from` has the layers that this rank sends, with the
  // complete gradients of the step. Called once.
  //
  // Returns the seconds that this took. They do not include waiting for another rank to reach the
  // end of its step. Returns kPeerLost if a rank is lost, which ends the group.
  [[nodiscard]] Expected<double> finish(const LayerStates& from);
  // Stops using the group. If the move is not finished, also ends the group, because other ranks
  // wait for this one.
  void give_up();

  // Returns the verified copies after finish(). They have the gradients of the step if they train.
  [[nodiscard]] LayerStates& arrived() { return arrived_; }
  // The first layer whose copy was refused, and the reason.
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
  // The thread's result, when it has ended.
  struct Received {
    Expected<void> status = {};
    std::exception_ptr fault = {};
    // Time at which the first source ended its step.
    std::chrono::steady_clock::time_point since = std::chrono::steady_clock::time_point::max();
  };
  // The pieces that are due so far.
  struct Pace {
    std::size_t pieces = 1;  // of a call of send_some()
    std::size_t calls = 0;

    [[nodiscard]] std::size_t next_call() { return pieces * ++calls; }
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
  Pace pace_;
  std::size_t posted_ = 0;             // pieces of all layers
  std::atomic<std::size_t> ready_{0};  // pieces that the thread has processed
  // Written by the thread, and read after it has ended.
  Received all_received_;
  LayerStates arrived_;
  std::optional<Refusal> refusal_;
  std::jthread thread_;
};

}  // namespace dynmo::runtime
