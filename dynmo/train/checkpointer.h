// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes a run's checkpoints while training continues. At a checkpoint's step every rank (of the
// first replica) copies the layers that it owns (checkpoint/background_writer.h). Threads write the
// copies. At a later step boundary all ranks report that their files are on the disk. Then rank 0's
// thread commits them.
//
// Ranks wait for a disk only at the end of the run, or if the next checkpoint is due too early. A
// waiting rank notices the loss of a rank. A loss drops the checkpoint in progress. So a file on a
// hung disk delays the next checkpoint, not the recovery.
//
// A checkpoint that cannot be written does not end the run. A line gives the reason and the last
// good one, and the next one is tried as usual.

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
#include "dynmo/runtime/side_copies.h"
#include "dynmo/train/setup/checkpoints.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// Returns the writer of this rank's files, which outlives the group in which they were begun.
[[nodiscard]] std::shared_ptr<checkpoint::BackgroundWriter> checkpoint_writer(
    const config::Config& config);

enum class Waiting { kNever, kAlways };  // kAlways: start() waits for its checkpoint

// The totals of a run's checkpoints. They are equal on all ranks except for `pause_s`.
struct CheckpointTotals {
  int written = 0;
  int failed = 0;
  double pause_s = 0;  // pause of this rank's training for them
};

// Writes the checkpoints of a group. All its ranks call the same functions at the same step
// boundaries. Returned errors are those of the transport, and final. Errors of the disk are notes.
class Checkpointer {
 public:
  // Writes to run_directory/checkpoints. `config` and `transport` outlive it.
  Checkpointer(transport::Transport& transport, transport::Tag tag,
               const std::filesystem::path& run_directory, const config::Config& config,
               std::shared_ptr<checkpoint::BackgroundWriter> writer, TensorName name,
               Waiting waiting, DataIdentity data = {});
  ~Checkpointer();  // drops a checkpoint in progress
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // Begins the checkpoint of the pipeline's current state. First waits for a checkpoint in
  // progress.
  [[nodiscard]] Expected<void> start(const runtime::Pipeline& pipeline);
  // Continues a checkpoint in progress, if all ranks are ready. Sends a message of one byte a rank
  // while a checkpoint is in progress, else none.
  [[nodiscard]] Expected<void> poll() { return timed_advance(Waiting::kNever); }
  // Waits for the checkpoint in progress.
  [[nodiscard]] Expected<void> finish() { return timed_advance(Waiting::kAlways); }

  [[nodiscard]] bool active() const { return now_.phase != Phase::kIdle; }
  // Returns whether this rank's disk still writes a file of a dropped checkpoint. Then start()
  // would wait.
  [[nodiscard]] bool writes_dropped() const { return writer_->writes_dropped(); }
  [[nodiscard]] const CheckpointTotals& totals() const { return outcome_.totals; }
  // Returns why the newest attempt failed, or none if it did not.
  [[nodiscard]] const std::optional<Error>& failure() const { return outcome_.failure; }
  // Returns lines for the user, on rank 0, since the last call.
  [[nodiscard]] std::vector<std::string> take_notes();

 private:
  enum class Phase { kIdle, kWriting, kCommitting };
  struct UnderWay {
    Phase phase = Phase::kIdle;
    std::int64_t step = 0;
    std::filesystem::path pending = {};
    Json state = {};
  };
  struct Outcome {
    std::optional<Error> failure;  // of the newest checkpoint
    CheckpointTotals totals;
    std::vector<std::string> notes;  // not taken yet
  };
  // Texts that the writer's thread of rank 0 has left. They are read after its tasks have ended.
  struct Found {
    std::string still_good = {};
    std::string not_removed = {};
  };

  void add_layers(const runtime::Pipeline& pipeline);
  void add_copies(runtime::CopiedLayers copies, const model::Model& model);
  [[nodiscard]] Expected<void> timed_advance(Waiting waiting);
  [[nodiscard]] Expected<void> advance(Waiting waiting);
  [[nodiscard]] Expected<bool> all_ready();
  // Exchanges every rank's text or its error. The first error, with its rank's number, becomes
  // the failure.
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
  Outcome outcome_;
  std::shared_ptr<Found> found_ = std::make_shared<Found>();
  std::shared_ptr<checkpoint::BackgroundWriter> writer_;
};

}  // namespace dynmo::train
