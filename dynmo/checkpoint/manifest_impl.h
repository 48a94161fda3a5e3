// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "dynmo/checkpoint/checkpoint.h"

namespace dynmo::checkpoint {

inline constexpr const char* kManifestName = "manifest.json";

// Checks that `entries`, sorted by layer, are those of layers 0..n-1 with n >= 1, each with its
// layer's file name. Returns kBadInput with `origin`.
[[nodiscard]] Expected<void> check_entries(const std::vector<FileEntry>& entries,
                                           const std::string& origin);

// Returns the text of manifest.json, or kBadInput if JSON cannot represent the state.
[[nodiscard]] Expected<std::string> encode_manifest(const Manifest& manifest);

}  // namespace dynmo::checkpoint
