// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sends and receives for one rank of a schedule: activations and gradients between stages. They are
// whole, or in the format of row_messages.h if rows have left.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/runtime/engine.h"
#include "dynmo/runtime/row_messages.h"
#include "dynmo/runtime/side_copies.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

// The messages of one step. One thread uses it. `input` and `output` must outlive it. Times of
// messages, and of waiting for them, are added to `output`.
class StageMessages {
 public:
  using Key = std::pair<StageId, MicroBatchId>;
  StageMessages(transport::Transport& transport, int lane, const StepInput& input,
                StepOutput& output, std::chrono::steady_clock::time_point start);

  // Posts a send or a receive of the schedule. A gradient has no rows.
  //
  // On a device, a send is posted once its copy to host memory is complete. The next call that
  // could wait for another rank waits for the copy first. So the compute actions until then are
  // queued meanwhile. Sends are posted in the order of the calls.
  void send(const schedule::Action& action, model::Hidden value);
  void receive(const schedule::Action& action);
  // Stores the shape of the value that a trained stage has passed on. Its gradient has the same.
  void forwarded(Key key, const model::Hidden& value);
  // Waits for the message that a compute action needs. Returns nullopt if it needs none. Fails with
  // kPeerLost.
  [[nodiscard]] Expected<std::optional<model::Hidden>> wait_for(const schedule::Action& action);
  // Posts the send whose copy is in progress. Call it before this rank waits for another one.
  void post_leaving();
  // Waits for all sends. Fails with kPeerLost.
  [[nodiscard]] Expected<void> finish();
  [[nodiscard]] bool all_used() const { return activations_.empty() && gradients_.empty(); }
  // Returns the number of rows for which the first message behind a stage has room, or 0 if no row
  // can have left there.
  [[nodiscard]] std::int64_t room_behind(StageId id) const;

 private:
  // A tensor, as the transport sees it, with the operation that sends or fills it. A tensor without
  // bytes has no operation.
  struct Message {
    at::Tensor tensor;
    std::unique_ptr<transport::Operation> operation;
    std::size_t record;  // its place in StepOutput::messages
    // For an activation whose rows may have left. Set if its first message has arrived, and the
    // receive of its second one, if any, is posted.
    bool opened = false;
    at::Tensor second = {};
    std::unique_ptr<transport::Operation> second_operation = {};
  };
  // A send whose copy to host memory may be in progress.
  struct Leaving {
    schedule::Action action;
    model::Hidden value;
    std::size_t record;
    CopyEnd copied;
  };
  // The receive of a gradient whose size is not known yet.
  struct LateReceive {
    schedule::Action action;
    transport::Member from;
    transport::Tag tag;
  };

  [[nodiscard]] const plan::PlanStage& stage(int id) const;
  [[nodiscard]] transport::Member rank_of(int stage) const;
  [[nodiscard]] transport::Tag tag_of(const schedule::Action& action) const;
  [[nodiscard]] transport::Tag second_tag_of(const schedule::Action& action) const;
  // Returns the shape of the values behind a stage if no row has left.
  [[nodiscard]] const std::vector<std::int64_t>& shape_behind(StageId id) const;
  [[nodiscard]] RowFormat format_behind(StageId id) const {
    return {shape_behind(id), input_.boundary_type};
  }
  [[nodiscard]] bool by_device() const { return input_.device_messages != nullptr; }
  [[nodiscard]] std::span<std::byte> message_bytes(const at::Tensor& tensor) const;
  [[nodiscard]] Nanoseconds host_time() const;
  [[nodiscard]] std::size_t record(const schedule::Action& action);
  [[nodiscard]] Expected<void> wait(Message& message);
  [[nodiscard]] Expected<void> wait(transport::Operation& operation, std::size_t record);

  void post(const schedule::Action& action, model::Hidden value, std::size_t place);
  void post_send(std::size_t place, transport::Member to, transport::Tag tag, at::Tensor tensor);
  [[nodiscard]] Message post_receive(const schedule::Action& action, transport::Member from,
                                     transport::Tag tag, const std::vector<std::int64_t>& shape);
  void receive_rows(const schedule::Action& action);
  void post_late();
  [[nodiscard]] Expected<void> open(const schedule::Action& receive, Key key);
  [[nodiscard]] Expected<model::Hidden> wait_for_rows(Key key, Message& message);

  transport::Transport& transport_;
  int lane_;
  const StepInput& input_;
  StepOutput& output_;
  std::chrono::steady_clock::time_point start_;

  std::map<Key, Message> activations_;  // receives posted, not yet used
  std::map<Key, Message> gradients_;
  std::map<transport::Tag, std::deque<Key>> unopened_;  // keys of activations_, as posted
  std::map<Key, std::vector<std::int64_t>> forwarded_;  // shapes
  std::vector<LateReceive> late_;
  std::optional<Leaving> leaving_;
  std::vector<Message> sent_;  // waited for at the end of the step
};

}  // namespace dynmo::runtime
