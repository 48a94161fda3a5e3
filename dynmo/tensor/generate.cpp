// SPDX-License-Identifier: Apache-2.0
#include "dynmo/tensor/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <utility>

#include "dynmo/core/rng.h"
#include "dynmo/tensor/counts_impl.h"
#include "dynmo/tensor/sort_impl.h"

namespace dynmo::tensor {
namespace {

constexpr std::uint64_t kMaxEntries = std::uint64_t{1} << 33;
constexpr std::size_t kPieceOfText = std::size_t{1} << 20;
constexpr std::uint64_t kDense = 8;  // if at least one of so many numbers is drawn, all are visited

enum Stream : std::uint64_t {
  kSliceIds,
  kFiberCounts,
  kFiberIds,
  kEntryCounts,
  kEntryIds,
  kValues
};

// Draws distinct numbers below `size`, ascending. Every set is equally likely.
class Sample {
 public:
  void draw(std::uint64_t count, std::uint64_t size, Rng& rng, std::vector<std::uint64_t>& out) {
    out.clear();
    if (count == 1) {
      out.push_back(rng.below(size));
      return;
    }
    if (count >= size / kDense) {
      // Takes each number with probability (still wanted) / (still left) (Knuth's algorithm S).
      for (std::uint64_t i = 0; out.size() < count; ++i) {
        if (rng.below(size - i) < count - out.size()) out.push_back(i);
      }
      return;
    }
    // Takes the first `count` different numbers of a sequence of draws.
    while (out.size() < count) {
      fresh_.clear();
      for (std::uint64_t i = out.size(); i < count; ++i) fresh_.push_back({rng.below(size)});
      sorter_.sort(fresh_, static_cast<int>(std::bit_width(size - 1)));
      merged_.clear();
      auto old = out.begin();
      for (const auto [id] : fresh_) {
        while (old != out.end() && *old < id) merged_.push_back(*old++);
        const bool known =
            (old != out.end() && *old == id) || (!merged_.empty() && merged_.back() == id);
        if (!known) merged_.push_back(id);
      }
      merged_.insert(merged_.end(), old, out.end());
      std::swap(out, merged_);
    }
  }

 private:
  struct Id {
    std::uint64_t key;
  };
  KeySorter<Id> sorter_;
  std::vector<Id> fresh_;
  std::vector<std::uint64_t> merged_;
};

// Draws digits from 1 to 9, two with each random number.
class Digits {
 public:
  explicit Digits(const Rng& rng) : rng_(rng) {}
  [[nodiscard]] char next() {
    if (left_ == 0) bits_ = rng_.next();
    left_ = left_ == 0 ? 1 : 0;
    const std::uint64_t part = bits_ & 0xFFFFFFFFU;
    bits_ >>= 32;
    return static_cast<char>('1' + ((part * 9) >> 32));
  }

 private:
  Rng rng_;
  std::uint64_t bits_ = 0;
  int left_ = 0;
};

// Gathers the lines of a coordinates file in large pieces.
class CoordinateLines {
 public:
  explicit CoordinateLines(const Writer& write) : write_(write), text_(kPieceOfText + kMaxLine) {}

  void header(const std::vector<std::uint64_t>& sizes) {
    put(fmt::format("{}\n{}\n", sizes.size(), fmt::join(sizes, " ")));
  }
  // Begins a slice with the indices that it fixes. `slice` is its number among all possible slices.
  void begin_slice(const std::vector<std::uint64_t>& sizes, std::uint64_t slice) {
    slice_.clear();
    for (std::size_t m = sizes.size() - 2, rest = slice; m-- > 0; rest /= sizes[m]) {
      const fmt::format_int index(rest % sizes[m] + 1);
      slice_.insert(slice_.begin(), ' ');
      slice_.insert(0, index.data(), index.size());
    }
    front_ = slice_;
  }
  void begin_fiber(std::uint64_t fiber) {
    front_.resize(slice_.size());
    const fmt::format_int index(fiber + 1);
    front_.append(index.data(), index.size());
    front_ += ' ';
  }
  [[nodiscard]] Expected<void> add(std::uint64_t entry, char digit) {
    const fmt::format_int index(entry + 1);
    put(front_);
    put({index.data(), index.size()});
    put(" 0.");
    text_[size_++] = digit;
    text_[size_++] = '\n';
    return size_ < kPieceOfText ? Expected<void>() : end();
  }
  [[nodiscard]] Expected<void> end() {
    return write_(std::string_view(text_.data(), std::exchange(size_, 0)));
  }

 private:
  static constexpr std::size_t kMaxLine = 512;  // bytes, of the header and of an entry

  void put(std::string_view text) {
    std::copy(text.begin(), text.end(), text_.begin() + static_cast<std::ptrdiff_t>(size_));
    size_ += text.size();
  }

  const Writer& write_;
  std::vector<char> text_;
  std::size_t size_ = 0;
  std::string slice_;
  std::string front_;
};

Expected<void> check_sizes(const Request& request) {
  if (request.sizes.size() < 2 || request.sizes.size() > static_cast<std::size_t>(kMaxOrder)) {
    return make_error(ErrorCode::kBadInput, "{} modes, wanted 2 to {}", request.sizes.size(),
                      kMaxOrder);
  }
  double slices = 1;
  for (std::size_t m = 0; m < request.sizes.size(); ++m) {
    const std::uint64_t size = request.sizes[m];
    if (size < 1 || size > kMaxSize) {
      return make_error(ErrorCode::kBadInput, "mode {} has size {}, wanted 1 to {}", m + 1, size,
                        kMaxSize);
    }
    if (m + 2 < request.sizes.size()) slices *= static_cast<double>(size);
  }
  if (request.entries < 1 || request.entries > kMaxEntries) {
    return make_error(ErrorCode::kBadInput, "{} entries, wanted 1 to {}", request.entries,
                      kMaxEntries);
  }
  if (slices > 0x1p62) {
    return make_error(ErrorCode::kBadInput, "{:.3g} slices, wanted at most 2^62", slices);
  }
  const auto too_many = [](std::string_view what, std::uint64_t count, double limit) {
    return make_error(ErrorCode::kBadInput,
                      "{} {} contradict the sizes of the modes, which have "
                      "room for {:.15g}",
                      count, what, limit);
  };
  const auto rows = static_cast<double>(request.sizes[request.sizes.size() - 2]);
  const auto columns = static_cast<double>(request.sizes.back());
  if (request.slices < 1 || static_cast<double>(request.slices) > slices) {
    return too_many("nonempty slices", request.slices, slices);
  }
  if (static_cast<double>(request.fibers_max) > rows) {
    return too_many("fibers in a slice", request.fibers_max, rows);
  }
  if (static_cast<double>(request.entries_max) > columns) {
    return too_many("entries in a fiber", request.entries_max, columns);
  }
  return {};
}

Rng stream_of(const Request& request, Stream stream) {
  return Rng(mix_key({request.seed, stream}));
}

}  // namespace

Expected<void> generate(const Request& request, const Writer& write) {
  DYNMO_TRY(check_sizes(request));
  DYNMO_ASSIGN(Counts fiber_counts,
               Counts::make({.groups = request.slices,
                             .sum = request.fibers,
                             .max = request.fibers_max,
                             .cv = request.fibers_cv},
                            mix_key({request.seed, kFiberCounts}), "fibers of a slice"));
  DYNMO_ASSIGN(Counts entry_counts,
               Counts::make({.groups = request.fibers,
                             .sum = request.entries,
                             .max = request.entries_max,
                             .cv = request.entries_cv},
                            mix_key({request.seed, kEntryCounts}), "entries of a fiber"));
  const std::size_t order = request.sizes.size();
  std::uint64_t possible = 1;
  for (std::size_t m = 0; m + 2 < order; ++m) possible *= request.sizes[m];
  Rng slice_ids = stream_of(request, kSliceIds);
  Rng fiber_ids = stream_of(request, kFiberIds);
  Rng entry_ids = stream_of(request, kEntryIds);
  Digits digits(stream_of(request, kValues));
  Sample sample;
  std::vector<std::uint64_t> slices;
  std::vector<std::uint64_t> fibers;
  std::vector<std::uint64_t> entries;
  sample.draw(request.slices, possible, slice_ids, slices);
  CoordinateLines lines(write);
  lines.header(request.sizes);
  for (const std::uint64_t slice : slices) {
    lines.begin_slice(request.sizes, slice);
    sample.draw(fiber_counts.next(), request.sizes[order - 2], fiber_ids, fibers);
    for (const std::uint64_t fiber : fibers) {
      lines.begin_fiber(fiber);
      sample.draw(entry_counts.next(), request.sizes.back(), entry_ids, entries);
      for (const std::uint64_t entry : entries) DYNMO_TRY(lines.add(entry, digits.next()));
    }
  }
  return lines.end();
}

Expected<Request> request_like(const Features& features) {
  if (features.sizes.size() < 2 || features.slices.empty() || features.fibers.empty()) {
    return make_error(ErrorCode::kBadInput,
                      "the features have {} modes, {} slices and {} fibers, wanted those of at "
                      "least two modes",
                      features.sizes.size(), features.slices.size(), features.fibers.size());
  }
  const GroupFeatures& slice = features.slices.back();
  const GroupFeatures& fiber = features.fibers.back();
  if (!slice.fibers) {
    return make_error(ErrorCode::kBadInput, "the features have no fibers of a slice");
  }
  return Request{.sizes = features.sizes,
                 .slices = slice.entries.nonempty,
                 .fibers = fiber.entries.nonempty,
                 .entries = features.entries,
                 .fibers_max = count_of(slice.fibers->max),
                 .fibers_cv = slice.fibers->of_nonempty.cv,
                 .entries_max = count_of(fiber.entries.max),
                 .entries_cv = fiber.entries.of_nonempty.cv};
}

}  // namespace dynmo::tensor
