// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/checkpointer.h"

#include <fmt/format.h>

#include <chrono>
#include <utility>

#include "dynmo/core/progress.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/transport/gather.h"

namespace dynmo::train {
namespace {

using Clock = std::chrono::steady_clock;

// Ranks that wait for a disk exchange messages at this interval.
constexpr std::chrono::milliseconds kRound{50};

// Returns a result as text: its value, or "!" and the error's message.
std::string encode(const Expected<std::string>& result) {
  return result.has_value() ? "." + *result : "!" + result.error().message;
}

Expected<std::string> entries_text(Expected<std::vector<checkpoint::FileEntry>> entries) {
  DYNMO_ASSIGN(const auto list, std::move(entries));
  return checkpoint::encode_entries(list);
}

}  // namespace

std::shared_ptr<checkpoint::BackgroundWriter> checkpoint_writer(const config::Config& config) {
  return std::make_shared<checkpoint::BackgroundWriter>(
      config.checkpoint.asynchronous ? config.checkpoint.memory : Bytes{0});
}

Checkpointer::Checkpointer(transport::Transport& transport, transport::Tag tag,
                           const std::filesystem::path& run_directory, const config::Config& config,
                           std::shared_ptr<checkpoint::BackgroundWriter> writer, TensorName name,
                           Waiting waiting, DataIdentity data)
    : transport_(transport),
      tag_(tag),
      root_(observe::RunFolder(run_directory).checkpoints()),
      config_(config),
      name_(std::move(name)),
      data_(std::move(data)),
      waiting_(waiting),
      writer_(std::move(writer)) {}

Checkpointer::~Checkpointer() {
  if (active()) writer_->drop();
}

Expected<void> Checkpointer::start(const runtime::Pipeline& pipeline) {
  const auto begin = Clock::now();
  DYNMO_TRY(advance(Waiting::kAlways));
  outcome_.failure.reset();
  now_.step = pipeline.next_step();
  const Generation generation = pipeline.plan().generation;
  now_.pending = checkpoint::pending_folder(root_, now_.step, generation);
  now_.state = state_json(pipeline, config_, data_);
  Expected<std::string> begun = std::string();
  if (leads()) {
    const auto made = checkpoint::begin_checkpoint(root_, now_.step, generation);
    if (!made) begun = made.error();
  }
  // Other ranks may write once the folder exists.
  DYNMO_TRY(exchange(begun));
  if (outcome_.failure) {
    give_up();
  } else {
    // The other replicas have the same bits.
    if (pipeline.grid().replica() == 0) add_layers(pipeline);
    now_.phase = Phase::kWriting;
  }
  const bool waits = waiting_ == Waiting::kAlways || !config_.checkpoint.asynchronous;
  if (waits) DYNMO_TRY(advance(Waiting::kAlways));
  outcome_.totals.pause_s += seconds_since(begin);
  return {};
}

// Gives the layers to the writer. On a device, layers are copied while training continues, as far
// as there is room for the copies. The writer's thread waits for them.
void Checkpointer::add_layers(const runtime::Pipeline& pipeline) {
  runtime::LayerStates beside;
  if (pipeline.staging().beside) {
    Bytes room = writer_->room();
    for (const auto& [id, state] : pipeline.states()) {
      const Bytes bytes = model::tensor_bytes(state);
      if (bytes > room) continue;
      room -= bytes;
      beside.emplace(id, state);
    }
  }
  if (!beside.empty()) add_copies(pipeline.staging().beside->copy(beside), pipeline.model());
  for (const auto& [id, state] : pipeline.states()) {
    if (beside.contains(id)) continue;
    const model::LayerState host = pipeline.staging().to_host(state);
    writer_->add_layer(now_.pending, layer_file(*pipeline.model()[id.index()], host, name_).file);
    note_progress();
  }
}

void Checkpointer::add_copies(runtime::CopiedLayers copies, const model::Model& model) {
  for (auto& [id, copy] : copies.layers) {
    const Bytes bytes = model::tensor_bytes(copy);
    // The thread makes the file, because the sizes of pruned matrices follow from the copied bytes.
    // The values of layer_file() live as long as the file.
    auto arrived = [end = copies.end, layer = model[id.index()], state = std::move(copy),
                    name = name_, values = std::vector<at::Tensor>()]() mutable {
      end.wait();
      FileOfLayer made = layer_file(*layer, state, name);
      values = std::move(made.values);
      return std::move(made.file);
    };
    writer_->add_arriving(now_.pending, bytes, std::move(arrived));
  }
}

Expected<void> Checkpointer::timed_advance(Waiting waiting) {
  if (!active()) return {};
  const auto begin = Clock::now();
  DYNMO_TRY(advance(waiting));
  outcome_.totals.pause_s += seconds_since(begin);
  return {};
}

Expected<void> Checkpointer::advance(Waiting waiting) {
  for (bool ready = false; !ready || active();) {
    if (waiting == Waiting::kAlways) writer_->wait_for(kRound);
    DYNMO_ASSIGN(ready, all_ready());
    if (!ready && waiting == Waiting::kNever) return {};
    if (ready && active()) DYNMO_TRY(now_.phase == Phase::kWriting ? commit() : conclude());
  }
  return {};
}

Expected<bool> Checkpointer::all_ready() {
  const std::byte mine{writer_->busy() ? std::byte{0} : std::byte{1}};
  DYNMO_ASSIGN(const auto all, transport::all_gather(transport_, tag_, std::span(&mine, 1)));
  for (const auto& theirs : all) {
    if (theirs.front() == std::byte{0}) return false;
  }
  return true;
}

Expected<std::vector<std::string>> Checkpointer::exchange(const Expected<std::string>& mine) {
  DYNMO_ASSIGN(auto all, transport::gather_texts(transport_, tag_, encode(mine)));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].starts_with('!') && !outcome_.failure) {
      outcome_.failure = make_error(ErrorCode::kNoCheckpoint, "rank {}: {}",
                                    transport_.number_of(transport::Member(static_cast<int>(rank))),
                                    all[rank].substr(1));
    }
    all[rank].erase(0, 1);
  }
  return all;
}

// Begins the commit. All files are on the disk, or a rank could not write.
Expected<void> Checkpointer::commit() {
  DYNMO_ASSIGN(std::vector<std::string> texts, exchange(entries_text(writer_->finish())));
  if (outcome_.failure) {
    give_up();
    return {};
  }
  now_.phase = Phase::kCommitting;
  if (!leads()) return {};
  writer_->add_task([root = root_, found = found_, now = now_, texts = std::move(texts),
                     keep = static_cast<int>(config_.checkpoint.keep)]() -> Expected<void> {
    std::vector<checkpoint::FileEntry> entries;
    for (const std::string& text : texts) {
      DYNMO_ASSIGN(const auto some, checkpoint::decode_entries(text));
      entries.insert(entries.end(), some.begin(), some.end());
    }
    DYNMO_TRY(checkpoint::commit_checkpoint(now.pending, now.step, std::move(entries), now.state));
    checkpoint::discard_pending(root);  // left by groups that have ended
    const auto pruned = checkpoint::prune(root, keep);
    found->not_removed = pruned ? "" : pruned.error().message;
    return {};
  });
  return {};
}

// Removes the failed attempt, and finds the newest checkpoint that is still good.
void Checkpointer::give_up() {
  now_.phase = Phase::kCommitting;
  if (!leads()) return;
  writer_->add_task([root = root_, found = found_]() -> Expected<void> {
    checkpoint::discard_pending(root);
    const auto good = checkpoint::newest_verified(root, nullptr);
    found->still_good = good ? good->path.string() : "";
    return {};
  });
}

Expected<void> Checkpointer::conclude() {
  Expected<std::string> mine = std::string();
  const bool had_failed = outcome_.failure.has_value();
  if (const auto done = writer_->finish(); !done) mine = done.error();
  DYNMO_TRY(exchange(mine));
  if (outcome_.failure && !had_failed) {
    give_up();
    return {};
  }
  now_.phase = Phase::kIdle;
  ++(outcome_.failure ? outcome_.totals.failed : outcome_.totals.written);
  if (!leads()) return {};
  if (outcome_.failure) {
    outcome_.notes.push_back(fmt::format(
        "ALARM    no checkpoint of step {}: {}; {}; {}", now_.step, outcome_.failure->message,
        now_.step < config_.train.steps ? "training goes on, the next one is tried all the same"
                                        : "it was the last",
        found_->still_good.empty() ? "there is no good one yet"
                                   : "still good: " + found_->still_good));
  }
  if (!found_->not_removed.empty()) {
    outcome_.notes.push_back(
        fmt::format("ALARM    older checkpoints stay: {}", std::exchange(found_->not_removed, {})));
  }
  return {};
}

std::vector<std::string> Checkpointer::take_notes() { return std::exchange(outcome_.notes, {}); }

}  // namespace dynmo::train
