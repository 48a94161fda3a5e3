// SPDX-License-Identifier: Apache-2.0
#include "dynmo/checkpoint/checkpoint.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>

#include "dynmo/checkpoint/manifest_impl.h"
#include "dynmo/core/check.h"
#include "dynmo/core/file_system.h"
#include "dynmo/core/files.h"
#include "dynmo/core/progress.h"
#include "dynmo/observe/run_folder.h"

namespace dynmo::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kPending = ".tmp";

// Returns the step of a folder named like "step-00000040", or nullopt for any other name.
std::optional<std::int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const std::string_view digits = name.substr(kPrefix.size());
  std::int64_t step = 0;
  const auto [end, fault] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (fault != std::errc() || end != digits.data() + digits.size() || step < 0) return std::nullopt;
  // A step has only one name, so "step-40" is none.
  if (step_folder("", step).filename() != name) return std::nullopt;
  return step;
}

Error system_error(std::string_view what, const fs::path& path, const std::string& why) {
  return make_error(ErrorCode::kBadInput, "cannot {} '{}': {}", what, path.string(), why);
}

Expected<void> remove_tree(const fs::path& path) {
  std::error_code fault;
  fs::remove_all(path, fault);
  if (fault) return system_error("remove", path, fault.message());
  return {};
}

// Returns the names in a folder, sorted, or none if it does not exist.
Expected<std::vector<std::string>> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code fault;
  if (!fs::exists(folder, fault) && !fault) return names;
  fs::directory_iterator next(folder, fault);
  for (; !fault && next != fs::directory_iterator(); next.increment(fault)) {
    names.push_back(next->path().filename().string());
  }
  if (fault) return system_error("read folder", folder, fault.message());
  std::sort(names.begin(), names.end());
  return names;
}

// Lists the folders that have a checkpoint's name, newest first.
Expected<std::vector<CheckpointFolder>> folders_in(const fs::path& root) {
  DYNMO_ASSIGN(const auto names, names_in(root));
  std::vector<CheckpointFolder> folders;
  for (const std::string& name : names) {
    if (const auto step = step_of(name)) folders.push_back({.step = *step, .path = root / name});
  }
  std::sort(folders.begin(), folders.end(),
            [](const CheckpointFolder& a, const CheckpointFolder& b) { return a.step > b.step; });
  return folders;
}

// Renames a checkpoint to `aside`, a name that is never listed. If the file system cannot rename
// the folder (in a lower layer of an overlay), removes it. The manifest is removed first, because a
// folder without it is not listed.
Expected<void> set_aside(const fs::path& checkpoint, const fs::path& aside) {
  if (::rename(checkpoint.c_str(), aside.c_str()) == 0) return {};
  const int error = errno;
  if (!is_not_offered(error) || ::access(checkpoint.parent_path().c_str(), W_OK | X_OK) != 0) {
    return system_error("remove", checkpoint, std::strerror(error));
  }
  DYNMO_TRY(remove_tree(checkpoint / kManifestName));
  DYNMO_TRY(sync_directory(checkpoint));
  return remove_tree(checkpoint);
}

// Removes a checkpoint under a name in ".tmp". Such names are never listed, and the next
// begin_checkpoint() removes what a crash has left.
Expected<void> remove_checkpoint(const fs::path& root, const CheckpointFolder& checkpoint) {
  const fs::path doomed = checkpoint.path.string() + ".removed" + std::string(kPending);
  DYNMO_TRY(remove_tree(doomed));
  DYNMO_TRY(set_aside(checkpoint.path, doomed));
  DYNMO_TRY(sync_directory(root));
  return remove_tree(doomed);
}

// Makes `pending` visible as `final_path`. If a checkpoint of this step exists, the two exchange
// names in one operation, so that there always is one. If the file system cannot do that, there is
// none of this step for a moment.
Expected<void> publish(const fs::path& root, const fs::path& pending, const fs::path& final_path) {
  if (::rename(pending.c_str(), final_path.c_str()) == 0) return sync_directory(root);
  const int error = errno;
  std::error_code fault;
  // File systems report an existing folder differently: ENOTEMPTY, EEXIST, EACCES.
  if (!is_not_offered(error) && error != ENOTEMPTY) {
    return system_error("commit", final_path, std::strerror(error));
  }
  if (!fs::exists(final_path, fault)) {
    return system_error("commit", final_path, std::strerror(error));
  }
  if (::renameat2(AT_FDCWD, pending.c_str(), AT_FDCWD, final_path.c_str(), RENAME_EXCHANGE) != 0) {
    const fs::path aside = final_path.string() + ".replaced" + std::string(kPending);
    DYNMO_TRY(remove_tree(aside));
    DYNMO_TRY(set_aside(final_path, aside));
    if (::rename(pending.c_str(), final_path.c_str()) != 0) {
      return system_error("commit", final_path, std::strerror(errno));
    }
    DYNMO_TRY(sync_directory(root));
    return remove_tree(aside);
  }
  DYNMO_TRY(sync_directory(root));
  return remove_tree(pending);
}

Expected<void> check_file(const fs::path& path, const FileEntry& entry,
                          std::span<const std::byte> bytes) {
  if (bytes.size() != static_cast<std::size_t>(entry.bytes.value)) {
    return make_error(ErrorCode::kBadInput, "{} has {} bytes, wanted {}", path.string(),
                      bytes.size(), entry.bytes.value);
  }
  if (const Digest digest = digest_of(bytes); digest != entry.digest) {
    return make_error(ErrorCode::kBadInput, "{} has digest {}, wanted {}: it is damaged",
                      path.string(), digest.hex(), entry.digest.hex());
  }
  return {};
}

}  // namespace

std::string layer_file_name(LayerId layer) {
  return fmt::format("layer-{:04}.safetensors", layer.value);
}

fs::path step_folder(const fs::path& root, std::int64_t step) {
  return root / fmt::format("{}{:08}", kPrefix, step);
}

fs::path pending_folder(const fs::path& root, std::int64_t step, Generation generation) {
  return fmt::format("{}.{}{}", step_folder(root, step).string(), generation, kPending);
}

void discard_pending(const fs::path& root) {
  const auto names = names_in(root);
  if (!names) return;
  for (const std::string& name : *names) {
    // Only names that this code makes: "step-" and ".tmp".
    std::error_code ignored;
    if (name.starts_with(kPrefix) && name.ends_with(kPending)) {
      fs::remove_all(root / name, ignored);
    }
  }
}

Expected<fs::path> begin_checkpoint(const fs::path& root, std::int64_t step,
                                    Generation generation) {
  DYNMO_CHECK(step >= 0, "a step of at least 0, got {}", step);
  DYNMO_TRY(make_directories(root));
  discard_pending(root);
  fs::path pending = pending_folder(root, step, generation);
  DYNMO_TRY(make_directories(pending));
  return pending;
}

Expected<FileEntry> write_layer(const fs::path& pending, const LayerFile& layer) {
  FileEntry entry{
      .layer = layer.layer, .file = layer_file_name(layer.layer), .bytes = {}, .digest = {}};
  DYNMO_ASSIGN(const WrittenFile written,
               write_safetensors(pending / entry.file, layer.tensors, layer.metadata));
  entry.bytes = written.bytes;
  entry.digest = written.digest;
  return entry;
}

Expected<fs::path> commit_checkpoint(const fs::path& pending, std::int64_t step,
                                     std::vector<FileEntry> entries, const Json& state) {
  DYNMO_CHECK(state.is_object(), "a state that is an object, got {}", state.type_name());
  const fs::path root = pending.parent_path();
  std::sort(entries.begin(), entries.end(),
            [](const FileEntry& a, const FileEntry& b) { return a.layer < b.layer; });
  DYNMO_TRY(check_entries(entries, pending.string()));
  for (const FileEntry& entry : entries) {
    std::error_code fault;
    const auto size = fs::file_size(pending / entry.file, fault);
    if (fault || size != static_cast<std::uintmax_t>(entry.bytes.value)) {
      return make_error(ErrorCode::kBadInput, "{} has {} bytes, wanted {}: not committed",
                        (pending / entry.file).string(), fault ? 0 : size, entry.bytes.value);
    }
  }
  DYNMO_ASSIGN(const std::string manifest,
               encode_manifest({.step = step, .files = std::move(entries), .state = state}));
  DYNMO_TRY(write_file_durably(pending / kManifestName, manifest));
  fs::path committed = step_folder(root, step);
  DYNMO_TRY(publish(root, pending, committed));
  return committed;
}

Expected<Manifest> verify(const fs::path& checkpoint) {
  DYNMO_ASSIGN(Manifest manifest, read_manifest(checkpoint));
  if (step_of(checkpoint.filename().string()).value_or(manifest.step) != manifest.step) {
    return make_error(ErrorCode::kBadInput, "{}: its manifest is of step {}", checkpoint.string(),
                      manifest.step);
  }
  for (const FileEntry& entry : manifest.files) {
    const fs::path path = checkpoint / entry.file;
    DYNMO_ASSIGN(const auto file, data::MappedFile::open(path));
    DYNMO_TRY(check_file(path, entry, file->bytes()));
    note_progress();
  }
  return manifest;
}

Expected<std::vector<CheckpointFolder>> list_checkpoints(const fs::path& root) {
  DYNMO_ASSIGN(auto checkpoints, folders_in(root));
  std::erase_if(checkpoints, [](const CheckpointFolder& checkpoint) {
    std::error_code ignored;
    return !fs::exists(checkpoint.path / kManifestName, ignored);
  });
  return checkpoints;
}

Expected<VerifiedCheckpoint> newest_verified(const fs::path& root, std::vector<Error>* skipped) {
  // Includes folders that lost their manifest, so that they are reported as skipped.
  DYNMO_ASSIGN(const auto checkpoints, folders_in(root));
  std::string newest;
  for (const CheckpointFolder& checkpoint : checkpoints) {
    auto manifest = verify(checkpoint.path);
    if (manifest) return VerifiedCheckpoint{checkpoint.path, std::move(*manifest)};
    if (newest.empty()) newest = "; the newest: " + manifest.error().message;
    if (skipped != nullptr) skipped->push_back(manifest.error());
  }
  if (checkpoints.empty()) {
    return make_error(ErrorCode::kNoCheckpoint,
                      "no usable checkpoint in '{}': none was written there (checkpoint.every)",
                      root.string());
  }
  return make_error(ErrorCode::kNoCheckpoint,
                    "no usable checkpoint in '{}': {} there, {} damaged{}", root.string(),
                    checkpoints.size(), checkpoints.size(), newest);
}

Expected<VerifiedCheckpoint> find_checkpoint(const fs::path& path, std::vector<Error>* skipped) {
  std::error_code fault;
  if (fs::exists(path / kManifestName, fault)) {
    auto manifest = verify(path);
    if (!manifest) return Error{ErrorCode::kNoCheckpoint, manifest.error().message};
    return VerifiedCheckpoint{.path = path, .manifest = std::move(*manifest)};
  }
  const fs::path root = observe::RunFolder(path).checkpoints();
  if (fs::exists(root, fault)) return newest_verified(root, skipped);
  return make_error(
      ErrorCode::kNoCheckpoint,
      "no usable checkpoint: '{}' {}: wanted the folder of a run that wrote some, or "
      "one such as RUN/checkpoints/step-00000100",
      path.string(),
      fs::exists(path, fault) ? "has neither checkpoints nor manifest.json" : "does not exist");
}

Expected<Safetensors> read_layer(const VerifiedCheckpoint& checkpoint, LayerId layer) {
  DYNMO_CHECK(layer.value >= 0 && layer.index() < checkpoint.manifest.files.size(),
              "a layer below {}, got {}", checkpoint.manifest.files.size(), layer);
  const FileEntry& entry = checkpoint.manifest.files[layer.index()];
  const fs::path path = checkpoint.path / entry.file;
  // Digests the mapped bytes before they are parsed, so the bytes in use are those that were
  // checked.
  return Safetensors::open(
      path, [&](std::span<const std::byte> bytes) { return check_file(path, entry, bytes); });
}

Expected<std::vector<fs::path>> prune(const fs::path& root, int keep) {
  DYNMO_CHECK(keep >= 1, "to keep at least one checkpoint, got {}", keep);
  DYNMO_ASSIGN(const auto checkpoints, list_checkpoints(root));
  std::vector<fs::path> removed;
  const auto kept = static_cast<std::size_t>(keep);
  if (checkpoints.size() <= kept) return removed;
  const auto newest = newest_verified(root, nullptr);
  for (std::size_t i = kept; i < checkpoints.size(); ++i) {
    // If none verifies, all stay: none is worth less than another.
    if (!newest || checkpoints[i].path == newest->path) continue;
    DYNMO_TRY(remove_checkpoint(root, checkpoints[i]));
    removed.push_back(checkpoints[i].path);
  }
  return removed;
}

}  // namespace dynmo::checkpoint
