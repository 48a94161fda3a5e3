// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/background_move.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <memory>
#include <span>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/digest.h"
#include "dynmo/core/progress.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/runtime/layer_pieces.h"
#include "dynmo/transport/tags.h"

namespace dynmo::runtime {
namespace {

using Clock = std::chrono::steady_clock;
using transport::Member;
using transport::Operation;
using transport::Tag;
using transport::Transport;

std::span<std::byte> bytes_of(Digest& digest) {
  return std::as_writable_bytes(std::span(&digest, 1));
}

}  // namespace

// A layer at its source. Header, pieces, gradients and their digest travel on the layer's tag, in
// this order. Does not move in memory, because the transport has addresses of its members.
struct BackgroundMove::Outgoing {
  LayerId layer;
  Member to;
  model::LayerState copy = {};  // the state, or its copy in host memory
  std::vector<LayerPiece> pieces = {};
  std::array<std::byte, model::kHeaderBytes> header{};
  model::LayerState gradients = {};
  std::vector<LayerPiece> gradient_pieces = {};
  Digester digester = {};
  Digest digest = {};
  std::vector<std::unique_ptr<Operation>> operations = {};  // destroyed before what they send
};

// A layer at its destination, in its final memory. For a device it is in a host buffer first.
struct BackgroundMove::Incoming {
  LayerId layer;
  Member from;
  model::LayerState copy = {};
  std::vector<LayerPiece> pieces = {};  // of the state, then of the gradients
  std::size_t of_state = 0;             // number of those of the state
  std::array<std::byte, model::kHeaderBytes> header{};
  Digest digest = {};  // sent by the source
  std::string refusal = {};
  std::vector<std::unique_ptr<Operation>> operations = {};
};

BackgroundMove::BackgroundMove(Transport& group, const model::Model& model,
                               const std::vector<LayerTransfer>& moves, const LayerStates& from,
                               std::size_t actions, const Staging& staging)
    : group_(group), model_(model), staging_(staging) {
  std::size_t pieces = 0;
  const WorldRank self(group.rank().value);
  for (const LayerTransfer& move : moves) {
    const Tag tag = transport::migration_tag(move.layer);
    if (move.from == self) {
      Outgoing& layer = outgoing_.emplace_back(move.layer, Member(move.to.value));
      layer.copy = from.at(move.layer);
      strip(layer.copy);
      layer.copy = staging.to_host(layer.copy);
      layer.pieces = layer_pieces(layer.copy);
      layer.header = model::pack(model::header(layer.copy));
      pieces += layer.pieces.size();
    } else if (move.to == self) {
      Incoming& layer = incoming_.emplace_back(move.layer, Member(move.from.value));
      layer.copy = model::allocate_tensors_like(*model[move.layer.index()], move.layer, move.shape);
      layer.pieces = layer_pieces(layer.copy);
      layer.of_state = layer.pieces.size();
      std::ranges::move(layer_gradient_pieces(layer.copy), std::back_inserter(layer.pieces));
      layer.operations.push_back(group.receive(layer.from, tag, layer.header));
      for (const LayerPiece& piece : layer.pieces) {
        layer.operations.push_back(group.receive(layer.from, tag, piece.message()));
      }
      layer.operations.push_back(group.receive(layer.from, tag, bytes_of(layer.digest)));
    }
  }
  pace_.pieces =
      (pieces + std::max<std::size_t>(actions, 1) - 1) / std::max<std::size_t>(actions, 1);
  if (!outgoing_.empty() || !incoming_.empty()) thread_ = std::jthread([this] { work(); });
}

BackgroundMove::~BackgroundMove() { give_up(); }

void BackgroundMove::give_up() {
  if (!thread_.joinable()) return;
  group_.abort(make_error(ErrorCode::kInternal, "rank {} dropped an operation of a move under way",
                          group_.number_of(group_.rank())));
  thread_.join();
}

// Runs on the object's thread. Prepares and digests the pieces of outgoing layers, then receives.
void BackgroundMove::work() {
  try {
    for (Outgoing& layer : outgoing_) {
      layer.digester.update(layer.header);
      for (LayerPiece& piece : layer.pieces) {
        piece.take_from_state();
        piece.digest(layer.digester);
        ++ready_;
        ready_.notify_one();
      }
    }
    all_received_.status = receive_all();
  } catch (...) {
    all_received_.fault = std::current_exception();
    ready_ = std::numeric_limits<std::size_t>::max();
    ready_.notify_one();
  }
}

Expected<void> BackgroundMove::receive_all() {
  for (const Incoming& layer : incoming_) model::complete_memory(layer.copy);
  for (Incoming& layer : incoming_) {
    Digester digester;
    DYNMO_TRY(layer.operations.front()->wait());
    digester.update(layer.header);
    for (std::size_t i = 0; i < layer.pieces.size(); ++i) {
      DYNMO_TRY(layer.operations[i + 1]->wait());
      if (i == layer.of_state) all_received_.since = std::min(all_received_.since, Clock::now());
      layer.pieces[i].bring_to_state();
      layer.pieces[i].digest(digester);
    }
    DYNMO_TRY(layer.operations.back()->wait());
    all_received_.since = std::min(all_received_.since, Clock::now());
    layer.refusal = take_header(layer.header, layer.copy);
    if (const Digest digest = digester.digest(); digest != layer.digest) {
      layer.refusal =
          fmt::format("checksum {} where {} was sent", digest.hex(), layer.digest.hex());
    }
  }
  return {};
}

void BackgroundMove::send_some() { post_pieces(pace_.next_call()); }

// Posts the pieces that the thread has prepared, up to number `end` over all layers in their order.
void BackgroundMove::post_pieces(std::size_t end) {
  end = std::min(end, ready_.load());
  std::size_t first = 0;  // number of the layer's first piece
  for (Outgoing& layer : outgoing_) {
    if (posted_ >= end) return;
    const Tag tag = transport::migration_tag(layer.layer);
    const std::size_t behind = first + layer.pieces.size();
    for (; posted_ < std::min(end, behind); ++posted_) {
      if (posted_ == first) send_header(layer);
      layer.operations.push_back(
          group_.send(layer.to, tag, layer.pieces[posted_ - first].message()));
    }
    first = behind;
  }
}

void BackgroundMove::send_header(Outgoing& layer) {
  layer.operations.push_back(
      group_.send(layer.to, transport::migration_tag(layer.layer), layer.header));
}

void BackgroundMove::send_gradients(Outgoing& layer, const model::LayerState& state) {
  const Tag tag = transport::migration_tag(layer.layer);
  if (layer.pieces.empty()) send_header(layer);
  for (const model::Parameter& parameter : state.parameters) {
    layer.gradients.parameters.emplace_back().gradient = staging_.to_host_later(parameter.gradient);
  }
  staging_.wait();
  layer.gradient_pieces = layer_gradient_pieces(layer.gradients);
  for (LayerPiece& piece : layer.gradient_pieces) {
    piece.take_from_state();
    layer.operations.push_back(group_.send(layer.to, tag, piece.message()));
    piece.digest(layer.digester);
  }
  layer.digest = layer.digester.digest();
  layer.operations.push_back(group_.send(layer.to, tag, bytes_of(layer.digest)));
}

Expected<double> BackgroundMove::finish(const LayerStates& from) {
  const auto start = Clock::now();
  std::size_t pieces = 0;
  for (const Outgoing& layer : outgoing_) pieces += layer.pieces.size();
  while (posted_ < pieces) {
    ready_.wait(posted_);
    if (ready_.load() > pieces) break;  // the thread has failed
    post_pieces(pieces);
  }
  if (posted_ == pieces) {
    for (Outgoing& layer : outgoing_) send_gradients(layer, from.at(layer.layer));
  }
  for (const Outgoing& layer : outgoing_) {
    for (const auto& operation : layer.operations) DYNMO_TRY(operation->wait());
  }
  double seconds = outgoing_.empty() ? 0 : seconds_since(start);
  if (!thread_.joinable()) return seconds;
  const auto waits = Clock::now();
  {
    const WaitMark mark;  // the thread waits for messages
    thread_.join();
  }
  if (all_received_.fault) std::rethrow_exception(all_received_.fault);
  DYNMO_TRY(all_received_.status);
  keep_arrived();
  if (!incoming_.empty()) seconds += seconds_since(std::max(waits, all_received_.since));
  return seconds;
}

void BackgroundMove::keep_arrived() {
  for (Incoming& layer : incoming_) {
    if (layer.refusal.empty()) {
      model::derive(*model_[layer.layer.index()], layer.copy);
      arrived_.insert_or_assign(layer.layer, staging_.to_device(layer.copy));
    } else if (!refusal_) {
      refusal_ = {layer.layer, fmt::format("layer {} from rank {}: {}", layer.layer,
                                           group_.number_of(layer.from), layer.refusal)};
    }
  }
}

Bytes BackgroundMove::sent() const {
  Bytes sum;
  for (const Outgoing& layer : outgoing_) sum += model::tensor_bytes(layer.copy);
  return sum;
}

Bytes BackgroundMove::received() const {
  Bytes sum;
  for (const Incoming& layer : incoming_) sum += model::tensor_bytes(layer.copy);
  return sum;
}

}  // namespace dynmo::runtime
