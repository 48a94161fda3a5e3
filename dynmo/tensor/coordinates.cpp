// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::tensor {
namespace {

constexpr std::size_t kPiece = std::size_t{1} << 18;  // bytes that are read at once
constexpr std::size_t kMaxLine = 4096;                // bytes
constexpr double kMaxValue = 1e100;

constexpr std::size_t kMaxDigits = 19;  // of a whole number of 64 bits

std::size_t count_digits(std::string_view text) {
  std::size_t digits = 0;
  while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
  return digits;
}

// Returns whether `text` is a number below 1e90 without sign and exponent, as most values are.
bool is_plain_number(std::string_view text) {
  constexpr std::size_t kPlain = 90;
  const std::size_t whole = count_digits(text);
  if (whole == 0 || whole > kPlain) return false;
  text.remove_prefix(whole);
  if (text.empty()) return true;
  return text.front() == '.' && count_digits(text.substr(1)) + 1 == text.size();
}

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == ','; }

// Takes the lines one after another. The first ones may be a header. Its end is known once two
// lines have equally many numbers.
class Lines {
 public:
  Lines(std::string_view origin, Values values) : origin_(origin), values_(values) {}

  [[nodiscard]] Expected<void> take(std::string_view line) {
    ++line_;
    while (!line.empty() && is_blank(line.front())) line.remove_prefix(1);
    if (line.empty() || line.front() == '#') return {};
    if (columns_ > 0) return take_entry(line, line_);
    head_.emplace_back(line_, std::string(line));
    return head_.size() < 3 ? Expected<void>() : read_head();
  }

  [[nodiscard]] Expected<SparseTensor> finish() {
    if (columns_ == 0) DYNMO_TRY(read_head());
    if (tensor_.entries() == 0) {
      return make_error(ErrorCode::kBadInput,
                        "'{}' has no entry, wanted lines of indices from 1 and a value", origin_);
    }
    if (!declared_) tensor_.sizes = largest_;
    return std::move(tensor_);
  }

  void reserve(std::size_t entries) {
    for (std::vector<std::uint32_t>& mode : tensor_.indices) mode.reserve(entries);
    if (values_ == Values::kKept) tensor_.values.reserve(entries);
  }
  [[nodiscard]] std::size_t entries() const { return tensor_.entries(); }

 private:
  using Line = std::pair<std::size_t, std::string>;

  static int count_columns(std::string_view line) {
    int columns = 0;
    bool inside = false;
    for (const char c : line) {
      if (!is_blank(c) && !inside) ++columns;
      inside = !is_blank(c);
    }
    return columns;
  }

  [[nodiscard]] Error fault(std::size_t line, std::string_view what) const {
    return Error{ErrorCode::kBadInput, fmt::format("{}:{}: {}", origin_, line, what)};
  }

  // Decides which of the first lines are a header, and takes the others as entries.
  [[nodiscard]] Expected<void> read_head() {
    const std::vector<Line> head = std::exchange(head_, {});
    if (head.empty()) return {};
    std::vector<int> columns;
    for (const auto& [number, text] : head) columns.push_back(count_columns(text));
    std::size_t sizes = head.size();  // index of the line that has them; none
    if (head.size() == 3 && columns[0] == 1 && columns[2] == columns[1] + 1) {
      sizes = 1;
    } else if (head.size() >= 2 && columns[1] == columns[0] + 1) {
      sizes = 0;
    }
    const bool has_sizes = sizes < head.size();
    columns_ = has_sizes ? columns[sizes] + 1 : columns[0];
    const int order = columns_ - 1;
    if (order < 1 || order > kMaxOrder) {
      return fault(head.front().first,
                   fmt::format("{} numbers, wanted the indices of 1 to {} modes and a value",
                               columns_, kMaxOrder));
    }
    tensor_.indices.resize(static_cast<std::size_t>(order));
    largest_.assign(static_cast<std::size_t>(order), 0);
    if (has_sizes) DYNMO_TRY(take_sizes(head, sizes));
    for (std::size_t i = has_sizes ? sizes + 1 : 0; i < head.size(); ++i) {
      DYNMO_TRY(take_entry(head[i].second, head[i].first));
    }
    return {};
  }

  [[nodiscard]] Expected<void> take_sizes(const std::vector<Line>& head, std::size_t index) {
    const auto order = static_cast<std::uint64_t>(columns_ - 1);
    if (index == 1) {
      std::string_view text = head[0].second;
      const auto said = next_index(text);
      if (said != order) {
        return fault(head[0].first, fmt::format("'{}' modes, but the next line has {} sizes",
                                                head[0].second, order));
      }
    }
    std::string_view text = head[index].second;
    for (std::uint64_t mode = 0; mode < order; ++mode) {
      const auto size = next_index(text);
      if (!size || *size < 1 || *size > kMaxSize) {
        return fault(
            head[index].first,
            fmt::format("the size of mode {} is no whole number from 1 to {}", mode + 1, kMaxSize));
      }
      tensor_.sizes.push_back(*size);
    }
    declared_ = true;
    return {};
  }

  // Takes a whole number and the blanks after it from the beginning of `text`. Returns nullopt if
  // there is none, or if it is too long.
  static std::optional<std::uint64_t> next_index(std::string_view& text) {
    std::uint64_t value = 0;
    const std::size_t digits = count_digits(text);
    if (digits == 0 || digits > kMaxDigits) return std::nullopt;
    for (std::size_t i = 0; i < digits; ++i) {
      value = value * 10 + static_cast<std::uint64_t>(text[i] - '0');
    }
    text.remove_prefix(digits);
    if (!text.empty() && !is_blank(text.front())) return std::nullopt;
    while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
    return value;
  }

  [[nodiscard]] Expected<void> take_entry(std::string_view line, std::size_t number) {
    const std::string_view whole = line;
    for (int mode = 0; mode + 1 < columns_; ++mode) {
      const auto m = static_cast<std::size_t>(mode);
      const auto index = next_index(line);
      const std::uint64_t limit = declared_ ? tensor_.sizes[m] : kMaxSize;
      if (!index || *index < 1 || *index > limit || line.empty()) {
        return bad_entry(whole, number, mode, index, limit);
      }
      tensor_.indices[m].push_back(static_cast<std::uint32_t>(*index - 1));
      largest_[m] = std::max(largest_[m], *index);
    }
    if (values_ == Values::kDropped && is_plain_number(line)) return {};
    double value = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), value);
    std::string_view rest = line;
    rest.remove_prefix(static_cast<std::size_t>(end - line.data()));
    while (!rest.empty() && is_blank(rest.front())) rest.remove_prefix(1);
    if (error != std::errc() || !rest.empty() || !(std::abs(value) <= kMaxValue)) {
      if (count_columns(whole) != columns_) return wrong_columns(whole, number);
      return fault(number, fmt::format("the value '{}' is unreadable, NaN or above 1e100", line));
    }
    if (values_ == Values::kKept) tensor_.values.push_back(value);
    return {};
  }

  [[nodiscard]] Error wrong_columns(std::string_view line, std::size_t number) const {
    return fault(number, fmt::format("{} numbers, wanted {}: the indices of {} modes and a value",
                                     count_columns(line), columns_, columns_ - 1));
  }
  [[nodiscard]] Error bad_entry(std::string_view line, std::size_t number, int mode,
                                std::optional<std::uint64_t> index, std::uint64_t limit) const {
    if (count_columns(line) != columns_) return wrong_columns(line, number);
    if (!index) {
      return fault(number, fmt::format("the index of mode {} is no whole number", mode + 1));
    }
    if (*index == 0) {
      return fault(number,
                   fmt::format("the index of mode {} is 0, wanted 1 for the first", mode + 1));
    }
    return fault(number, fmt::format("the index of mode {} is {}, beyond its size {}", mode + 1,
                                     *index, limit));
  }

  std::string origin_;
  Values values_;
  std::size_t line_ = 0;
  std::vector<Line> head_;
  int columns_ = 0;  // of an entry; 0: not known yet
  bool declared_ = false;
  std::vector<std::uint64_t> largest_;
  SparseTensor tensor_;
};

Error too_long(std::string_view origin) {
  return Error{ErrorCode::kBadInput, fmt::format("'{}' has a line of more than {} bytes, wanted "
                                                 "indices and a value on each",
                                                 origin, kMaxLine)};
}

// Takes all whole lines of `text`. Returns their number of bytes.
Expected<std::size_t> take_lines(Lines& lines, std::string_view text, std::string_view origin) {
  std::size_t taken = 0;
  while (true) {
    const std::size_t end = text.find('\n', taken);
    if (end == std::string_view::npos) break;
    if (end - taken > kMaxLine) return too_long(origin);
    DYNMO_TRY(lines.take(text.substr(taken, end - taken)));
    taken = end + 1;
  }
  if (text.size() - taken > kMaxLine) return too_long(origin);
  return taken;
}

}  // namespace

Expected<SparseTensor> parse_coordinates(std::string_view text, std::string_view origin,
                                         Values values) {
  Lines lines(origin, values);
  DYNMO_ASSIGN(const std::size_t taken, take_lines(lines, text, origin));
  if (taken < text.size()) DYNMO_TRY(lines.take(text.substr(taken)));
  return lines.finish();
}

Expected<SparseTensor> read_coordinates(const std::filesystem::path& path, Values values) {
  const std::string origin = path.string();
  const auto close = [](std::FILE* file) { static_cast<void>(std::fclose(file)); };
  const std::unique_ptr<std::FILE, decltype(close)> file(std::fopen(path.c_str(), "rb"), close);
  const auto unreadable = [&] {
    return make_error(ErrorCode::kBadInput, "cannot read '{}': {}", origin, std::strerror(errno));
  };
  if (file == nullptr) return unreadable();
  std::error_code ignored;
  const auto size = std::filesystem::is_regular_file(path, ignored)
                        ? std::filesystem::file_size(path, ignored)
                        : 0;
  Lines lines(origin, values);
  std::string text;
  while (true) {
    const std::size_t rest = text.size();
    text.resize(rest + kPiece);
    const std::size_t read = std::fread(text.data() + rest, 1, kPiece, file.get());
    if (read == 0 && std::ferror(file.get()) != 0) return unreadable();
    text.resize(rest + read);
    const bool first = lines.entries() == 0;
    DYNMO_ASSIGN(const std::size_t taken, take_lines(lines, text, origin));
    // Reserves a little more than the first piece suggests.
    if (first && taken > 0) lines.reserve((lines.entries() * (size / taken + 1)) / 64 * 65);
    text.erase(0, taken);
    if (read == 0) break;
  }
  if (!text.empty()) DYNMO_TRY(lines.take(text));
  return lines.finish();
}

}  // namespace dynmo::tensor
