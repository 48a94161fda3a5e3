// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checkpoints of a run. A checkpoint has one safetensors file for each layer, so any layout of
// layers on ranks can load it. A manifest with every file's digest is written last.
//
//   RUN/checkpoints/step-00000040/layer-0000.safetensors ... manifest.json
//
// A checkpoint exists completely or not at all. It is written into step-00000040.tmp, which is
// renamed when all of it is on the disk. The ranks of a group share the work:
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

// One layer's state: tensors such as "model.layers.1.self_attn.q_proj.weight" and
// "optimizer.exp_avg.NAME", and metadata such as the optimizer's step count.
struct LayerFile {
  LayerId layer;
  std::vector<TensorView> tensors;
  Metadata metadata;
};

// Prefix of the names of a file's tensors that are buffers.
inline constexpr const char* kBuffer = "buffer.";
// Prefix of the names of the masks of pruned matrices.
inline constexpr const char* kMask = "mask.";
// Identity in the manifest of imported weights. They have no optimizer state, so no run continues
// them.
inline constexpr const char* kImportedIdentity = "imported";

struct FileEntry {
  LayerId layer;
  std::string file;  // name in the checkpoint's folder
  Bytes bytes;
  Digest digest;
  friend bool operator==(const FileEntry&, const FileEntry&) = default;
};

// The content of manifest.json, "format": "dynmo-checkpoint-1".
struct Manifest {
  std::int64_t step = 0;
  std::vector<FileEntry> files;  // of layers 0, 1, ..., without a gap
  Json state;                    // the caller's object: plan, seed, data cursor, versions
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
// Returns ROOT/step-00000040.3.tmp. Each group of ranks has its own generation. So a rank that
// still writes for a group that has ended does not write into the next group's folder.
[[nodiscard]] std::filesystem::path pending_folder(const std::filesystem::path& root,
                                                   std::int64_t step, Generation generation);

// Removes what interrupted checkpoints left behind, makes the pending folder and returns it. One
// rank calls it, before any rank writes. Fails with kBadInput. Requires step >= 0.
[[nodiscard]] Expected<std::filesystem::path> begin_checkpoint(const std::filesystem::path& root,
                                                               std::int64_t step,
                                                               Generation generation = 0);

// Removes everything uncommitted, as begin_checkpoint() does first. After a full disk it makes room
// for the next attempt. A folder into which a rank still writes may remain until then.
void discard_pending(const std::filesystem::path& root);

// Writes one layer's file durably. Fails with kBadInput. Any rank and thread may call it, once for
// each layer.
[[nodiscard]] Expected<FileEntry> write_layer(const std::filesystem::path& pending,
                                              const LayerFile& layer);

// Encodes entries as text for the exchange between ranks. decode_entries() returns kBadInput for
// any other text.
[[nodiscard]] std::string encode_entries(std::span<const FileEntry> entries);
[[nodiscard]] Expected<std::vector<FileEntry>> decode_entries(std::string_view text);

// Writes the manifest and makes the checkpoint visible in one rename. It replaces a checkpoint of
// the same step. Returns the checkpoint's folder. The entries may come in any order. Requires
// `state` to be an object.
//
// Returns kBadInput if the entries are not those of layers 0..n-1, once each. Also returns it if a
// file is missing or has another size, or if the disk fails. Older checkpoints are then untouched.
[[nodiscard]] Expected<std::filesystem::path> commit_checkpoint(
    const std::filesystem::path& pending, std::int64_t step, std::vector<FileEntry> entries,
    const Json& state);

// Returns the manifest after checking its own digest. Fails with kBadInput.
[[nodiscard]] Expected<Manifest> read_manifest(const std::filesystem::path& checkpoint);

// Reads every file and compares size and digest. Fails with kBadInput and the file's name.
[[nodiscard]] Expected<Manifest> verify(const std::filesystem::path& checkpoint);

// Returns the committed checkpoints, newest first, or none if `root` does not exist. They may be
// damaged: call verify(). Fails with kBadInput.
[[nodiscard]] Expected<std::vector<CheckpointFolder>> list_checkpoints(
    const std::filesystem::path& root);

// Returns the newest checkpoint that verifies, or kNoCheckpoint. Appends to `skipped` one error for
// each newer checkpoint that was skipped.
[[nodiscard]] Expected<VerifiedCheckpoint> newest_verified(const std::filesystem::path& root,
                                                           std::vector<Error>* skipped);

// Returns `path` itself if it is a checkpoint that verifies. If it is a run's folder, returns the
// run's newest checkpoint that verifies. Otherwise returns kNoCheckpoint, and says what `path` is.
[[nodiscard]] Expected<VerifiedCheckpoint> find_checkpoint(const std::filesystem::path& path,
                                                           std::vector<Error>* skipped);

// Opens one layer's file after comparing its size and digest with the manifest. Fails with
// kBadInput. Requires layer < manifest.files.size().
[[nodiscard]] Expected<Safetensors> read_layer(const VerifiedCheckpoint& checkpoint, LayerId layer);

// Removes all checkpoints except the newest `keep`, and returns what it removed. The newest that
// verifies stays even if damaged ones are newer. Fails with kBadInput. Requires keep >= 1.
[[nodiscard]] Expected<std::vector<std::filesystem::path>> prune(const std::filesystem::path& root,
                                                                 int keep);

}  // namespace dynmo::checkpoint
