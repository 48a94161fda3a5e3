// SPDX-License-Identifier: Apache-2.0
#pragma once

// An event file of TensorBoard (version 2 of its format): records of a length, its CRC-32C, a
// protobuf message `Event`, and its CRC-32C. TensorBoard, and what imports its files, read it while
// it grows.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/observe/metrics/metrics.h"
#include "dynmo/process/append_file.h"

namespace dynmo::observe {

// Returns the CRC-32C (Castagnoli) of bytes, RFC 3720, appendix B.4.
[[nodiscard]] std::uint32_t crc32c(std::string_view bytes);

// A file of TensorBoard's events. Any thread may use it, one at a time.
class EventFile {
 public:
  // Creates a new file in the folder, with a name that no other process uses. Returns kBadInput
  // with the path and the system's reason.
  [[nodiscard]] static Expected<EventFile> create(const std::filesystem::path& folder);

  // Removes the points from this step on in all files of the folder, because the run continues
  // there. This call and the ones below return kBadInput if the file cannot be written.
  [[nodiscard]] Expected<void> drop_from(std::int64_t step);
  [[nodiscard]] Expected<void> add(std::int64_t step, std::span<const Metric> metrics);
  // Adds a text in Markdown, for TensorBoard's page of texts.
  [[nodiscard]] Expected<void> add_text(std::int64_t step, std::string_view tag,
                                        std::string_view text);

 private:
  explicit EventFile(process::AppendFile file) : file_(std::move(file)) {}
  [[nodiscard]] Expected<void> append(const std::string& event);

  process::AppendFile file_;
};

}  // namespace dynmo::observe
