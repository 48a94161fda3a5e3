// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/stage_messages.h"

#include <ATen/ATen.h>

#include <set>

#include "dynmo/core/check.h"
#include "dynmo/runtime/pieces.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/transport/tags.h"

namespace dynmo::runtime {
namespace {

using schedule::Action;
using schedule::ActionKind;
using Clock = std::chrono::steady_clock;

}  // namespace

StageMessages::StageMessages(transport::Transport& transport, int lane, const StepInput& input,
                             StepOutput& output, Clock::time_point start)
    : transport_(input.device_messages != nullptr ? *input.device_messages : transport),
      lane_(lane),
      input_(input),
      output_(output),
      start_(start) {}

const plan::PlanStage& StageMessages::stage(int id) const {
  return input_.plan.stages[static_cast<std::size_t>(id)];
}

transport::Member StageMessages::rank_of(int id) const {
  return transport::Member(stage(id).rank.value);
}

transport::Tag StageMessages::tag_of(const Action& action) const {
  return transport::schedule_tag(lane_, schedule::channel(action));
}

transport::Tag StageMessages::second_tag_of(const Action& action) const {
  return transport::second_message_tag(lane_, schedule::channel(action));
}

std::int64_t StageMessages::room_behind(StageId id) const {
  if (input_.room.empty()) return 0;
  return input_.room[static_cast<std::size_t>(stage(id.value).layers.end()) - 1];
}

const std::vector<std::int64_t>& StageMessages::shape_behind(StageId id) const {
  if (input_.output_shapes.empty()) return input_.boundary_shape;
  const auto last = static_cast<std::size_t>(stage(id.value).layers.end()) - 1;
  const std::vector<std::int64_t>& own = input_.output_shapes[last];
  return own.empty() ? input_.boundary_shape : own;
}

// Returns the bytes of a message as the transport sees it: in the device's memory or in the host's.
std::span<std::byte> StageMessages::message_bytes(const at::Tensor& tensor) const {
  if (!by_device()) return bytes_of(tensor);
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

Nanoseconds StageMessages::host_time() const { return Clock::now() - start_; }

std::size_t StageMessages::record(const Action& action) {
  const Nanoseconds now = host_time();
  output_.messages.push_back({action, now, now});
  return output_.messages.size() - 1;
}

Expected<void> StageMessages::wait(Message& message) {
  if (message.operation == nullptr) return {};
  return wait(*message.operation, message.record);
}

Expected<void> StageMessages::wait(transport::Operation& operation, std::size_t record) {
  const Clock::time_point begin = Clock::now();
  DYNMO_TRY(operation.wait());
  const Clock::time_point end = Clock::now();
  output_.messages[record].end = end - start_;
  output_.waiting_s += std::chrono::duration<double>(end - begin).count();
  return {};
}

void StageMessages::post_send(std::size_t place, transport::Member to, transport::Tag tag,
                              at::Tensor tensor) {
  auto operation = transport_.send(to, tag, message_bytes(tensor));
  sent_.push_back({std::move(tensor), std::move(operation), place});
}

void StageMessages::send(const Action& action, model::Hidden value) {
  post_leaving();
  const std::size_t place = record(action);
  const Staging& staging = input_.staging;
  if (by_device()) return post(action, std::move(value), place);
  if (staging.beside) {
    const CopyEnd copied = staging.beside->copy_message({&value.rows, &value.x});
    leaving_.emplace(Leaving{action, std::move(value), place, copied});
    return;
  }
  value.rows = staging.to_host_later(value.rows);  // complete with the next copy
  value.x = staging.to_host(value.x);
  post(action, std::move(value), place);
}

void StageMessages::post_leaving() {
  if (!leaving_) return;
  Leaving leaving = *std::exchange(leaving_, std::nullopt);
  leaving.copied.wait();
  post(leaving.action, std::move(leaving.value), leaving.record);
}

void StageMessages::post(const Action& action, model::Hidden value, std::size_t place) {
  const bool forward = action.kind == ActionKind::kSendActivation;
  const transport::Member to = rank_of(action.stage.value + (forward ? 1 : -1));
  const transport::Tag tag = tag_of(action);
  const std::int64_t room = forward ? room_behind(action.stage) : 0;
  if (room == 0) {
    // No gradient is sent for zero rows, as the receiver knows.
    if (value.x.numel() > 0) post_send(place, to, tag, std::move(value.x));
    return;
  }
  const RowFormat format = format_behind(action.stage);
  post_send(place, to, tag, first_message(format, room, value));
  at::Tensor second = second_message(format, room, value);
  if (second.defined()) post_send(place, to, second_tag_of(action), std::move(second));
}

StageMessages::Message StageMessages::post_receive(const Action& action, transport::Member from,
                                                   transport::Tag tag,
                                                   const std::vector<std::int64_t>& shape) {
  at::Tensor tensor =
      by_device() ? at::empty(shape, at::device(input_.staging.device).dtype(input_.boundary_type))
                  : input_.staging.host_buffer(shape, input_.boundary_type);
  const std::size_t place = record(action);
  std::unique_ptr<transport::Operation> operation;
  if (tensor.numel() > 0) operation = transport_.receive(from, tag, message_bytes(tensor));
  return {std::move(tensor), std::move(operation), place};
}

void StageMessages::receive(const Action& action) {
  const bool forward = action.kind == ActionKind::kReceiveActivation;
  const int neighbour = action.stage.value + (forward ? -1 : 1);
  const StageId boundary(forward ? neighbour : action.stage.value);
  const transport::Tag tag = tag_of(action);
  if (room_behind(boundary) == 0) {
    (forward ? activations_ : gradients_)[{action.stage, action.micro_batch}] =
        post_receive(action, rank_of(neighbour), tag, shape_behind(boundary));
  } else if (forward) {
    receive_rows(action);
  } else {
    late_.push_back({action, rank_of(neighbour), tag});
    post_late();
  }
}

void StageMessages::forwarded(Key key, const model::Hidden& value) {
  if (room_behind(key.first) == 0) return;
  forwarded_[key] = value.x.sizes().vec();
  post_late();
}

// Posts the receives of gradients whose size is now known, in the order of the channel. A gradient
// has the size of the stage's output. The receive is early enough, because the gradient's sender
// first needs that output.
void StageMessages::post_late() {
  std::set<transport::Tag> blocked;
  std::erase_if(late_, [&](const LateReceive& late) {
    const Key key{late.action.stage, late.action.micro_batch};
    const auto shape = forwarded_.find(key);
    if (shape == forwarded_.end()) blocked.insert(late.tag);
    if (blocked.contains(late.tag)) return false;
    gradients_[key] = post_receive(late.action, late.from, late.tag, shape->second);
    return true;
  });
}

void StageMessages::receive_rows(const Action& action) {
  const int before = action.stage.value - 1;
  const std::int64_t room = room_behind(StageId(before));
  at::Tensor tensor =
      at::empty({first_bytes(format_behind(StageId(before)), room).value}, at::kByte);
  const transport::Tag tag = tag_of(action);
  const std::size_t place = record(action);
  auto operation = transport_.receive(rank_of(before), tag, bytes_of(tensor));
  const Key key{action.stage, action.micro_batch};
  activations_[key] = {std::move(tensor), std::move(operation), place};
  unopened_[tag].push_back(key);
}

// Opens a channel's messages in order, so that second receives are posted in the order of second
// sends. Waits only for messages that arrive before this one anyway.
Expected<void> StageMessages::open(const Action& receive, Key key) {
  const StageId before(key.first.value - 1);
  const RowFormat format = format_behind(before);
  const transport::Tag tag = tag_of(receive);
  std::deque<Key>& waiting = unopened_.at(tag);
  while (!activations_.at(key).opened) {
    Message& message = activations_.at(waiting.front());
    waiting.pop_front();
    DYNMO_TRY(wait(message));
    message.opened = true;
    const std::int64_t count = count_in(message.tensor);
    DYNMO_CHECK(count >= 0 && count <= format.tokens(), "at most {} rows, got {}", format.tokens(),
                count);
    const Bytes rest = second_bytes(format, room_behind(before), count);
    if (rest == Bytes{0}) continue;
    message.second = at::empty({rest.value}, at::kByte);
    message.second_operation =
        transport_.receive(rank_of(before.value), second_tag_of(receive), bytes_of(message.second));
  }
  return {};
}

Expected<model::Hidden> StageMessages::wait_for_rows(Key key, Message& message) {
  DYNMO_TRY(
      open({.kind = ActionKind::kReceiveActivation, .stage = key.first, .micro_batch = key.second},
           key));
  if (message.second_operation) DYNMO_TRY(wait(*message.second_operation, message.record));
  const StageId before(key.first.value - 1);
  const std::int64_t room = room_behind(before);
  model::Hidden hidden = unpacked(format_behind(before), room, message.tensor, message.second);
  // The device reads pinned memory by itself, so the host does not wait.
  for (at::Tensor* tensor : {&hidden.x, &hidden.rows}) {
    if (input_.staging.device.is_cpu() || !tensor->defined()) continue;
    *tensor = input_.staging.host_buffer(tensor->sizes(), tensor->scalar_type()).copy_(*tensor);
  }
  hidden.rows = input_.staging.to_device(hidden.rows);
  hidden.x = input_.staging.to_device(hidden.x);
  return hidden;
}

Expected<std::optional<model::Hidden>> StageMessages::wait_for(const Action& action) {
  if (action.kind == ActionKind::kWeightGradient) return std::optional<model::Hidden>();
  const bool forward = action.kind == ActionKind::kForward;
  auto& received = forward ? activations_ : gradients_;
  const auto found = received.find({action.stage, action.micro_batch});
  if (found == received.end()) return std::optional<model::Hidden>();
  post_leaving();
  model::Hidden value;
  if (forward && room_behind(StageId(action.stage.value - 1)) > 0) {
    DYNMO_ASSIGN(value, wait_for_rows(found->first, found->second));
  } else {
    DYNMO_TRY(wait(found->second));
    value.x = std::move(found->second.tensor);
    if (!by_device()) value.x = input_.staging.to_device(value.x);
  }
  received.erase(found);
  return std::optional<model::Hidden>(std::move(value));
}

Expected<void> StageMessages::finish() {
  post_leaving();
  for (Message& message : sent_) DYNMO_TRY(wait(message));
  return {};
}

}  // namespace dynmo::runtime
