// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where a run goes on after a loss: at which step, and whether from memory. A pure function of what
// the members report to hold; plans of the past count for nothing. Who sends which layer to whom is
// decided in the new group, from the same holdings (runtime/regroup.h).
//
// Values change only in the update at the end of a step, and an update needs a message of every
// rank whose gradients are complete. So members differ by at most one step. A member that lacks the
// last update has all it takes to finish it but what the ranks exchanged, which the others report.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/elastic/member.h"

namespace dynmo::elastic {

// In the order of preference.
enum class CopyKind : std::uint8_t {
  kLive,       // what training changes
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

// All that a member needs to finish an update that others have made.
struct UpdateRecord {
  std::int64_t step = 0;      // the step that the update ended
  std::string exchange = {};  // what all ranks exchanged in it, as the runtime writes it
  friend bool operator==(const UpdateRecord&, const UpdateRecord&) = default;
};

// The report of one member when its main thread is quiet.
struct Report {
  Member member = {};
  std::int64_t step = 0;                        // the next to run
  bool gradients_complete = false;              // of `step`: an UpdateRecord of it suffices
  std::optional<UpdateRecord> updated = {};     // its last update, of step - 1
  std::vector<Holding> holdings = {};           // none: an idle or a new member
  std::optional<std::int64_t> checkpoint = {};  // the step of the newest that it has verified
  friend bool operator==(const Report&, const Report&) = default;
};

enum class Origin : std::uint8_t { kMemory, kCheckpoint, kInitial };

struct Decision {
  Origin origin = Origin::kMemory;
  std::int64_t step = 0;  // the next to run
  // Members whose live layers are one step behind finish this update first. Absent: nobody has to.
  std::optional<UpdateRecord> finish = {};
  friend bool operator==(const Decision&, const Decision&) = default;
};

struct Model {
  int layers = 0;
  bool initial_values = true;  // they are a function of the seed, so that step 0 can be begun again
  friend bool operator==(const Model&, const Model&) = default;
};

// The newest step that all layers can be had at: from memory, else from a checkpoint, else from
// initial values. At equal steps memory wins. kNoCheckpoint where there is none of them.
[[nodiscard]] Expected<Decision> recover(const Model& model, std::span<const Report> reports);

}  // namespace dynmo::elastic
