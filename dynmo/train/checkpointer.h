// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes a run's checkpoints while training goes on. At a checkpoint's step every rank (of the
// first replica) copies the layers it owns (checkpoint/background_writer.h); threads write the
// copies; when, at a later step boundary, all ranks say that their files are on the disk, rank 0's
// thread commits them. Nobody waits for a disk unless the next checkpoint is due before the last
// one is done, or the run ends; who waits notices the loss of a rank. A loss drops the checkpoint
// under way: a file that a hung disk is at then holds up the next checkpoint, not the recovery.
//
// A checkpoint that cannot be written stops nothing: a line says why and which one is still good,
// and the next one is tried as if nothing had happened.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/checkpoint/background_writer.h"
#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/train/setup/checkpoints.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// The writer of this rank's files, which outlives the group in which they were begun.
[[nodiscard]] std::shared_ptr<checkpoint::BackgroundWriter> checkpoint_writer(
    const config::Config& config);

enum class Waiting { kNever, kAlways };  // kAlways: start() returns when it is written or failed

// The totals of a run's checkpoints; equal on all ranks but for `pause_s`.
struct CheckpointTotals {
  int written = 0;
  int failed = 0;
  double pause_s = 0;  // this rank's training stood still for them
};

// All ranks of the group call the same functions at the same step boundaries. Errors returned are
// the transport's, and final; those of the disk are notes.
class Checkpointer {
 public:
  // `config` and `transport` outlive it. Writes to run_directory/checkpoints.
  Checkpointer(transport::Transport& transport, transport::Tag tag,
               const std::filesystem::path& run_directory, const config::Config& config,
               std::shared_ptr<checkpoint::BackgroundWriter> writer, TensorName name,
               Waiting waiting, DataIdentity data = {});
  ~Checkpointer();  // drops the one under way
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // Begins the checkpoint of the pipeline's state as it is now; waits for the one under way.
  [[nodiscard]] Expected<void> start(const runtime::Pipeline& pipeline);
  // Goes on with what is under way, if all ranks are ready to; a message of one byte a rank if
  // something is, nothing otherwise.
  [[nodiscard]] Expected<void> poll() { return timed_advance(Waiting::kNever); }
  // Waits for the one under way.
  [[nodiscard]] Expected<void> finish() { return timed_advance(Waiting::kAlways); }

  [[nodiscard]] bool active() const { return now_.phase != Phase::kIdle; }
  // This rank's disk is still at a file of a checkpoint that was dropped: start() would wait.
  [[nodiscard]] bool writes_dropped() const { return writer_->writes_dropped(); }
  [[nodiscard]] const CheckpointTotals& totals() const { return totals_; }
  // Why the newest attempt failed; none if it did not.
  [[nodiscard]] const std::optional<Error>& failure() const { return failure_; }
  // Lines for people, on rank 0, since the last call.
  [[nodiscard]] std::vector<std::string> take_notes();

 private:
  enum class Phase { kIdle, kWriting, kCommitting };
  struct UnderWay {
    Phase phase = Phase::kIdle;
    std::int64_t step = 0;
    std::filesystem::path pending = {};
    Json state = {};
  };
  struct Found {  // rank 0's thread writes it; it is read when that has finished, if ever
    std::string still_good = {};
    std::string not_removed = {};
  };

  [[nodiscard]] Expected<void> timed_advance(Waiting waiting);
  [[nodiscard]] Expected<void> advance(Waiting waiting);
  [[nodiscard]] Expected<bool> all_ready();
  // Every rank's text or its error; the first error, with its rank's number, becomes failure_.
  [[nodiscard]] Expected<std::vector<std::string>> exchange(const Expected<std::string>& mine);
  [[nodiscard]] Expected<void> commit();
  void give_up();
  [[nodiscard]] Expected<void> conclude();
  [[nodiscard]] bool leads() const { return transport_.rank() == transport::Member(0); }

  transport::Transport& transport_;
  transport::Tag tag_;
  std::filesystem::path root_;
  const config::Config& config_;
  TensorName name_;
  DataIdentity data_;
  Waiting waiting_;

  UnderWay now_;
  std::optional<Error> failure_;
  CheckpointTotals totals_;
  std::vector<std::string> notes_;
  std::shared_ptr<Found> found_ = std::make_shared<Found>();
  std::shared_ptr<checkpoint::BackgroundWriter> writer_;
};

}  // namespace dynmo::train
