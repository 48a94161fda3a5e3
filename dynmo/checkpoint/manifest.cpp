// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/checkpoint/manifest_impl.h"
#include "dynmo/core/check.h"
#include "dynmo/core/fields.h"
#include "dynmo/core/files.h"

namespace dynmo::checkpoint {
namespace {

constexpr std::string_view kFormat = "dynmo-checkpoint-1";
constexpr std::string_view kEntriesFormat = "dynmo-checkpoint-entries-1";
constexpr const char* kDigestKey = "digest";

constexpr Limits kLayer{.min = 0, .wanted = "a layer"};

struct Entries {
  std::vector<FileEntry> files;
};
void list_fields(IsA<Entries> auto& entries, auto& visit) {
  visit.format(kEntriesFormat);
  visit("files", entries.files);
}

// Returns the digest of a manifest without its own `digest`. Parsing and dumping again gives the
// same text, so the digest does not depend on white space.
std::string digest_text(const Json& json) { return digest_of(json.dump()).hex(); }

}  // namespace

void list_fields(IsA<FileEntry> auto& entry, auto& visit) {
  visit("layer", entry.layer, kLayer);
  visit("file", entry.file);
  visit("bytes", entry.bytes);
  visit("digest", entry.digest);
}

std::string encode_entries(std::span<const FileEntry> entries) {
  return write_list(Entries{{entries.begin(), entries.end()}}).dump();
}

Expected<std::vector<FileEntry>> decode_entries(std::string_view text) {
  const std::string origin = "checkpoint entries of a rank";
  DYNMO_ASSIGN(const Json json, parse_json(text, origin));
  DYNMO_ASSIGN(Entries entries, parse_fields<Entries>(json, origin));
  return std::move(entries.files);
}

Expected<void> check_entries(const std::vector<FileEntry>& entries, const std::string& origin) {
  if (entries.empty()) {
    return make_error(ErrorCode::kBadInput, "{}: no layers, wanted the file of each", origin);
  }
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const LayerId expected(static_cast<std::int32_t>(i));
    if (entries[i].layer != expected) {
      return make_error(
          ErrorCode::kBadInput,
          "{}: file {} of {} is of layer {}, wanted layer {}: one is missing or there "
          "twice",
          origin, i, entries.size(), entries[i].layer, expected);
    }
    if (entries[i].file != layer_file_name(expected)) {
      return make_error(ErrorCode::kBadInput, "{}: layer {} is in '{}', wanted '{}'", origin,
                        expected, entries[i].file, layer_file_name(expected));
    }
  }
  return {};
}

Expected<std::string> encode_manifest(const Manifest& manifest) {
  Json json = {{"format", kFormat},
               {"step", manifest.step},
               {"files", dynmo::internal::written(manifest.files)},
               {"state", manifest.state}};
  try {
    json[kDigestKey] = digest_text(json);
    return json.dump(1) + "\n";
  } catch (const Json::exception&) {
    return make_error(ErrorCode::kBadInput,
                      "the state of step {} holds text that is not UTF-8: a checkpoint's manifest "
                      "cannot hold it",
                      manifest.step);
  }
}

Expected<Manifest> read_manifest(const std::filesystem::path& checkpoint) {
  const std::filesystem::path path = checkpoint / kManifestName;
  DYNMO_ASSIGN(Json json, read_json(path));
  JsonObject root(json, path.string());
  root.expect_format(kFormat);
  Manifest manifest;
  manifest.step = root.integer("step");
  if (manifest.step < 0) root.fail("step", "is negative");
  const std::string digest = root.string(kDigestKey);
  root.ignore("state");
  FieldReader{root}("files", manifest.files);
  DYNMO_TRY(root.finish());
  DYNMO_TRY(check_entries(manifest.files, path.string()));
  if (!json.contains("state") || !json["state"].is_object()) {
    return make_error(ErrorCode::kBadInput, "{}: /state is missing or no object", path.string());
  }
  json.erase(kDigestKey);
  if (digest_text(json) != digest) {
    return make_error(ErrorCode::kBadInput, "{}: its content does not have its digest {}",
                      path.string(), digest);
  }
  manifest.state = std::move(json["state"]);
  return manifest;
}

}  // namespace dynmo::checkpoint
