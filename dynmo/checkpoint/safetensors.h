// SPDX-License-Identifier: Apache-2.0
#pragma once

// The safetensors format: an 8-byte header length, a JSON header, and the tensors without gaps.
// Files have the bytes that the reference implementation writes, and all of its rules are checked
// on reading. So any tool of the field opens our checkpoints, and a damaged file is an error, not a
// wrong model.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/digest.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/data/mapped_file.h"

namespace dynmo::checkpoint {

// The types, in ascending alignment. A file has the tensors of the last type first.
enum class DType : std::uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};
[[nodiscard]] std::string_view name(DType dtype);  // "F32"
[[nodiscard]] std::optional<DType> parse_dtype(std::string_view name);
[[nodiscard]] int bits(DType dtype);  // of an element: 4, 6, 8, 16, 32 or 64

// A tensor that another object owns: row-major, contiguous. An empty shape is a scalar.
struct TensorView {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

using Metadata = std::map<std::string, std::string>;

// Returns the number of bytes of a tensor, or nullopt if it overflows or is not whole. Requires
// shape >= 0.
[[nodiscard]] std::optional<std::uint64_t> bytes_of(DType dtype,
                                                    std::span<const std::int64_t> shape);

struct WrittenFile {
  Bytes bytes;
  Digest digest;  // of all bytes as they were handed to the system
};

// Writes a file durably: after a crash there is the old file or the new one. The tensors may come
// in any order, and none is copied. Requires each tensor's bytes to be those of its shape.
//
// Returns kBadInput if the disk fails, or the header is above 100,000,000 bytes. Also returns it if
// a name is not UTF-8, is "__metadata__", or occurs twice.
[[nodiscard]] Expected<WrittenFile> write_safetensors(const std::filesystem::path& path,
                                                      std::span<const TensorView> tensors,
                                                      const Metadata& metadata = {});

// An opened file. The tensors' bytes are in a shared read-only mapping, which lives as long as a
// copy of this value. Any number of threads may read.
class Safetensors {
 public:
  // Opens a file. Calls `check`, if given, with the bytes before they are parsed, and returns its
  // error. Fails with kBadInput, which names the file, the tensor and the broken rule.
  using Check = std::function<Expected<void>(std::span<const std::byte>)>;
  [[nodiscard]] static Expected<Safetensors> open(const std::filesystem::path& path,
                                                  const Check& check = {});
  // Like open(), for bytes that the caller keeps alive. `origin` names them in messages.
  [[nodiscard]] static Expected<Safetensors> parse(std::span<const std::byte> bytes,
                                                   std::string_view origin);

  [[nodiscard]] const std::vector<TensorView>& tensors() const { return tensors_; }  // file order
  [[nodiscard]] const Metadata& metadata() const { return metadata_; }
  [[nodiscard]] const TensorView* find(std::string_view name) const;  // null if there is none
  // Returns the bytes of the whole file.
  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::shared_ptr<const data::MappedFile> file_;  // null if parsed from the caller's bytes
  std::span<const std::byte> bytes_;
  std::vector<TensorView> tensors_;
  Metadata metadata_;
};

inline constexpr std::string_view kMetadataKey = "__metadata__";
inline constexpr std::uint64_t kMaxHeader = 100'000'000;  // bytes

// NaN and Inf in a tensor. A damaged model is refused with the tensor's name, instead of giving
// meaningless text and losses.
struct NotFinite {
  std::int64_t first = 0;  // index of the first such element
  std::int64_t count = 0;
};
// Reads the whole tensor. Returns nullopt if all its elements are finite. Requires F32, F16 or
// BF16.
[[nodiscard]] std::optional<NotFinite> find_not_finite(const TensorView& tensor);

}  // namespace dynmo::checkpoint
