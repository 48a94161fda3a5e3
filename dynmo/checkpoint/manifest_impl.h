// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "dynmo/checkpoint/checkpoint.h"

namespace dynmo::checkpoint {

inline constexpr const char* kManifestName = "manifest.json";

// kBadInput if `entries`, sorted by layer, are not those of layers 0..n-1 with n >= 1, each under
// its layer's file name.
[[nodiscard]] Expected<void> check_entries(const std::vector<FileEntry>& entries,
                                           const std::string& origin);

// The text of manifest.json; kBadInput if the state holds what JSON cannot.
[[nodiscard]] Expected<std::string> encode_manifest(const Manifest& manifest);

}  // namespace dynmo::checkpoint
