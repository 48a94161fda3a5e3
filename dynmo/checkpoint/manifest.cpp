// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/checkpoint/manifest_impl.h"
#include "dynmo/core/check.h"
#include "dynmo/core/files.h"

namespace dynmo::checkpoint {
namespace {

constexpr std::string_view kFormat = "dynmo-checkpoint-1";
constexpr std::string_view kEntriesFormat = "dynmo-checkpoint-entries-1";
constexpr const char* kDigestKey = "digest";

Json to_json(std::span<const FileEntry> entries) {
  Json files = Json::array();
  for (const FileEntry& entry : entries) {
    files.push_back({{"layer", entry.layer.value},
                     {"file", entry.file},
                     {"bytes", entry.bytes.value},
                     {"digest", entry.digest.hex()}});
  }
  return files;
}

Expected<std::vector<FileEntry>> read_entries(JsonObject& root) {
  std::vector<FileEntry> entries;
  for (JsonObject& object : root.objects("files")) {
    FileEntry entry;
    const std::int64_t layer = object.integer("layer");
    if (layer < 0 || layer > std::numeric_limits<std::int32_t>::max()) {
      object.fail("layer", fmt::format("is {}, wanted a layer", layer));
    } else {
      entry.layer = LayerId(static_cast<std::int32_t>(layer));
    }
    entry.file = object.string("file");
    entry.bytes = object.bytes("bytes");
    const auto digest = parse_digest(object.string("digest"));
    if (!digest) object.fail("digest", "is not a digest, wanted 32 hexadecimal digits");
    entry.digest = digest.value_or(Digest{});
    DYNMO_TRY(object.finish());
    entries.push_back(std::move(entry));
  }
  return entries;
}

// The digest covers the manifest without its own `digest`. Dumping what was parsed gives the text
// that was dumped, so the digest does not depend on white space.
std::string digest_text(const Json& json) { return digest_of(json.dump()).hex(); }

}  // namespace

std::string encode_entries(std::span<const FileEntry> entries) {
  return Json{{"format", kEntriesFormat}, {"files", to_json(entries)}}.dump();
}

Expected<std::vector<FileEntry>> decode_entries(std::string_view text) {
  const std::string origin = "checkpoint entries of a rank";
  DYNMO_ASSIGN(const Json json, parse_json(text, origin));
  JsonObject root(json, origin);
  root.expect_format(kEntriesFormat);
  DYNMO_ASSIGN(auto entries, read_entries(root));
  DYNMO_TRY(root.finish());
  return entries;
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
               {"files", to_json(manifest.files)},
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
  DYNMO_ASSIGN(manifest.files, read_entries(root));
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
