// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <utility>

#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/data/corpus_impl.h"
#include "dynmo/data/utf8.h"

namespace dynmo::data {
namespace {

constexpr std::size_t kLinesBytes = std::size_t{1} << 20;

constexpr std::string_view kBlank = " \t\r\n";
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

// Returns whether a line is an object with the text of a document.
bool has_document(std::string_view line, const std::string& text_key) {
  const auto json = parse_json(line, "");
  if (!json || !json->is_object()) return false;
  const auto text = json->find(text_key);
  return text != json->end() && text->is_string();
}

// Returns why `text`, the content of a file, is no text, or "" if it is.
std::string why_no_text(std::string_view text) {
  if (is_pointer_file(text)) return known_content(text);
  TextCheck check;
  check.feed(text);
  if (check.is_text()) return "";
  const std::string known = known_content(text);
  return known.empty() ? check.why_not() : known;
}

}  // namespace

Expected<bool> BlockReader::next(Block& block) {
  while (open_.left == 0 && open_.carried.empty()) {
    if (index_ == corpus_.files.size()) return false;
    DYNMO_ASSIGN(const bool whole, open());
    if (!whole) continue;
    block = {.kind = Block::Kind::kFile,
             .file = open_.file,
             .number = 0,
             .offset = 0,
             .last = true,
             .text = {}};
    DYNMO_TRY(read(block.text, kPieceBytes));
    open_.left = 0;
    return true;
  }
  block = {.kind = Block::Kind::kPiece,
           .file = open_.file,
           .number = 0,
           .offset = 0,
           .last = true,
           .text = {}};
  DYNMO_TRY(open_.lines ? next_lines(block) : next_piece(block));
  return true;
}

// Returns whether the next file is one block. Otherwise open_.left is 0 if it has nothing to read.
Expected<bool> BlockReader::open() {
  open_.file = &corpus_.files[index_++];
  DYNMO_ASSIGN(open_.stream, TextStream::open(open_.file->path));
  open_.left = open_.file->bytes;
  DYNMO_ASSIGN(open_.lines, is_json_lines());
  open_.number = open_.lines ? 1 : 0;
  open_.offset = 0;
  if (open_.lines) return false;
  if (open_.file->bytes <= static_cast<std::int64_t>(kPieceBytes)) return true;
  DYNMO_ASSIGN(std::string why, why_not_text());
  if (!why.empty()) {
    binary_.push_back({.file = open_.file, .why = std::move(why)});
    bytes_ += open_.left;
    open_.left = 0;
  }
  return false;
}

// Decides by the name, then by the first line, and goes back to the beginning.
Expected<bool> BlockReader::is_json_lines() {
  if (format_ != InputFormat::kAuto) return format_ == InputFormat::kJsonLines;
  if (open_.file->is_named_json_lines()) return true;
  DYNMO_ASSIGN(const std::string line, first_line());
  const bool object = line.starts_with('{');
  if (object && has_document(line, text_key_)) return true;
  if (!open_.file->is_named_json() || (!object && !line.starts_with('['))) return false;
  return make_error(ErrorCode::kBadInput,
                    "'{}' is JSON, but not of an object with a string under '{}' a line: wanted "
                    "JSON lines, another text key, or to take it for the text of one document",
                    open_.file->path.string(), text_key_);
}

// Returns the first line that is not blank, or only its beginning if it is no JSON, or "" if there
// is none.
Expected<std::string> BlockReader::first_line() {
  std::string line;
  std::array<char, 4096> piece;
  bool whole = false;
  while (!whole && line.size() <= kMaxLine) {
    DYNMO_ASSIGN(const std::size_t count, open_.stream.read(piece));
    if (count == 0) break;
    const std::string_view got(piece.data(), count);
    const bool begun = !line.empty();
    line += got;
    if (line.starts_with(kByteOrderMark)) line.erase(0, kByteOrderMark.size());
    line.erase(0, std::min(line.find_first_not_of(kBlank), line.size()));
    // Reads on only if the line begins as JSON. Searches each piece for its end once.
    whole = (!line.empty() && !line.starts_with('{')) ||
            (begun ? got : std::string_view(line)).find('\n') != std::string_view::npos;
  }
  DYNMO_ASSIGN(open_.stream, TextStream::open(open_.file->path));
  return line.substr(0, line.find('\n'));
}

// Reads the whole file and goes back to its beginning. Returns "" if it is text.
Expected<std::string> BlockReader::why_not_text() {
  TextCheck check;
  std::string known;
  std::array<char, 65536> piece;
  for (std::int64_t rest = open_.left; rest > 0 && check.can_be_text();) {
    const auto wanted = std::min(std::ssize(piece), static_cast<std::ptrdiff_t>(rest));
    DYNMO_ASSIGN(const std::size_t count,
                 open_.stream.read(std::span(piece).first(static_cast<std::size_t>(wanted))));
    if (count == 0) break;
    const std::string_view got(piece.data(), count);
    if (rest == open_.left) known = known_content(got);
    check.feed(got);
    rest -= static_cast<std::int64_t>(count);
  }
  DYNMO_ASSIGN(open_.stream, TextStream::open(open_.file->path));
  if (check.is_text()) return std::string();
  return known.empty() ? check.why_not() : known;
}

// Appends at most `max` bytes to `text`.
Expected<void> BlockReader::read(std::string& text, std::size_t max) {
  const std::size_t before = text.size();
  const auto wanted = std::min(max, static_cast<std::size_t>(open_.left));
  text.resize(before + wanted);
  DYNMO_ASSIGN(const std::size_t count, open_.stream.read(std::span(text).subspan(before)));
  text.resize(before + count);
  bytes_ += static_cast<std::int64_t>(count);
  open_.left =
      count < wanted ? 0 : open_.left - static_cast<std::int64_t>(count);  // 0: it has shrunk
  return {};
}

Expected<void> BlockReader::next_piece(Block& block) {
  block.number = open_.number++;
  block.offset = open_.offset;
  block.text = std::exchange(open_.carried, {});
  DYNMO_TRY(read(block.text, kPieceBytes - block.text.size()));
  block.last = open_.left == 0;
  if (block.last) return {};
  const std::size_t line = block.text.rfind('\n');
  const std::size_t cut =
      line == std::string::npos ? block.text.size() - incomplete_tail(block.text) : line + 1;
  open_.carried = block.text.substr(cut);
  block.text.resize(cut);
  open_.offset += static_cast<std::int64_t>(cut);
  return {};
}

Expected<void> BlockReader::next_lines(Block& block) {
  block.kind = Block::Kind::kLines;
  block.number = open_.number;
  block.text = std::exchange(open_.carried, {});
  std::size_t cut = 0;  // behind the last whole line; carried text has no line end
  while (open_.left > 0) {
    const std::size_t before = block.text.size();
    DYNMO_TRY(read(block.text, kLinesBytes));
    const std::size_t end = std::string_view(block.text).substr(before).rfind('\n');
    if (end != std::string_view::npos) {
      cut = before + end + 1;
      break;
    }
    if (block.text.size() > kMaxLine) {
      return make_error(ErrorCode::kBadInput,
                        "{}:{}: a line of more than {} MiB, wanted JSON lines: one object with a "
                        "document a line",
                        open_.file->path.string(), open_.number, kMaxLine >> 20);
    }
  }
  if (open_.left > 0) {
    open_.carried = block.text.substr(cut);
    block.text.resize(cut);
  }
  open_.number += std::count(block.text.begin(), block.text.end(), '\n');
  return {};
}

namespace {

Expected<void> take_lines(const Block& block, const std::string& text_key, BlockCounts& counts,
                          const std::function<void(const Document&)>& take) {
  if (block.number == 1) {
    ++counts.files;
    ++counts.json_lines;
    const bool named = block.file->is_named_json_lines();
    if (!named && counts.first_by_content == nullptr) counts.first_by_content = block.file;
  }
  std::string_view text = block.text;
  if (block.number == 1 && text.starts_with(kByteOrderMark)) {
    text.remove_prefix(kByteOrderMark.size());
  }
  for (std::int64_t number = block.number; !text.empty(); ++number) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string origin = fmt::format("{}:{}", block.file->path.string(), number);
    const auto parsed = parse_json(line, origin);
    if (!parsed) {
      TextCheck check;
      check.feed(line);
      if (check.is_text() && block.file->is_named_json_lines()) return parsed.error();
      if (check.is_text()) {
        return make_error(ErrorCode::kBadInput,
                          "{}; the first line of this file is one of JSON lines: wanted all so, or "
                          "to take it for the text of one document",
                          parsed.error().message);
      }
      return make_error(ErrorCode::kBadInput, "{}: damaged text, wanted JSON in UTF-8", origin);
    }
    const Json& json = *parsed;
    const auto found = json.is_object() ? json.find(text_key) : json.end();
    if (found == json.end() || !found->is_string()) {
      return make_error(ErrorCode::kBadInput,
                        "{}: wanted an object with a string under '{}', the text key", origin,
                        text_key);
    }
    const auto& document = found->get_ref<const std::string&>();
    if (document.empty()) {
      ++counts.empty;
      continue;
    }
    const std::string name = fmt::format("{}:{}", block.file->name, number);
    ++counts.documents;
    // Cuts a long document as next_piece() cuts a file.
    std::string_view rest = document;
    for (std::int64_t piece = 0; !rest.empty(); ++piece) {
      std::size_t cut = rest.size();
      if (cut > kPieceBytes) {
        const std::string_view longest = rest.substr(0, kPieceBytes);
        const std::size_t end = longest.rfind('\n');
        cut = end == std::string_view::npos ? longest.size() - incomplete_tail(longest) : end + 1;
      }
      take({.text = rest.substr(0, cut),
            .name = name,
            .piece = piece,
            .offset = std::ssize(document) - std::ssize(rest),
            .last = cut == rest.size(),
            .file = block.file});
      rest.remove_prefix(cut);
    }
  }
  return {};
}

}  // namespace

Expected<BlockCounts> for_each_document(std::span<const Block> blocks, const std::string& text_key,
                                        const std::function<void(const Document&)>& take) {
  BlockCounts counts;
  for (const Block& block : blocks) {
    if (block.kind == Block::Kind::kLines) {
      DYNMO_TRY(take_lines(block, text_key, counts, take));
      continue;
    }
    if (block.text.empty()) {
      ++counts.empty;
      continue;
    }
    if (block.kind == Block::Kind::kFile) {
      std::string why = why_no_text(block.text);
      if (!why.empty()) {
        counts.binary.push_back({.file = block.file, .why = std::move(why)});
        continue;
      }
    }
    if (block.number == 0) ++counts.files;
    if (block.last) ++counts.documents;
    take({.text = block.text,
          .name = block.file->name,
          .piece = block.number,
          .offset = block.offset,
          .last = block.last,
          .file = block.file});
  }
  return counts;
}

}  // namespace dynmo::data
