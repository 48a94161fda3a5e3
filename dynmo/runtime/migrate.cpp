// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/migrate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/digest.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/transport/tags.h"

namespace dynmo::runtime {
namespace {

using transport::Operation;
using transport::Tag;
using transport::Transport;

struct Trailer {
  Digest digest;  // of header and tensors, as the source holds them
};

std::span<std::byte> bytes_of(Trailer& trailer) {
  return std::as_writable_bytes(std::span(&trailer, 1));
}

// The pieces of a layer's tensors in the order both ends know. Their sizes follow from the model
// and the frozen prefix, so both ends post equal sizes before anything is sent (Gloo ends the
// process otherwise).
std::vector<std::span<std::byte>> layer_pieces(model::LayerState& state) {
  std::vector<std::span<std::byte>> pieces;
  for (const model::NamedTensor& tensor : model::tensors(state)) {
    const auto some = pieces_of(tensor.bytes);
    pieces.insert(pieces.end(), some.begin(), some.end());
  }
  return pieces;
}

// Sends one layer. The digest is computed while its pieces are on the wire.
// Header, pieces and trailer travel on the layer's tag, in this order.
Expected<Bytes> send_layer(Transport& transport, Rank to, model::LayerState& state) {
  const Tag tag = transport::migration_tag(state.id);
  const auto pieces = layer_pieces(state);
  const auto header = model::pack(model::header(state));
  std::vector<std::unique_ptr<Operation>> operations;
  operations.push_back(transport.send(to, tag, header));
  for (const auto piece : pieces) operations.push_back(transport.send(to, tag, piece));
  Digester digester;
  digester.update(header);
  for (const auto piece : pieces) digester.update(piece);
  Trailer trailer{digester.digest()};
  operations.push_back(transport.send(to, tag, bytes_of(trailer)));
  for (const auto& operation : operations) DYNMO_TRY(operation->wait());
  return model::tensor_bytes(state);
}

struct ReceivedLayer {
  model::LayerState state;
  std::string refusal = {};  // "" if what arrived is what was sent
};

// Takes over the numbers of a header that describes this very layer.
std::string take_header(std::span<const std::byte> bytes, model::LayerState& state) {
  const auto header = model::unpack(bytes);
  if (!header) return header.error().message;
  const model::StateHeader expected = model::header(state);
  if (header->id != expected.id || header->frozen != expected.frozen ||
      header->layout != expected.layout) {
    return "its header is that of another layer";
  }
  state.optimizer_steps = header->optimizer_steps;
  state.random_key = header->random_key;
  return "";
}

Expected<ReceivedLayer> receive_layer(Transport& transport, Rank from, const model::Layer& layer,
                                      LayerId id, model::Frozen frozen) {
  const Tag tag = transport::migration_tag(id);
  ReceivedLayer received{.state = model::allocate_like(layer, id, frozen)};
  const auto pieces = layer_pieces(received.state);
  std::array<std::byte, model::kHeaderBytes> header{};
  Trailer trailer;
  std::vector<std::unique_ptr<Operation>> operations;
  operations.push_back(transport.receive(from, tag, header));
  for (const auto piece : pieces) operations.push_back(transport.receive(from, tag, piece));
  operations.push_back(transport.receive(from, tag, bytes_of(trailer)));

  // The digest is that of the final memory, taken piece by piece as they arrive.
  Digester digester;
  DYNMO_TRY(operations.front()->wait());
  digester.update(header);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    DYNMO_TRY(operations[i + 1]->wait());
    digester.update(pieces[i]);
  }
  DYNMO_TRY(operations.back()->wait());

  model::round_values(layer, received.state);
  std::string why = take_header(header, received.state);
  if (digester.digest() != trailer.digest) {
    why =
        fmt::format("checksum {} where {} was sent", digester.digest().hex(), trailer.digest.hex());
  }
  if (!why.empty()) received.refusal = fmt::format("layer {} from rank {}: {}", id, from, why);
  return received;
}

// Every rank's verdict; "" if all agree to commit. The text has a fixed size because both ends must
// know it.
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

}  // namespace

Expected<MigrationReport> migrate(Transport& pipeline, Transport& voters, Tag vote_tag,
                                  const model::Model& model, const plan::Migration& migration,
                                  LayerStates& states, int frozen_layers) {
  const auto start = std::chrono::steady_clock::now();
  MigrationReport report;
  LayerStates shadows;
  std::string refusal;
  // All ranks go through the moves in one order, so no two wait for each other.
  for (const plan::LayerMove& move : migration.moves) {
    if (move.from == pipeline.rank()) {
      DYNMO_ASSIGN(const Bytes sent, send_layer(pipeline, move.to, states.at(move.layer)));
      report.sent += sent;
    } else if (move.to == pipeline.rank()) {
      DYNMO_ASSIGN(ReceivedLayer received,
                   receive_layer(pipeline, move.from, *model[move.layer.index()], move.layer,
                                 move.layer.value < frozen_layers ? model::Frozen::kYes
                                                                  : model::Frozen::kNo));
      report.received += model::tensor_bytes(received.state);
      if (refusal.empty()) refusal = received.refusal;
      shadows.emplace(move.layer, std::move(received.state));
    }
  }
  DYNMO_ASSIGN(report.refusal, vote(voters, vote_tag, refusal));
  report.committed = report.refusal.empty();
  if (report.committed) {
    for (const plan::LayerMove& move : migration.moves) {
      if (move.from == pipeline.rank()) states.erase(move.layer);
    }
    states.merge(shadows);
    DYNMO_CHECK(shadows.empty(), "no layer that is already here");
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace dynmo::runtime
