// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checkpoints of a run: one safetensors file a layer, so that any layout of layers on ranks can
// load them, and a manifest with every file's digest, written last.
//
//   RUN/checkpoints/step-00000040/layer-0000.safetensors ... manifest.json
//
// A checkpoint is there or not: it is written into step-00000040.tmp and renamed when all of it is
// on the disk. Who does what in a group of ranks:
//
//   rank 0     begin_checkpoint(root, step, generation), then tells the others
//   each rank  write_layer(pending_folder(root, step, generation), ...) for the layers it owns
//   all        exchange the FileEntry lists (encode_entries, decode_entries)
//   rank 0     commit_checkpoint(pending, step, entries, state)
//
// docs/checkpoints.md has the format and what a crash at each point leaves behind.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/checkpoint/safetensors.h"
#include "dynmo/core/digest.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/json.h"
#include "dynmo/core/units.h"

namespace dynmo::checkpoint {

// One layer's state: tensors such as "model.layers.1.self_attn.q_proj.weight",
// "optimizer.exp_avg.NAME", and metadata such as the optimizer's step count.
struct LayerFile {
  LayerId layer;
  std::vector<TensorView> tensors;
  Metadata metadata;
};

// Before the names of a file's tensors that are buffers.
inline constexpr const char* kBuffer = "buffer.";
// ... and the masks of pruned matrices.
inline constexpr const char* kMask = "mask.";
// In the manifest of weights without optimizer state, which no run continues.
inline constexpr const char* kImportedIdentity = "imported";

struct FileEntry {
  LayerId layer;
  std::string file;  // its name in the checkpoint's folder
  Bytes bytes;
  Digest digest;
  friend bool operator==(const FileEntry&, const FileEntry&) = default;
};

// manifest.json, "format": "dynmo-checkpoint-1".
struct Manifest {
  std::int64_t step = 0;
  std::vector<FileEntry> files;  // of layers 0, 1, ...: none is missing
  Json state;                    // an object of the caller's: plan, seed, data cursor, versions
};

struct CheckpointFolder {
  std::int64_t step = 0;
  std::filesystem::path path;
};

struct VerifiedCheckpoint {
  std::filesystem::path path;
  Manifest manifest;
};

[[nodiscard]] std::string layer_file_name(LayerId layer);  // "layer-0003.safetensors"
[[nodiscard]] std::filesystem::path step_folder(const std::filesystem::path& root,
                                                std::int64_t step);  // ROOT/step-00000040
// ROOT/step-00000040.3.tmp. Each group of ranks has a generation of its own: a rank that is still
// writing for a group that has ended does not write into the folder of the next one.
[[nodiscard]] std::filesystem::path pending_folder(const std::filesystem::path& root,
                                                   std::int64_t step, Generation generation);

// Removes what interrupted checkpoints left behind and makes the pending folder, which it returns.
// One rank calls it, before any writes. Requires step >= 0.
[[nodiscard]] Expected<std::filesystem::path> begin_checkpoint(const std::filesystem::path& root,
                                                               std::int64_t step,
                                                               Generation generation = 0);

// Removes everything uncommitted: what begin_checkpoint does first, and what a caller does whose
// disk is full, so that the next attempt has room. A folder that somebody still writes into may
// stay, for the next attempt to remove.
void discard_pending(const std::filesystem::path& root);

// Writes one layer's file durably. Any rank, any thread, one call a layer.
[[nodiscard]] Expected<FileEntry> write_layer(const std::filesystem::path& pending,
                                              const LayerFile& layer);

// Entries as text, for the exchange between ranks; decoding is kBadInput for anything else.
[[nodiscard]] std::string encode_entries(std::span<const FileEntry> entries);
[[nodiscard]] Expected<std::vector<FileEntry>> decode_entries(std::string_view text);

// Writes the manifest and makes the checkpoint visible, in one rename; one of the same step that is
// there already is replaced. Returns its folder. The entries may come in any order. kBadInput: they
// are not of layers 0..n-1 once each, a file is missing or of another size, the disk says no; the
// older checkpoints are untouched then. Requires `state` to be an object.
[[nodiscard]] Expected<std::filesystem::path> commit_checkpoint(
    const std::filesystem::path& pending, std::int64_t step, std::vector<FileEntry> entries,
    const Json& state);

// The manifest, with its own digest checked. kBadInput.
[[nodiscard]] Expected<Manifest> read_manifest(const std::filesystem::path& checkpoint);

// Reads every file through and compares size and digest. kBadInput, naming the file.
[[nodiscard]] Expected<Manifest> verify(const std::filesystem::path& checkpoint);

// Committed checkpoints, newest first; none if `root` does not exist. They may be damaged: verify.
[[nodiscard]] Expected<std::vector<CheckpointFolder>> list_checkpoints(
    const std::filesystem::path& root);

// The newest that verifies. Why newer ones were passed over is appended to `skipped`, a line each.
// kNoCheckpoint if there is none.
[[nodiscard]] Expected<VerifiedCheckpoint> newest_verified(const std::filesystem::path& root,
                                                           std::vector<Error>* skipped);

// `path` itself if it is a checkpoint, else the newest that verifies of the run whose folder it is.
// kNoCheckpoint saying what `path` is instead.
[[nodiscard]] Expected<VerifiedCheckpoint> find_checkpoint(const std::filesystem::path& path,
                                                           std::vector<Error>* skipped);

// Opens one layer's file after comparing its size and digest with the manifest. kBadInput. Requires
// layer < manifest.files.size().
[[nodiscard]] Expected<Safetensors> read_layer(const VerifiedCheckpoint& checkpoint, LayerId layer);

// Removes all but the newest `keep`, and returns what it removed. The newest that verifies stays
// even when damaged ones are newer. Requires keep >= 1.
[[nodiscard]] Expected<std::vector<std::filesystem::path>> prune(const std::filesystem::path& root,
                                                                 int keep);

}  // namespace dynmo::checkpoint
