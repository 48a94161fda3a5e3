// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which text of a corpus is held out for validation. A draw decides for every document by itself,
// but takes none above a tenth of the text (or the share); where it takes none or all, one document
// or the end of one is held out instead, so that a small folder of text can be trained and
// validated on.

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/data/corpus_impl.h"
#include "dynmo/data/prepare.h"

namespace dynmo::data {

inline constexpr std::size_t kTrain = 0;
inline constexpr std::size_t kValidation = 1;

// A value; any number of threads may ask it.
class HeldOut {
 public:
  // A piece of a document by split: its text, and whether the split's part of the document ends
  // with it.
  struct Part {
    std::string_view text;
    bool ends = false;
  };
  [[nodiscard]] std::array<Part, 2> parts_of(const Document& document) const;
  [[nodiscard]] HeldOutKind kind() const { return kind_; }
  [[nodiscard]] const std::string& name() const { return name_; }  // of the one document
  // Documents that are drawn, and trained on because of their size.
  [[nodiscard]] std::int64_t too_large() const { return std::ssize(too_large_); }

 private:
  friend class HeldOutChoice;
  using Id = std::pair<const CorpusFile*, std::string>;  // of a document: file and name
  [[nodiscard]] bool is_drawn(const CorpusFile* file, std::string_view name) const;

  HeldOutKind kind_ = HeldOutKind::kNotAsked;
  std::uint64_t seed_ = 0;
  double share_ = 0;
  std::vector<Id> too_large_;
  const CorpusFile* file_ = nullptr;  // of the one document
  std::string name_;
  std::int64_t from_ = 0;    // first byte of its end, about
  std::int64_t window_ = 0;  // bytes behind that among which a line may end
};

// Reads the corpus until one document is drawn and one is not; all of it where there are not both,
// or where it is so little that a document may be a large part of it. `read` is told the bytes
// behind us. kBadInput: as BlockReader and for_each_document.
[[nodiscard]] Expected<HeldOut> choose_held_out(const Corpus& corpus, const PrepareOptions& options,
                                                const std::function<void(std::int64_t)>& read);

}  // namespace dynmo::data
