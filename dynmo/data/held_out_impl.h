// SPDX-License-Identifier: Apache-2.0
#pragma once

// Selects the text of a corpus that is held out for validation. A draw decides for every document
// separately. It excludes documents above a tenth of the text (or the share). If it takes none or
// all, one document or its end is held out instead. So a small folder of text suffices for training
// and validation.

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

// The choice of the held-out text. A value. Any number of threads may read it.
class HeldOut {
 public:
  // The text of a document's piece in one split, and whether the split's part of the document ends
  // with it.
  struct Part {
    std::string_view text;
    bool ends = false;
  };
  [[nodiscard]] std::array<Part, 2> parts_of(const Document& document) const;
  [[nodiscard]] HeldOutKind kind() const { return kind_; }
  [[nodiscard]] const std::string& name() const { return name_; }  // of the chosen document
  // Returns the number of documents that were drawn, and are trained on because of their size.
  [[nodiscard]] std::int64_t too_large() const { return std::ssize(too_large_); }

 private:
  friend class HeldOutChoice;
  using Id = std::pair<const CorpusFile*, std::string>;  // file and name of a document
  [[nodiscard]] bool is_drawn(const CorpusFile* file, std::string_view name) const;

  HeldOutKind kind_ = HeldOutKind::kNotAsked;
  std::uint64_t seed_ = 0;
  double share_ = 0;
  std::vector<Id> too_large_;
  const CorpusFile* file_ = nullptr;  // of the chosen document
  std::string name_;
  std::int64_t from_ = 0;    // first byte of the held-out end, about
  std::int64_t window_ = 0;  // bytes behind that in which a line may end
};

// Chooses the held-out text. Reads the corpus until one document is drawn and one is not. Reads all
// of it if it is small, because one document may be a large part of it. Calls `read` with the
// number of bytes read so far. Returns the errors of BlockReader and for_each_document().
[[nodiscard]] Expected<HeldOut> choose_held_out(const Corpus& corpus, const PrepareOptions& options,
                                                const std::function<void(std::int64_t)>& read);

}  // namespace dynmo::data
