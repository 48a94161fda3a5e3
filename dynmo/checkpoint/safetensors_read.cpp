// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "dynmo/checkpoint/safetensors.h"
#include "dynmo/core/check.h"
#include "dynmo/core/files.h"

namespace dynmo::checkpoint {
namespace {

// JSON with sorted keys. The ordered objects of core/json.h search all keys for each one, which is
// too slow for a header with a million tensors.
using JsonTree = nlohmann::json;

Error fault(std::string_view origin, const std::string& what) {
  return make_error(ErrorCode::kBadInput, "{}: {}", origin, what);
}

// Stops at the first key that an object has twice, because nlohmann's tree would keep only one. Its
// parser callback would take quadratic time in the number of keys.
class DuplicateKeys final : public nlohmann::json_sax<JsonTree> {
 public:
  std::optional<std::string> twice;

  bool start_object(std::size_t) override { return keys_.emplace_back(), true; }
  bool end_object() override { return keys_.pop_back(), true; }
  bool key(std::string& key) override {
    if (keys_.back().insert(key).second) return true;
    twice = key;
    return false;
  }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(JsonTree::number_integer_t) override { return true; }
  bool number_unsigned(JsonTree::number_unsigned_t) override { return true; }
  bool number_float(JsonTree::number_float_t, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(JsonTree::binary_t&) override { return true; }
  bool start_array(std::size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override {
    return false;
  }

 private:
  std::vector<std::set<std::string>> keys_;  // by open object
};

Expected<JsonTree> parse_strictly(std::string_view text, std::string_view origin) {
  DuplicateKeys duplicates;
  const bool sound = JsonTree::sax_parse(text, &duplicates);
  if (duplicates.twice) {
    return fault(origin,
                 fmt::format("the header has {} twice", JsonTree(*duplicates.twice).dump()));
  }
  // Without the library's message: it may quote control characters of a damaged file.
  JsonTree json = sound ? JsonTree::parse(text, nullptr, /*allow_exceptions=*/false) : JsonTree();
  if (!json.is_object()) return fault(origin, "the header is not JSON");
  return json;
}

// Reads a list of whole numbers from 0 to 2^63 - 1.
std::optional<std::vector<std::int64_t>> read_numbers(const JsonTree& json) {
  std::vector<std::int64_t> numbers;
  if (!json.is_array()) return std::nullopt;
  for (const JsonTree& element : json) {
    if (!element.is_number_unsigned() || element.get<std::uint64_t>() >> 63 != 0) {
      return std::nullopt;
    }
    numbers.push_back(element.get<std::int64_t>());
  }
  return numbers;
}

struct Entry {
  TensorView tensor;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

Expected<Entry> read_entry(const std::string& name, const JsonTree& json, std::string_view origin) {
  const auto bad = [&](std::string_view what) {
    return fault(origin, fmt::format("tensor {} {}", JsonTree(name).dump(), what));
  };
  if (!json.is_object() || json.size() != 3 || !json.contains("dtype") || !json.contains("shape") ||
      !json.contains("data_offsets")) {
    return bad("does not have dtype, shape and data_offsets and nothing else");
  }
  const auto dtype =
      json["dtype"].is_string() ? parse_dtype(json["dtype"].get<std::string>()) : std::nullopt;
  if (!dtype) return bad("is of an unknown dtype");
  auto shape = read_numbers(json["shape"]);
  if (!shape) return bad("has a shape that is not of whole numbers");
  const auto offsets = read_numbers(json["data_offsets"]);
  if (!offsets || offsets->size() != 2) return bad("has data_offsets that are not two numbers");
  const auto size = bytes_of(*dtype, *shape);
  if (!size) return bad("has a shape that overflows or is no whole number of bytes");
  Entry entry;
  entry.begin = static_cast<std::uint64_t>((*offsets)[0]);
  entry.end = static_cast<std::uint64_t>((*offsets)[1]);
  if (entry.end < entry.begin || entry.end - entry.begin != *size) {
    return bad(fmt::format("needs {} bytes, its data_offsets are {} and {}", *size, entry.begin,
                           entry.end));
  }
  entry.tensor = {.name = name, .dtype = *dtype, .shape = std::move(*shape), .bytes = {}};
  return entry;
}

Expected<Metadata> read_metadata(const JsonTree& json, std::string_view origin) {
  Metadata metadata;
  if (!json.is_object()) return fault(origin, "__metadata__ is not an object");
  for (const auto& [key, value] : json.items()) {
    if (!value.is_string()) return fault(origin, "__metadata__ holds something other than strings");
    metadata[key] = value.get<std::string>();
  }
  return metadata;
}

// Sets the bytes of the tensors. Each byte of `data`, behind `header` bytes of the file, must
// belong to exactly one tensor.
Expected<void> place(std::vector<Entry>& entries, std::span<const std::byte> data,
                     std::uint64_t header, std::string_view origin) {
  std::uint64_t wanted = 0;
  for (const Entry& entry : entries) wanted = std::max(wanted, entry.end);
  if (wanted > data.size()) {
    return fault(origin, fmt::format("truncated: {} bytes are there, wanted {} by its header",
                                     header + data.size(), header + wanted));
  }
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  std::uint64_t position = 0;
  for (Entry& entry : entries) {
    if (entry.begin != position) {
      return fault(origin,
                   fmt::format("tensor {} has bytes {} to {} of {}, wanted it to begin at {}",
                               JsonTree(entry.tensor.name).dump(), entry.begin, entry.end,
                               data.size(), position));
    }
    entry.tensor.bytes = data.subspan(entry.begin, entry.end - entry.begin);
    position = entry.end;
  }
  if (position != data.size()) {
    return fault(origin, fmt::format("the tensors end at byte {} of {}", position, data.size()));
  }
  return {};
}

}  // namespace

Expected<Safetensors> Safetensors::parse(std::span<const std::byte> bytes,
                                         std::string_view origin) {
  std::uint64_t length = 0;
  const std::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  // A valid header length may look like another format, so this is asked only for invalid ones.
  const auto not_one = [&](const std::string& what) {
    const std::string other = known_content(all);
    return fault(origin, other.empty() ? what : "not a safetensors file but " + other);
  };
  if (bytes.size() < sizeof length) {
    return not_one(
        fmt::format("{} bytes are there, a safetensors file has at least the {} of "
                    "its header's length",
                    bytes.size(), sizeof length));
  }
  std::memcpy(&length, bytes.data(), sizeof length);
  const auto rest = bytes.subspan(sizeof length);
  if (length > kMaxHeader) {
    return not_one(
        fmt::format("not a safetensors file: its header would have {} bytes, the format allows {}",
                    length, kMaxHeader));
  }
  if (length > rest.size()) {
    return fault(origin, fmt::format("truncated: {} bytes are there, its header alone takes {}",
                                     bytes.size(), sizeof length + length));
  }
  const std::string_view text(reinterpret_cast<const char*>(rest.data()), length);
  if (!text.starts_with('{')) return not_one("the header does not begin with {");
  DYNMO_ASSIGN(const JsonTree header, parse_strictly(text, origin));

  Safetensors file;
  file.bytes_ = bytes;
  std::vector<Entry> entries;
  for (const auto& [name, json] : header.items()) {
    if (name == kMetadataKey) {
      DYNMO_ASSIGN(file.metadata_, read_metadata(json, origin));
    } else {
      DYNMO_ASSIGN(Entry entry, read_entry(name, json, origin));
      entries.push_back(std::move(entry));
    }
  }
  DYNMO_TRY(place(entries, rest.subspan(length), sizeof length + length, origin));
  for (Entry& entry : entries) file.tensors_.push_back(std::move(entry.tensor));
  return file;
}

Expected<Safetensors> Safetensors::open(const std::filesystem::path& path, const Check& check) {
  DYNMO_ASSIGN(auto mapped, data::MappedFile::open(path));
  if (check) DYNMO_TRY(check(mapped->bytes()));
  DYNMO_ASSIGN(Safetensors file, parse(mapped->bytes(), path.string()));
  file.file_ = std::move(mapped);
  return file;
}

const TensorView* Safetensors::find(std::string_view name) const {
  const auto found = std::find_if(tensors_.begin(), tensors_.end(),
                                  [&](const TensorView& tensor) { return tensor.name == name; });
  return found == tensors_.end() ? nullptr : &*found;
}

namespace {

// Returns the first place and the number of NaN and Inf, whose exponents have all bits set, or
// nullopt. Elements are copied, because the bytes of a tensor need not be aligned.
template <typename Bits>
std::optional<NotFinite> find(std::span<const std::byte> bytes, Bits exponent) {
  std::array<Bits, 4096> piece;
  NotFinite found;
  const std::size_t elements = bytes.size() / sizeof(Bits);
  for (std::size_t first = 0; first < elements; first += piece.size()) {
    const std::size_t some = std::min(piece.size(), elements - first);
    std::memcpy(piece.data(), bytes.data() + first * sizeof(Bits), some * sizeof(Bits));
    const auto is_not_finite = [&](Bits bits) { return (bits & exponent) == exponent; };
    const auto begin = piece.begin();
    const auto end = begin + static_cast<std::ptrdiff_t>(some);
    const auto count = std::count_if(begin, end, is_not_finite);
    if (count == 0) continue;
    if (found.count == 0) {
      found.first =
          static_cast<std::int64_t>(first) + (std::find_if(begin, end, is_not_finite) - begin);
    }
    found.count += count;
  }
  if (found.count == 0) return std::nullopt;
  return found;
}

}  // namespace

std::optional<NotFinite> find_not_finite(const TensorView& tensor) {
  switch (tensor.dtype) {
    case DType::kF32:
      return find<std::uint32_t>(tensor.bytes, 0x7F800000);
    case DType::kF16:
      return find<std::uint16_t>(tensor.bytes, 0x7C00);
    case DType::kBF16:
      return find<std::uint16_t>(tensor.bytes, 0x7F80);
    default:
      DYNMO_CHECK(false, "F32, F16 or BF16, got {}", name(tensor.dtype));
  }
  return std::nullopt;
}

}  // namespace dynmo::checkpoint
