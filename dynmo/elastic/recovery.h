// SPDX-License-Identifier: Apache-2.0
#pragma once

// Decides where a run continues after a loss: at which step, and whether from memory. It is a pure
// function of the holdings that members report. Past plans do not matter. The new group decides
// from the same holdings which rank sends which layer (runtime/regroup.h).
//
// Values change only in the update that ends a step. An update needs a message of every rank, sent
// when its gradients are complete. So members differ by at most one step. A member that lacks the
// last update needs only the ranks' exchange to finish it, which the other members report.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/elastic/member.h"

namespace dynmo::elastic {

// The kinds of copies, in the order of preference.
enum class CopyKind : std::uint8_t {
  kLive,       // the values that training changes
  kShadow,     // of a layer that is moving: with its old or its new owner
  kOwn,        // this member's own copy of an earlier step
  kNeighbour,  // another member's copy of an earlier step
};

// One copy of one layer, as it was before `step` ran.
struct Holding {
  LayerId layer;
  std::int64_t step = 0;
  CopyKind kind = CopyKind::kLive;
  friend bool operator==(const Holding&, const Holding&) = default;
};

// The data that a member needs to finish an update that others have made.
struct UpdateRecord {
  std::int64_t step = 0;      // step that the update ended
  std::string exchange = {};  // the ranks' exchange in it, as the runtime writes it
  friend bool operator==(const UpdateRecord&, const UpdateRecord&) = default;
};

// The report of one member, made while its main thread changes nothing.
struct Report {
  Member member = {};
  std::int64_t step = 0;                        // next step to run
  bool gradients_complete = false;              // of `step`, so an UpdateRecord of it suffices
  std::optional<UpdateRecord> updated = {};     // its last update, of step - 1
  std::vector<Holding> holdings = {};           // empty for an idle or a new member
  std::optional<std::int64_t> checkpoint = {};  // step of the newest verified one
  friend bool operator==(const Report&, const Report&) = default;
};

enum class Origin : std::uint8_t { kMemory, kCheckpoint, kInitial };

struct Decision {
  Origin origin = Origin::kMemory;
  std::int64_t step = 0;  // next step to run
  // An update that members finish first, if their live layers are one step behind. No value: none
  // is behind.
  std::optional<UpdateRecord> finish = {};
  friend bool operator==(const Decision&, const Decision&) = default;
};

struct Model {
  int layers = 0;
  // Initial values are a function of the seed, so step 0 can begin again.
  bool initial_values = true;
  friend bool operator==(const Model&, const Model&) = default;
};

// Returns the newest step at which all layers exist, from memory, a checkpoint or initial values.
// At equal steps memory is preferred. Returns kNoCheckpoint if there is none.
[[nodiscard]] Expected<Decision> recover(const Model& model, std::span<const Report> reports);

}  // namespace dynmo::elastic
