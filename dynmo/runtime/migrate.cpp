// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/migrate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/digest.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/runtime/layer_pieces.h"
#include "dynmo/transport/tags.h"

namespace dynmo::runtime {
namespace {

using transport::Member;
using transport::Operation;
using transport::Tag;
using transport::Transport;

// Layers that a rank moves at a time: one is verified while the pieces of the next one arrive.
constexpr std::size_t kUnderWay = 2;

struct Trailer {
  Digest digest;  // of header and tensors, as the source holds them
};

std::span<std::byte> bytes_of(Trailer& trailer) {
  return std::as_writable_bytes(std::span(&trailer, 1));
}

// A layer in transit, at either end. Header, pieces and trailer travel on the layer's tag, in this
// order. Does not move in memory, because the transport has addresses of its members.
struct Transfer {
  LayerId layer;
  WorldRank from;
  bool receives = false;
  // The state that the pieces belong to. On the sender it is the layer's, or a copy in host memory.
  // On the receiver it is the new copy, for a device in host memory first.
  model::LayerState copy = {};
  std::vector<LayerPiece> pieces = {};
  std::array<std::byte, model::kHeaderBytes> header{};
  Trailer trailer = {};
  std::vector<std::unique_ptr<Operation>> operations = {};  // destroyed before what they fill
};

// Posts all messages. Both ends must know equal sizes before anything is sent, or Gloo ends the
// process. Computes the digest of each piece while it is in the cache, after posting it.
void start_sending(Transport& transport, WorldRank to, const model::LayerState& state,
                   const Staging& staging, Transfer& transfer) {
  const Tag tag = transport::migration_tag(transfer.layer);
  transfer.copy = state;
  strip(transfer.copy);
  transfer.copy = staging.to_host(transfer.copy);
  transfer.pieces = layer_pieces(transfer.copy);
  transfer.header = model::pack(model::header(transfer.copy));
  auto& operations = transfer.operations;
  operations.push_back(transport.send(Member(to.value), tag, transfer.header));
  Digester digester;
  digester.update(transfer.header);
  for (LayerPiece& piece : transfer.pieces) {
    piece.take_from_state();
    operations.push_back(transport.send(Member(to.value), tag, piece.message()));
    piece.digest(digester);
  }
  transfer.trailer.digest = digester.digest();
  operations.push_back(transport.send(Member(to.value), tag, bytes_of(transfer.trailer)));
}

// Posts all receives. New memory is made resident while the first pieces arrive.
void start_receiving(Transport& transport, const model::Layer& layer,
                     const model::StateShape& shape, Arrival arrival, Transfer& transfer) {
  const Tag tag = transport::migration_tag(transfer.layer);
  transfer.copy = model::allocate_tensors_like(layer, transfer.layer, shape);
  if (arrival == Arrival::kStays) strip(transfer.copy);
  transfer.pieces = layer_pieces(transfer.copy);
  auto& operations = transfer.operations;
  operations.push_back(transport.receive(Member(transfer.from.value), tag, transfer.header));
  for (const LayerPiece& piece : transfer.pieces) {
    operations.push_back(transport.receive(Member(transfer.from.value), tag, piece.message()));
  }
  operations.push_back(
      transport.receive(Member(transfer.from.value), tag, bytes_of(transfer.trailer)));
  model::complete_memory(transfer.copy);
}

// Waits until all has arrived. Returns the reason of a refusal, or "" if the copy is that of the
// source.
Expected<std::string> finish_receiving(const model::Layer& layer, Arrival arrival,
                                       Transfer& transfer) {
  // The digest is that of the final memory, taken piece by piece as they arrive.
  Digester digester;
  DYNMO_TRY(transfer.operations.front()->wait());
  digester.update(transfer.header);
  for (std::size_t i = 0; i < transfer.pieces.size(); ++i) {
    DYNMO_TRY(transfer.operations[i + 1]->wait());
    transfer.pieces[i].bring_to_state();
    transfer.pieces[i].digest(digester);
  }
  DYNMO_TRY(transfer.operations.back()->wait());

  std::string why = take_header(transfer.header, transfer.copy);
  const Digest sent = transfer.trailer.digest;
  if (digester.digest() != sent) {
    why = fmt::format("checksum {} where {} was sent", digester.digest().hex(), sent.hex());
  }
  if (why.empty()) {
    if (arrival == Arrival::kTrains) model::derive(layer, transfer.copy);
    return why;
  }
  return why;
}

Expected<void> finish_sending(Transfer& transfer) {
  for (const auto& operation : transfer.operations) DYNMO_TRY(operation->wait());
  return {};
}

// Returns the first refusal of all ranks, or "" if all agree to commit. The text has a fixed size,
// because both ends must know it.
Expected<std::string> vote(Transport& transport, Tag tag, const std::string& refusal) {
  std::array<char, 256> mine{};
  std::memcpy(mine.data(), refusal.data(), std::min(refusal.size(), mine.size() - 1));
  DYNMO_ASSIGN(const auto votes,
               transport::all_gather(transport, tag, std::as_bytes(std::span(mine))));
  for (const auto& given : votes) {
    const std::string text(reinterpret_cast<const char*>(given.data()));
    if (!text.empty()) return text;
  }
  return std::string();
}

// Runs all transfers of one rank, a few at a time.
class Mover {
 public:
  Mover(Transport& group, const model::Model& model, const LayerStates& from, LayerStates& arrived,
        Arrival arrival, const Staging& staging)
      : group_(group),
        model_(model),
        from_(from),
        arrived_(arrived),
        arrival_(arrival),
        staging_(staging) {}

  // Runs the moves. All ranks begin them and wait for them in one order. So both ends of the
  // earliest unfinished move have begun it, and no two ranks wait for each other.
  Expected<void> run(const std::vector<LayerTransfer>& moves) {
    for (const LayerTransfer& move : moves) {
      if (move.from == self() || move.to == self()) start(move);
      if (under_way_.size() == kUnderWay) DYNMO_TRY(finish_first());
    }
    while (!under_way_.empty()) DYNMO_TRY(finish_first());
    return {};
  }

  WorldRank self() const { return WorldRank(group_.rank().value); }
  const std::string& refusal() const { return refusal_; }
  Bytes sent() const { return sent_; }
  Bytes received() const { return received_; }

 private:
  void start(const LayerTransfer& move) {
    const bool sends = move.from == self();
    Transfer& transfer = under_way_.emplace_back(
        Transfer{.layer = move.layer, .from = move.from, .receives = !sends});
    if (sends) {
      start_sending(group_, move.to, from_.at(move.layer), staging_, transfer);
      sent_ += model::tensor_bytes(transfer.copy);
    } else {
      start_receiving(group_, *model_[move.layer.index()], move.shape, arrival_, transfer);
      received_ += model::tensor_bytes(transfer.copy);
    }
  }

  Expected<void> finish_first() {
    Transfer& transfer = under_way_.front();
    if (transfer.receives) {
      DYNMO_ASSIGN(std::string why,
                   finish_receiving(*model_[transfer.layer.index()], arrival_, transfer));
      if (why.empty()) {
        arrived_.insert_or_assign(transfer.layer, arrival_ == Arrival::kTrains
                                                      ? staging_.to_device(transfer.copy)
                                                      : std::move(transfer.copy));
      } else if (refusal_.empty()) {
        refusal_ = fmt::format("layer {} from rank {}: {}", transfer.layer,
                               group_.number_of(Member(transfer.from.value)), why);
      }
    } else {
      DYNMO_TRY(finish_sending(transfer));
    }
    under_way_.pop_front();
    return {};
  }

  Transport& group_;
  const model::Model& model_;
  const LayerStates& from_;
  LayerStates& arrived_;
  const Arrival arrival_;
  const Staging& staging_;
  std::list<Transfer> under_way_;
  std::string refusal_;
  Bytes sent_;
  Bytes received_;
};

}  // namespace

std::vector<LayerTransfer> transfers(const plan::Migration& migration, const transport::Axes& axes,
                                     const RankState& state) {
  std::vector<LayerTransfer> all;
  for (const plan::LayerMove& move : migration.moves) {
    for (int replica = 0; replica < axes.replicas; ++replica) {
      all.push_back({.layer = move.layer,
                     .from = axes.world_rank({replica, move.from}),
                     .to = axes.world_rank({replica, move.to}),
                     .shape = shape_of(state, move.layer)});
    }
  }
  return all;
}

Expected<MigrationReport> copy_layers(Transport& group, Tag vote_tag, const model::Model& model,
                                      const std::vector<LayerTransfer>& moves,
                                      const LayerStates& from, LayerStates& arrived,
                                      Arrival arrival, const Staging& staging) {
  const auto start = std::chrono::steady_clock::now();
  Mover mover(group, model, from, arrived, arrival, staging);
  DYNMO_TRY(mover.run(moves));
  MigrationReport report{.sent = mover.sent(), .received = mover.received()};
  DYNMO_ASSIGN(report.refusal, vote(group, vote_tag, mover.refusal()));
  report.committed = report.refusal.empty();
  report.seconds = seconds_since(start);
  return report;
}

Expected<MigrationReport> migrate(Transport& group, Tag vote_tag, const model::Model& model,
                                  const std::vector<LayerTransfer>& moves, RankState& state,
                                  const Staging& staging) {
  DYNMO_ASSIGN(const MigrationReport report,
               copy_layers(group, vote_tag, model, moves, state.layers, state.spares,
                           Arrival::kTrains, staging));
  for (const LayerTransfer& move : moves) {
    if (move.to != WorldRank(group.rank().value)) continue;
    auto arrived = state.spares.extract(move.layer);
    if (!report.committed) continue;
    const auto placed = state.layers.insert(std::move(arrived));
    DYNMO_CHECK(placed.inserted, "layer {} that is not already here", move.layer);
  }
  return report;
}

}  // namespace dynmo::runtime
