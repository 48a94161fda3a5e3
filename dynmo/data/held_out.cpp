// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <optional>
#include <span>

#include "dynmo/core/digest.h"
#include "dynmo/data/held_out_impl.h"

namespace dynmo::data {
namespace {

// A document above this share of the text is not held out whole in place of a draw.
constexpr double kMaxWholeShare = 0.1;

// The same for a document whatever else is prepared with it. `name` is relative to what the user
// gave, so that moving the corpus changes nothing either. In [0, 1).
double place_of(std::uint64_t seed, std::string_view name) {
  const Digest digest = digest_of(fmt::format("{}\n{}", seed, name));
  return static_cast<double>(digest.high >> 11) * 0x1p-53;
}

bool begins_character(char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }

// Where to cut `text`: behind a line that ends within `window` bytes from `from` on, else before
// the character at `from`. A first piece keeps a character before the cut, and is not cut (its size
// is returned) where it has no other.
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

bool HeldOut::is_drawn(std::string_view name) const { return place_of(seed_, name) < share_; }

std::array<HeldOut::Part, 2> HeldOut::parts_of(const Document& document) const {
  std::array<Part, 2> parts;
  const auto all_in = [&](std::size_t split) {
    parts[split] = {document.text, document.last};
    return parts;
  };
  if (kind_ == HeldOutKind::kDrawn) return all_in(is_drawn(document.name) ? kValidation : kTrain);
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

// Looks at the documents in order, and keeps what is held out if none of them is drawn.
class HeldOutChoice {
 public:
  HeldOutChoice(const PrepareOptions& options, std::int64_t bytes)
      : max_whole_bytes_(std::max(options.validation, kMaxWholeShare) *
                         static_cast<double>(bytes)) {
    held_out_.kind_ = HeldOutKind::kDrawn;
    held_out_.seed_ = options.seed;
    held_out_.share_ = options.validation;
  }

  void take(const Document& document) {
    (held_out_.is_drawn(document.name) ? drawn_ : left_) = true;
    if (document.piece == 0) current_ = {document.file, std::string(document.name), 0};
    current_.bytes += std::ssize(document.text);
    if (!document.last) return;
    if (current_.bytes > longest_.bytes) longest_ = current_;
    const double place = place_of(held_out_.seed_, current_.name);
    const bool next = !whole_ || place < whole_place_;
    if (!next || static_cast<double>(current_.bytes) > max_whole_bytes_) return;
    whole_ = current_;
    whole_place_ = place;
  }
  // Whether the draw takes some documents and leaves some.
  [[nodiscard]] bool divides() const { return drawn_ && left_; }

  [[nodiscard]] HeldOut made() {
    if (divides()) return held_out_;
    if (whole_ && !drawn_) return one(HeldOutKind::kDocument, *whole_);
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
  };
  [[nodiscard]] HeldOut one(HeldOutKind kind, const Candidate& candidate) const {
    HeldOut held_out = held_out_;
    held_out.kind_ = kind;
    held_out.file_ = candidate.file;
    held_out.name_ = candidate.name;
    return held_out;
  }

  HeldOut held_out_;
  double max_whole_bytes_;
  bool drawn_ = false;
  bool left_ = false;
  Candidate current_;
  Candidate longest_;
  std::optional<Candidate> whole_;  // the one that a larger share would draw first
  double whole_place_ = 1;
};

Expected<HeldOut> choose_held_out(const Corpus& corpus, const PrepareOptions& options,
                                  const std::function<void(std::int64_t)>& read) {
  if (options.validation == 0) return HeldOut();
  HeldOutChoice choice(options, corpus.bytes);
  BlockReader reader(corpus);
  Block block;
  while (!choice.divides()) {
    DYNMO_ASSIGN(const bool more, reader.next(block));
    if (!more) break;
    DYNMO_TRY(for_each_document(std::span<const Block>(&block, 1), options.text_key,
                                [&](const Document& document) { choice.take(document); }));
    read(reader.bytes());
  }
  return choice.made();
}

}  // namespace dynmo::data
