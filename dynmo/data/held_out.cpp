// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <span>

#include "dynmo/core/digest.h"
#include "dynmo/data/held_out_impl.h"

namespace dynmo::data {
namespace {

// A document above this share of the text is not held out whole.
constexpr double kMaxWholeShare = 0.1;
// A corpus of fewer bytes is read completely to measure its text. For a larger one the bytes of its
// files are used. No line of JSON lines can be a tenth of that.
constexpr std::int64_t kReadThrough = std::int64_t{256} << 20;

// Returns a number in [0, 1) that depends only on the seed and the document's name. `name` is
// relative to the path that the user gave, so moving the corpus does not change it.
double place_of(std::uint64_t seed, std::string_view name) {
  const Digest digest = digest_of(fmt::format("{}\n{}", seed, name));
  return static_cast<double>(digest.high >> 11) * 0x1p-53;
}

bool begins_character(char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }

// Returns where to cut `text`: after a line that ends within `window` bytes from `from` on, else
// before the character at `from`. A first piece keeps at least one character before the cut. If it
// has only one, returns its size, so it is not cut.
std::size_t cut_of(std::string_view text, std::size_t from, std::size_t window, bool first) {
  const std::size_t line = text.find('\n', from == 0 ? 0 : from - 1);
  if (line != std::string_view::npos && line < from + window && line + 1 < text.size()) {
    return line + 1;
  }
  std::size_t cut = from;
  while (cut > 0 && !begins_character(text[cut])) --cut;
  if (cut > 0 || !first) return cut;
  for (++cut; cut < text.size() && !begins_character(text[cut]);) ++cut;
  return cut;
}

}  // namespace

bool HeldOut::is_drawn(const CorpusFile* file, std::string_view name) const {
  return place_of(seed_, name) < share_ && std::ranges::none_of(too_large_, [&](const Id& id) {
           return id.first == file && id.second == name;
         });
}

std::array<HeldOut::Part, 2> HeldOut::parts_of(const Document& document) const {
  std::array<Part, 2> parts;
  const auto all_in = [&](std::size_t split) {
    parts[split] = {document.text, document.last};
    return parts;
  };
  if (kind_ == HeldOutKind::kDrawn) {
    return all_in(is_drawn(document.file, document.name) ? kValidation : kTrain);
  }
  const bool chosen = document.file == file_ && document.name == name_;
  if (!chosen) return all_in(kTrain);
  if (kind_ == HeldOutKind::kDocument) return all_in(kValidation);
  const std::int64_t size = std::ssize(document.text);
  if (from_ < document.offset) return all_in(kValidation);
  if (from_ >= document.offset + size) return all_in(kTrain);
  const std::size_t cut = cut_of(document.text, static_cast<std::size_t>(from_ - document.offset),
                                 static_cast<std::size_t>(window_), document.offset == 0);
  if (cut == document.text.size()) return all_in(kTrain);
  parts[kTrain] = {document.text.substr(0, cut), true};
  parts[kValidation] = {document.text.substr(cut), document.last};
  return parts;
}

// Visits the documents in order, and keeps those that are held out if none is drawn.
class HeldOutChoice {
 public:
  HeldOutChoice(const PrepareOptions& options, std::int64_t bytes)
      : corpus_bytes_(bytes), max_share_(std::max(options.validation, kMaxWholeShare)) {
    held_out_.kind_ = HeldOutKind::kDrawn;
    held_out_.seed_ = options.seed;
    held_out_.share_ = options.validation;
  }

  void take(const Document& document) {
    if (document.piece == 0) current_ = {document.file, std::string(document.name), 0, 0};
    current_.bytes += std::ssize(document.text);
    if (!document.last) return;
    text_bytes_ += current_.bytes;
    if (current_.bytes > longest_.bytes) longest_ = current_;
    current_.place = place_of(held_out_.seed_, current_.name);
    if (current_.place < held_out_.share_) {
      take_drawn();
    } else {
      left_ = true;
    }
    take_candidate();
  }
  // Returns whether no more needs to be read, because what is drawn and what is left are known.
  [[nodiscard]] bool is_decided() const {
    return corpus_bytes_ > kReadThrough && left_ && smallest_drawn_ <= limit(corpus_bytes_);
  }

  [[nodiscard]] HeldOut made(std::span<const CorpusFile> files) {
    const std::int64_t most = limit(is_decided() ? corpus_bytes_ : text_bytes_);
    std::erase_if(drawn_, [&](const Candidate& one) { return one.bytes <= most; });
    if (is_decided()) add_large_files(files, most);
    for (const Candidate& one : drawn_) held_out_.too_large_.emplace_back(one.file, one.name);
    const bool drawn = smallest_drawn_ <= most;
    if (drawn && (left_ || !drawn_.empty())) return held_out_;
    const auto whole =
        std::ranges::find_if(candidates_, [&](const Candidate& one) { return one.bytes <= most; });
    if (whole != candidates_.end() && !drawn) return one(HeldOutKind::kDocument, *whole);
    if (longest_.bytes < 2) return one(HeldOutKind::kNothing, {});
    HeldOut end = one(HeldOutKind::kEnd, longest_);
    const auto bytes = static_cast<double>(longest_.bytes);
    const auto tail = static_cast<std::int64_t>(std::ceil(end.share_ * bytes));
    end.from_ = std::clamp<std::int64_t>(longest_.bytes - tail, 1, longest_.bytes - 1);
    end.window_ = (longest_.bytes - end.from_) / 2;
    return end;
  }

 private:
  struct Candidate {
    const CorpusFile* file = nullptr;
    std::string name;
    std::int64_t bytes = 0;
    double place = 0;
  };

  [[nodiscard]] std::int64_t limit(std::int64_t text) const {
    return static_cast<std::int64_t>(max_share_ * static_cast<double>(text));
  }

  // Keeps ten documents, because no more can be above a tenth of the text.
  void take_drawn() {
    constexpr std::size_t kMost = 10;
    smallest_drawn_ = std::min(smallest_drawn_, current_.bytes);
    const auto larger = [](const Candidate& a, const Candidate& b) { return a.bytes > b.bytes; };
    drawn_.insert(std::ranges::upper_bound(drawn_, current_, larger), current_);
    if (drawn_.size() > kMost) drawn_.pop_back();
  }

  // Collects the documents that a larger share would draw, in that order, if they are smaller than
  // all before. The required size is known only at the end.
  void take_candidate() {
    const auto sooner = [](const Candidate& a, const Candidate& b) { return a.place < b.place; };
    auto at = std::ranges::upper_bound(candidates_, current_, sooner);
    if (at != candidates_.begin() && std::prev(at)->bytes <= current_.bytes) return;
    const auto smaller = std::find_if(
        at, candidates_.end(), [&](const Candidate& one) { return one.bytes < current_.bytes; });
    at = candidates_.erase(at, smaller);
    candidates_.insert(at, current_);
  }

  // Adds files that are one document and too large. They need not be read.
  void add_large_files(std::span<const CorpusFile> files, std::int64_t most) {
    drawn_.clear();
    for (const CorpusFile& file : files) {
      const bool drawn = place_of(held_out_.seed_, file.name) < held_out_.share_;
      if (drawn && file.bytes > most && !file.is_named_json_lines())
        drawn_.push_back({&file, file.name, file.bytes, 0});
    }
  }

  [[nodiscard]] HeldOut one(HeldOutKind kind, const Candidate& candidate) const {
    HeldOut held_out = held_out_;
    held_out.kind_ = kind;
    held_out.file_ = candidate.file;
    held_out.name_ = candidate.name;
    return held_out;
  }

  HeldOut held_out_;
  std::int64_t corpus_bytes_;
  double max_share_;  // of the text, that a whole document may be
  std::int64_t text_bytes_ = 0;
  std::int64_t smallest_drawn_ = std::numeric_limits<std::int64_t>::max();
  bool left_ = false;
  Candidate current_;
  Candidate longest_;
  std::vector<Candidate> drawn_;       // the largest ones, descending
  std::vector<Candidate> candidates_;  // by place; each smaller than those before
};

Expected<HeldOut> choose_held_out(const Corpus& corpus, const PrepareOptions& options,
                                  const std::function<void(std::int64_t)>& read) {
  if (options.validation == 0) return HeldOut();
  HeldOutChoice choice(options, corpus.bytes);
  BlockReader reader(corpus, options);
  Block block;
  while (!choice.is_decided()) {
    DYNMO_ASSIGN(const bool more, reader.next(block));
    if (!more) break;
    DYNMO_TRY(for_each_document(std::span<const Block>(&block, 1), options.text_key,
                                [&](const Document& document) { choice.take(document); }));
    read(reader.bytes());
  }
  return choice.made(corpus.files);
}

}  // namespace dynmo::data
