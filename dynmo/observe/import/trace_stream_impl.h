// SPDX-License-Identifier: Apache-2.0
#pragma once

// Text of any size for nlohmann's SAX parser, one buffer at a time.

#include <cstddef>
#include <filesystem>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/observe/import/trace_import.h"

namespace dynmo::observe {

// Reads a file or a text. Fails if more than kMaxValueBytes pass between two calls of note_value().
// This bounds the parser's memory. One thread uses it.
class TraceStream {
 public:
  static constexpr std::size_t kMaxValueBytes = std::size_t{16} << 20;

  explicit TraceStream(std::string_view text) : begin_(text.data()), end_(begin_ + text.size()) {}
  // Opens a file. finish() returns an error of opening.
  TraceStream(const std::filesystem::path& path, const OpenTrace& open);
  TraceStream(const TraceStream&) = delete;
  TraceStream& operator=(const TraceStream&) = delete;

  // Returns the first bytes, or fewer at the end of the text.
  [[nodiscard]] std::string_view head() const;
  // Returns the error of opening or reading, if any.
  [[nodiscard]] Expected<void> finish() const;
  void note_value() { since_value_ = 0; }

  // The characters from here to the end, in the form that the parser takes.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = char;
    using difference_type = std::ptrdiff_t;
    using pointer = const char*;
    using reference = const char&;

    Iterator() = default;
    explicit Iterator(TraceStream& stream) : stream_(&stream) {}
    reference operator*() const { return *stream_->begin_; }
    Iterator& operator++() {
      if (++stream_->begin_ == stream_->end_) stream_->fill();
      return *this;
    }
    Iterator operator++(int) {
      Iterator before = *this;
      ++*this;
      return before;
    }
    // Iterators are equal at the end only.
    bool operator==(const Iterator&) const { return stream_->begin_ == stream_->end_; }

   private:
    TraceStream* stream_ = nullptr;
  };

 private:
  void fill();

  const char* begin_ = nullptr;
  const char* end_ = nullptr;
  std::vector<char> buffer_;
  std::string path_;
  ReadTrace read_;  // empty: the text ends with the buffer
  std::size_t since_value_ = 0;
  std::optional<Error> fault_;
};

}  // namespace dynmo::observe
