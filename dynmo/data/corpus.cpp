// SPDX-License-Identifier: Apache-2.0
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "dynmo/core/ordered_tasks.h"
#include "dynmo/data/corpus_impl.h"

namespace dynmo::data {
namespace {

namespace fs = std::filesystem;

constexpr std::array<std::string_view, 2> kDecoded = {".gz", ".zst"};
constexpr std::array<std::string_view, 4> kCompressed = {".bz2", ".xz", ".zip", ".7z"};

// Ignores the case of ASCII letters.
bool has_ending(std::string_view name, std::string_view ending) {
  const auto lower = [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  };
  return name.size() >= ending.size() &&
         std::ranges::equal(name.substr(name.size() - ending.size()), ending,
                            [&](char a, char b) { return lower(a) == lower(b); });
}

bool ends_with_any(const std::string& name, const std::vector<std::string>& endings) {
  return std::any_of(endings.begin(), endings.end(),
                     [&](const std::string& ending) { return has_ending(name, ending); });
}

// Returns `name` without the first of the endings that it has, or `name` itself if it has none.
std::string without_ending(const std::string& name, std::span<const std::string_view> endings) {
  for (const auto ending : endings) {
    if (has_ending(name, ending)) return name.substr(0, name.size() - ending.size());
  }
  return name;
}

// Returns the name of the text in a file. The content decides whether the file is compressed.
std::string name_of_text(const std::string& name) { return without_ending(name, kDecoded); }

class Listing {
 public:
  explicit Listing(const std::vector<std::string>& endings) : endings_(endings) {}
  Expected<void> take_path(const fs::path& path);
  Corpus finish() { return std::move(corpus_); }

 private:
  Expected<void> take_folder(const fs::path& folder, const std::string& prefix);
  Expected<void> take_entry(const fs::directory_entry& entry, const std::string& name);
  Expected<void> take_file(const fs::path& path, const std::string& name);

  const std::vector<std::string>& endings_;
  Corpus corpus_;
  std::set<std::pair<dev_t, ino_t>> taken_;
};

Expected<void> Listing::take_path(const fs::path& path) {
  std::error_code fault;
  const fs::file_status status = fs::status(path, fault);
  if (fs::is_directory(status)) return take_folder(path, "");
  if (!fs::is_regular_file(status)) {
    return make_error(ErrorCode::kBadInput, "'{}' is neither a file nor a folder: {}",
                      path.string(), fault ? fault.message() : "wanted files or folders of text");
  }
  if (without_ending(path.string(), kCompressed) != path.string()) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' is a compressed file, wanted text or JSON lines, plain or compressed "
                      "by gzip or zstd: decompress it first",
                      path.string());
  }
  return take_file(path, name_of_text(path.filename().string()));
}

// Lists a folder. `prefix` is its name relative to the given path, "" or with a slash at the end.
Expected<void> Listing::take_folder(const fs::path& folder, const std::string& prefix) {
  std::error_code fault;
  struct Entry {
    fs::directory_entry found;
    std::string name;  // of the text, if it is a file
  };
  std::vector<Entry> entries;
  fs::directory_iterator next(folder, fault);
  for (; !fault && next != fs::directory_iterator(); next.increment(fault)) {
    std::error_code unknown;
    const std::string name = next->path().filename().string();
    entries.push_back({*next, next->is_directory(unknown) ? name : name_of_text(name)});
  }
  if (fault) {
    return make_error(ErrorCode::kBadInput, "cannot read folder '{}': {}", folder.string(),
                      fault.message());
  }
  // The order of a folder is the file system's; sorted, it is the same everywhere.
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.name, a.found.path()) < std::pair(b.name, b.found.path());
  });
  for (const Entry& entry : entries) {
    if (!entry.name.starts_with('.')) DYNMO_TRY(take_entry(entry.found, prefix + entry.name));
  }
  return {};
}

Expected<void> Listing::take_entry(const fs::directory_entry& entry, const std::string& name) {
  std::error_code fault;
  const bool link = entry.is_symlink(fault);
  // Links to folders are not followed, so there are no loops, and a document has one name.
  if (!link && entry.is_directory(fault)) return take_folder(entry.path(), name + "/");
  if (!entry.is_regular_file(fault)) {
    ++corpus_.skipped.skipped_other;
    return {};
  }
  if (!ends_with_any(name, endings_)) {
    const bool compressed = ends_with_any(without_ending(name, kCompressed), endings_);
    ++(compressed ? corpus_.skipped.skipped_compressed : corpus_.skipped.skipped_ending);
    return {};
  }
  return take_file(entry.path(), name);
}

Expected<void> Listing::take_file(const fs::path& path, const std::string& name) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    return make_error(ErrorCode::kBadInput, "cannot read '{}'", path.string());
  }
  if (!taken_.emplace(status.st_dev, status.st_ino).second) {
    ++corpus_.skipped.skipped_twice;
    return {};
  }
  corpus_.files.push_back({.path = path, .name = name, .bytes = status.st_size});
  corpus_.bytes += status.st_size;
  return {};
}

}  // namespace

bool CorpusFile::is_named_json_lines() const {
  return has_ending(name, ".jsonl") || has_ending(name, ".ndjson") ||
         has_ending(name, ".jsonlines");
}

bool CorpusFile::is_named_json() const { return has_ending(name, ".json"); }

Expected<Corpus> list_corpus(std::span<const fs::path> paths,
                             const std::vector<std::string>& endings) {
  Listing listing(endings);
  for (const auto& path : paths) DYNMO_TRY(listing.take_path(path));
  return listing.finish();
}

namespace {

// Returns the bytes of the text in a file. Reads all of it if it is compressed.
Expected<std::int64_t> text_bytes(const CorpusFile& file) {
  DYNMO_ASSIGN(TextStream stream, TextStream::open(file.path));
  if (stream.compression() == Compression::kNone) return file.bytes;
  std::array<char, 65536> piece;
  std::int64_t bytes = 0;
  while (true) {
    DYNMO_ASSIGN(const std::size_t count, stream.read(piece));
    bytes += static_cast<std::int64_t>(count);
    if (count < piece.size()) return bytes;
  }
}

}  // namespace

Expected<void> measure_text(Corpus& corpus, int jobs,
                            const std::function<void(std::int64_t)>& read) {
  OrderedTasks<Expected<std::int64_t>> tasks(jobs);
  std::int64_t looked_at = 0;
  corpus.bytes = 0;
  auto oldest = corpus.files.begin();
  const auto take_oldest = [&]() -> Expected<void> {
    DYNMO_ASSIGN(const std::int64_t bytes, tasks.take());
    looked_at += std::exchange(oldest->bytes, bytes);
    corpus.bytes += bytes;
    ++oldest;
    read(looked_at);
    return {};
  };
  for (const CorpusFile& file : corpus.files) {
    if (tasks.full()) DYNMO_TRY(take_oldest());
    tasks.add([&file] { return text_bytes(file); });
  }
  while (!tasks.empty()) DYNMO_TRY(take_oldest());
  return {};
}

}  // namespace dynmo::data
