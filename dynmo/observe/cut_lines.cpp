// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/cut_lines.h"

#include <algorithm>
#include <fstream>
#include <string>
#include <system_error>

#include "dynmo/core/files.h"
#include "dynmo/core/json.h"

namespace dynmo::observe {
namespace {

// Returns the offset of the last line in a file of `size` bytes that ends in a newline.
std::int64_t last_line(std::ifstream& file, std::int64_t size) {
  constexpr std::int64_t kChunk = 4096;
  std::string chunk;
  for (std::int64_t end = size - 1; end > 0;) {
    const std::int64_t begin = std::max<std::int64_t>(0, end - kChunk);
    chunk.resize(static_cast<std::size_t>(end - begin));
    file.seekg(begin);
    file.read(chunk.data(), end - begin);
    const std::size_t newline = chunk.rfind('\n');
    if (newline != std::string::npos) return begin + static_cast<std::int64_t>(newline) + 1;
    end = begin;
  }
  return 0;
}

}  // namespace

Expected<CutLines> cut_lines(const std::filesystem::path& path, std::int64_t step) {
  std::error_code fault;
  if (!std::filesystem::exists(path, fault)) return CutLines();
  DYNMO_TRY(cut_torn_line(path));
  auto size = static_cast<std::int64_t>(std::filesystem::file_size(path, fault));
  std::ifstream file(path, std::ios::binary);
  CutLines cut;
  while (size > 0) {
    const std::int64_t begin = last_line(file, size);
    std::string line(static_cast<std::size_t>(size - begin), '\0');
    file.seekg(begin);
    if (!file.read(line.data(), size - begin)) {
      return make_error(ErrorCode::kBadInput, "cannot read '{}'", path.string());
    }
    DYNMO_ASSIGN(const Json json, parse_json(line, path.string()));
    cut.has_header = true;
    if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer()) break;
    cut.newest = json["step"].get<std::int64_t>();
    if (cut.newest < step) break;
    size = begin;
    cut = {};
  }
  std::filesystem::resize_file(path, static_cast<std::uintmax_t>(size), fault);
  if (!fault) return cut;
  return make_error(ErrorCode::kBadInput, "cannot cut '{}': {}", path.string(), fault.message());
}

}  // namespace dynmo::observe
