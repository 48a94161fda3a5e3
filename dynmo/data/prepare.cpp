// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/prepare.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <set>
#include <utility>

#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/data/dataset.h"
#include "dynmo/data/tokenizer.h"

namespace dynmo::data {
namespace {

namespace fs = std::filesystem;

bool ends_with_any(const std::string& name, const std::vector<std::string>& endings) {
  return std::any_of(endings.begin(), endings.end(),
                     [&](const std::string& ending) { return name.ends_with(ending); });
}

// The same for a document whatever else is prepared with it. `name` is relative to what the user
// gave, so that moving the corpus changes nothing either.
bool is_held_out(std::uint64_t seed, const std::string& name, double share) {
  const Digest digest = digest_of(fmt::format("{}\n{}", seed, name));
  return static_cast<double>(digest.high >> 11) * 0x1p-53 < share;
}

Expected<void> check_options(std::span<const fs::path> paths, const PrepareOptions& options) {
  if (paths.empty()) {
    return make_error(ErrorCode::kBadInput, "no paths to prepare: give files or folders of text");
  }
  if (!(options.validation >= 0 && options.validation < 1)) {
    return make_error(ErrorCode::kBadInput,
                      "validation share {} is out of range, wanted 0 or more and below 1",
                      options.validation);
  }
  for (const std::string& ending : options.endings) {
    if (ending.size() < 2 || ending.front() != '.') {
      return make_error(ErrorCode::kBadInput, "ending '{}' is none, wanted one such as '.txt'",
                        ending);
    }
  }
  return {};
}

constexpr std::size_t kTrain = 0;
constexpr std::size_t kValidation = 1;

// One run over the paths.
class Preparation {
 public:
  explicit Preparation(const PrepareOptions& options) : options_(options) {}

  Expected<void> open_writers();
  Expected<void> take_path(const fs::path& path);
  Expected<PrepareReport> finish();

 private:
  Expected<void> take_folder(const fs::path& folder, const std::string& prefix);
  Expected<void> take_entry(const fs::directory_entry& entry, const std::string& name);
  Expected<void> take_file(const fs::path& path, const std::string& name);
  Expected<void> take_text(std::ifstream& file, const fs::path& path, const std::string& name);
  Expected<void> take_json_lines(std::ifstream& file, const fs::path& path,
                                 const std::string& name);
  [[nodiscard]] std::size_t split_of(const std::string& name) const;
  Expected<void> append(std::size_t split, std::string_view text);
  Expected<void> end_document(std::size_t split);

  const PrepareOptions& options_;
  PrepareReport report_;
  std::vector<TokenShardWriter> writers_;  // kTrain, kValidation
  std::array<std::int64_t, 2> documents_{};
  std::set<std::pair<dev_t, ino_t>> taken_;
  std::vector<std::uint16_t> tokens_;
  PrepareProgress progress_;
  PrepareProgress told_;
};

Expected<void> Preparation::open_writers() {
  DYNMO_TRY(make_directories(options_.out));
  for (const char* name : {"train", "validation"}) {
    DYNMO_ASSIGN(TokenShardWriter writer, TokenShardWriter::create(options_.out / name));
    writers_.push_back(std::move(writer));
  }
  return {};
}

Expected<void> Preparation::take_path(const fs::path& path) {
  std::error_code fault;
  const fs::file_status status = fs::status(path, fault);
  if (fs::is_directory(status)) return take_folder(path, "");
  if (fs::is_regular_file(status)) return take_file(path, path.filename().string());
  return make_error(ErrorCode::kBadInput, "'{}' is neither a file nor a folder: {}", path.string(),
                    fault ? fault.message() : "wanted files or folders of text");
}

// `prefix` is the folder's name relative to what the user gave, "" or ending in a slash.
Expected<void> Preparation::take_folder(const fs::path& folder, const std::string& prefix) {
  std::error_code fault;
  std::vector<fs::directory_entry> entries;
  fs::directory_iterator next(folder, fault);
  for (; !fault && next != fs::directory_iterator(); next.increment(fault)) {
    entries.push_back(*next);
  }
  if (fault) {
    return make_error(ErrorCode::kBadInput, "cannot read folder '{}': {}", folder.string(),
                      fault.message());
  }
  // The order of a folder is the file system's; sorted, it is the same everywhere.
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return a.path().filename().native() < b.path().filename().native();
  });
  for (const auto& entry : entries) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with('.')) DYNMO_TRY(take_entry(entry, prefix + name));
  }
  return {};
}

Expected<void> Preparation::take_entry(const fs::directory_entry& entry, const std::string& name) {
  std::error_code fault;
  const bool link = entry.is_symlink(fault);
  // Links to folders are not followed: no loops, and one name a document.
  if (!link && entry.is_directory(fault)) return take_folder(entry.path(), name + "/");
  if (!entry.is_regular_file(fault)) {
    ++report_.skipped_other;
    return {};
  }
  if (!ends_with_any(name, options_.endings)) {
    ++report_.skipped_ending;
    return {};
  }
  return take_file(entry.path(), name);
}

Expected<void> Preparation::take_file(const fs::path& path, const std::string& name) {
  struct stat status {};
  std::ifstream file(path, std::ios::binary);
  if (!file || ::stat(path.c_str(), &status) != 0) {
    return make_error(ErrorCode::kBadInput, "cannot read '{}'", path.string());
  }
  if (!taken_.emplace(status.st_dev, status.st_ino).second) {
    ++report_.skipped_twice;
    return {};
  }
  return name.ends_with(".jsonl") ? take_json_lines(file, path, name) : take_text(file, path, name);
}

// Two passes, so that memory does not grow with the file: is it text, then its tokens.
Expected<void> Preparation::take_text(std::ifstream& file, const fs::path& path,
                                      const std::string& name) {
  std::array<char, 65536> piece;
  const auto next = [&] {
    file.read(piece.data(), piece.size());
    return std::string_view(piece.data(), static_cast<std::size_t>(file.gcount()));
  };
  TextCheck check;
  std::int64_t bytes = 0;
  for (auto text = next(); !text.empty() && check.can_be_text(); text = next()) {
    check.feed(text);
    bytes += static_cast<std::int64_t>(text.size());
  }
  if (file.bad()) return make_error(ErrorCode::kBadInput, "cannot read '{}'", path.string());
  if (!check.is_text() || bytes == 0) {
    ++(bytes == 0 ? report_.skipped_empty : report_.skipped_binary);
    return {};
  }
  ++report_.files;
  file.clear();
  file.seekg(0);
  const std::size_t split = split_of(name);
  for (auto text = next(); !text.empty(); text = next()) DYNMO_TRY(append(split, text));
  if (file.bad()) return make_error(ErrorCode::kBadInput, "cannot read '{}'", path.string());
  return end_document(split);
}

Expected<void> Preparation::take_json_lines(std::ifstream& file, const fs::path& path,
                                            const std::string& name) {
  ++report_.files;
  std::string line;
  for (std::int64_t number = 1; std::getline(file, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string origin = fmt::format("{}:{}", path.string(), number);
    DYNMO_ASSIGN(const Json json, parse_json(line, origin));
    const auto text = json.is_object() ? json.find(options_.text_key) : json.end();
    if (text == json.end() || !text->is_string()) {
      return make_error(ErrorCode::kBadInput,
                        "{}: wanted an object with a string under '{}' (--text-key names another)",
                        origin, options_.text_key);
    }
    const auto& document = text->get_ref<const std::string&>();
    if (document.empty()) {
      ++report_.skipped_empty;
      continue;
    }
    const std::size_t split = split_of(fmt::format("{}:{}", name, number));
    DYNMO_TRY(append(split, document));
    DYNMO_TRY(end_document(split));
  }
  if (file.bad()) return make_error(ErrorCode::kBadInput, "cannot read '{}'", path.string());
  return {};
}

std::size_t Preparation::split_of(const std::string& name) const {
  return is_held_out(options_.seed, name, options_.validation) ? kValidation : kTrain;
}

Expected<void> Preparation::append(std::size_t split, std::string_view text) {
  tokens_.clear();
  encode_bytes(text, tokens_);
  progress_.tokens += static_cast<std::int64_t>(tokens_.size());
  return writers_[split].append(tokens_);
}

Expected<void> Preparation::end_document(std::size_t split) {
  DYNMO_TRY(writers_[split].append(std::array{static_cast<std::uint16_t>(kEndOfDocument)}));
  writers_[split].end_document();
  ++documents_[split];
  ++progress_.tokens;
  ++progress_.documents;
  progress_.files = report_.files;
  constexpr std::int64_t kTokensBetween = std::int64_t{1} << 20;
  constexpr std::int64_t kDocumentsBetween = 1024;
  if (options_.progress && (progress_.tokens - told_.tokens >= kTokensBetween ||
                            progress_.documents - told_.documents >= kDocumentsBetween)) {
    told_ = progress_;
    options_.progress(progress_);
  }
  return {};
}

Expected<PrepareReport> Preparation::finish() {
  if (progress_.documents == 0) {
    return make_error(ErrorCode::kBadInput,
                      "no text found: {} files of other endings, {} binary, {} empty; the endings "
                      "taken are {} (--endings)",
                      report_.skipped_ending, report_.skipped_binary, report_.skipped_empty,
                      fmt::join(options_.endings, ","));
  }
  if (documents_[kTrain] == 0) {
    return make_error(ErrorCode::kBadInput,
                      "all {} documents are held out: give more text, or less --validation than {}",
                      documents_[kValidation], options_.validation);
  }
  // A folder without dataset.json is no data set: from here until the new one is written.
  const fs::path description = options_.out / "dataset.json";
  std::error_code fault;
  if (fs::remove(description, fault)) DYNMO_TRY(sync_directory(options_.out));
  if (fault) {
    return make_error(ErrorCode::kBadInput, "cannot replace '{}': {}", description.string(),
                      fault.message());
  }
  DYNMO_ASSIGN(report_.train, writers_[kTrain].finish());
  DYNMO_ASSIGN(report_.validation, writers_[kValidation].finish());
  DYNMO_TRY(write_description(options_.out, {.tokenizer = std::string(kByteTokenizer),
                                             .vocabulary = kByteVocabulary,
                                             .end_of_document = kEndOfDocument,
                                             .seed = options_.seed,
                                             .validation_share = options_.validation,
                                             .train = report_.train,
                                             .validation = report_.validation}));
  return report_;
}

}  // namespace

std::vector<std::string> default_endings() {
  return {".txt", ".text", ".md", ".rst", ".tex", ".org",  ".jsonl", ".py", ".c",  ".h",  ".cc",
          ".cpp", ".hpp",  ".cu", ".rs",  ".go",  ".java", ".js",    ".ts", ".rb", ".sh", ".lua"};
}

Expected<PrepareReport> prepare(std::span<const std::filesystem::path> paths,
                                const PrepareOptions& options) {
  DYNMO_TRY(check_options(paths, options));
  Preparation preparation(options);
  DYNMO_TRY(preparation.open_writers());
  for (const auto& path : paths) DYNMO_TRY(preparation.take_path(path));
  return preparation.finish();
}

}  // namespace dynmo::data
