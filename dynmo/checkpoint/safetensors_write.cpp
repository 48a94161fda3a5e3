// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>

#include "dynmo/checkpoint/safetensors.h"
#include "dynmo/core/check.h"
#include "dynmo/core/files.h"
#include "dynmo/core/json.h"

namespace dynmo::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian");

// Returns the tensors in the order of the file: descending alignment, then name.
std::vector<const TensorView*> in_file_order(std::span<const TensorView> tensors) {
  std::vector<const TensorView*> order;
  for (const TensorView& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const TensorView* a, const TensorView* b) {
    return a->dtype != b->dtype ? a->dtype > b->dtype : a->name < b->name;
  });
  return order;
}

Expected<void> check_names(std::span<const TensorView> tensors, const std::string& path) {
  std::vector<std::string_view> names;
  for (const TensorView& tensor : tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    return make_error(ErrorCode::kBadInput, "{}: two tensors are called '{}'", path, *twice);
  }
  if (std::binary_search(names.begin(), names.end(), kMetadataKey)) {
    return make_error(ErrorCode::kBadInput, "{}: no tensor can be called '{}'", path, kMetadataKey);
  }
  return {};
}

// Returns the JSON header, padded with spaces to a multiple of 8 bytes.
Expected<std::string> make_header(std::span<const TensorView* const> order,
                                  const Metadata& metadata, const std::string& path) {
  Json header = Json::object();
  if (!metadata.empty()) header[std::string(kMetadataKey)] = metadata;
  std::uint64_t offset = 0;
  // Concatenates text, because adding to a JSON object would search all names each time.
  std::string text;
  try {
    text = header.dump();
    text.pop_back();
    for (const TensorView* tensor : order) {
      if (text.size() > 1) text += ',';
      text += Json(tensor->name).dump() + ':';
      text += Json{{"dtype", name(tensor->dtype)},
                   {"shape", tensor->shape},
                   {"data_offsets", {offset, offset + tensor->bytes.size()}}}
                  .dump();
      offset += tensor->bytes.size();
    }
  } catch (const Json::exception&) {
    return make_error(ErrorCode::kBadInput, "{}: a name or metadata is not UTF-8", path);
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > kMaxHeader) {
    return make_error(ErrorCode::kBadInput,
                      "{}: {} tensors need a header of {} bytes, the format allows {}", path,
                      order.size(), text.size(), kMaxHeader);
  }
  return text;
}

}  // namespace

Expected<WrittenFile> write_safetensors(const std::filesystem::path& path,
                                        std::span<const TensorView> tensors,
                                        const Metadata& metadata) {
  for (const TensorView& tensor : tensors) {
    DYNMO_CHECK(std::all_of(tensor.shape.begin(), tensor.shape.end(),
                            [](std::int64_t size) { return size >= 0; }) &&
                    bytes_of(tensor.dtype, tensor.shape) == tensor.bytes.size(),
                "the bytes of {} [{}] for tensor '{}', got {}", name(tensor.dtype),
                fmt::join(tensor.shape, ", "), tensor.name, tensor.bytes.size());
  }
  DYNMO_TRY(check_names(tensors, path.string()));
  const auto order = in_file_order(tensors);
  DYNMO_ASSIGN(const std::string header, make_header(order, metadata, path.string()));

  const std::array<std::uint64_t, 1> length = {header.size()};
  std::vector<std::span<const std::byte>> pieces = {std::as_bytes(std::span(length)),
                                                    std::as_bytes(std::span(header))};
  for (const TensorView* tensor : order) pieces.push_back(tensor->bytes);
  DYNMO_TRY(write_file_durably(path, pieces));
  Digester digester;
  WrittenFile written;
  for (const auto piece : pieces) {
    digester.update(piece);
    written.bytes += Bytes{static_cast<std::int64_t>(piece.size())};
  }
  written.digest = digester.digest();
  return written;
}

}  // namespace dynmo::checkpoint
