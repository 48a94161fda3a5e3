// SPDX-License-Identifier: Apache-2.0
#include "dynmo/checkpoint/masks.h"

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/checkpoint/safetensors.h"
#include "dynmo/core/bit_mask.h"

namespace dynmo::checkpoint {
namespace {

Expected<Mask> read_mask(const TensorView& bits, const Safetensors& file,
                         const std::filesystem::path& path) {
  const std::string name = bits.name.substr(std::string_view(kMask).size());
  const TensorView* matrix = file.find(name);
  if (matrix == nullptr || matrix->shape.size() != 2) {
    return make_error(ErrorCode::kBadInput, "{}: tensor '{}' is the mask of no matrix",
                      path.string(), bits.name);
  }
  const std::int64_t columns = matrix->shape[1];
  const std::span bytes(reinterpret_cast<const std::uint8_t*>(bits.bytes.data()),
                        bits.bytes.size());
  const auto offsets = unpack_mask(bytes, matrix->shape[0] * columns);
  if (!offsets) {
    return make_error(ErrorCode::kBadInput, "{}: tensor '{}': {}", path.string(), bits.name,
                      offsets.error().message);
  }
  Mask mask{.name = name,
            .places = {.sizes = {static_cast<std::uint64_t>(matrix->shape[0]),
                                 static_cast<std::uint64_t>(columns)},
                       .names = {"row", "column"},
                       .indices = {{}, {}}}};
  for (const std::int32_t offset : *offsets) {
    mask.places.indices[0].push_back(static_cast<std::uint32_t>(offset / columns));
    mask.places.indices[1].push_back(static_cast<std::uint32_t>(offset % columns));
  }
  return mask;
}

}  // namespace

Expected<std::vector<Mask>> read_masks(const std::filesystem::path& checkpoint) {
  DYNMO_ASSIGN(const Manifest manifest, read_manifest(checkpoint));
  std::vector<Mask> masks;
  for (const FileEntry& entry : manifest.files) {
    const std::filesystem::path path = checkpoint / entry.file;
    DYNMO_ASSIGN(const Safetensors file, Safetensors::open(path));
    for (const TensorView& tensor : file.tensors()) {
      if (!tensor.name.starts_with(kMask)) continue;
      // A bias loses the units that its matrix loses.
      const TensorView* of = file.find(tensor.name.substr(std::string_view(kMask).size()));
      if (of != nullptr && of->shape.size() == 1) continue;
      DYNMO_ASSIGN(Mask mask, read_mask(tensor, file, path));
      masks.push_back(std::move(mask));
    }
  }
  return masks;
}

}  // namespace dynmo::checkpoint
