// SPDX-License-Identifier: Apache-2.0
#include "dynmo/tensor/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <utility>

#include "dynmo/core/rng.h"
#include "dynmo/tensor/counts_impl.h"

namespace dynmo::tensor {
namespace {

constexpr std::uint64_t kMaxEntries = std::uint64_t{1} << 33;
constexpr std::size_t kPieceOfText = std::size_t{1} << 20;
constexpr std::uint64_t kDense = 8;  // from one in so many on all are passed

enum Stream : std::uint64_t {
  kSliceIds,
  kFiberCounts,
  kFiberIds,
  kEntryCounts,
  kEntryIds,
  kValues
};

// Distinct numbers below `size`, ascending, every set equally likely.
class Sample {
 public:
  void draw(std::uint64_t count, std::uint64_t size, Rng& rng, std::vector<std::uint64_t>& out) {
    out.clear();
    if (count >= size / kDense) {
      // Each is taken with the share of those wanted among those left (Knuth's algorithm S).
      for (std::uint64_t i = 0; out.size() < count; ++i) {
        if (rng.below(size - i) < count - out.size()) out.push_back(i);
      }
      return;
    }
    // The first `count` different ones of a sequence of draws.
    while (out.size() < count) {
      fresh_.clear();
      for (std::uint64_t i = out.size(); i < count; ++i) fresh_.push_back(rng.below(size));
      std::ranges::sort(fresh_);
      merged_.clear();
      std::ranges::merge(out, fresh_, std::back_inserter(merged_));
      merged_.erase(std::unique(merged_.begin(), merged_.end()), merged_.end());
      std::swap(out, merged_);
    }
  }

 private:
  std::vector<std::uint64_t> fresh_;
  std::vector<std::uint64_t> merged_;
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
  Rng values = stream_of(request, kValues);
  Sample sample;
  std::vector<std::uint64_t> slices;
  std::vector<std::uint64_t> fibers;
  std::vector<std::uint64_t> entries;
  sample.draw(request.slices, possible, slice_ids, slices);
  std::string text = fmt::format("{}\n{}\n", order, fmt::join(request.sizes, " "));
  for (const std::uint64_t slice : slices) {
    std::string place;  // the indices that the slice fixes
    for (std::size_t m = order - 2, rest = slice; m-- > 0; rest /= request.sizes[m]) {
      place.insert(0, fmt::format("{} ", rest % request.sizes[m] + 1));
    }
    sample.draw(fiber_counts.next(), request.sizes[order - 2], fiber_ids, fibers);
    for (const std::uint64_t fiber : fibers) {
      const std::string front = fmt::format("{}{} ", place, fiber + 1);
      sample.draw(entry_counts.next(), request.sizes.back(), entry_ids, entries);
      for (const std::uint64_t entry : entries) {
        text += front;
        fmt::format_int index(entry + 1);
        text.append(index.data(), index.size());
        text += " 0.";
        text += static_cast<char>('1' + values.below(9));
        text += '\n';
      }
      if (text.size() >= kPieceOfText) {
        DYNMO_TRY(write(text));
        text.clear();
      }
    }
  }
  return write(text);
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
                 .fibers_max = static_cast<std::uint64_t>(slice.fibers->max),
                 .fibers_cv = slice.fibers->of_nonempty.cv,
                 .entries_max = static_cast<std::uint64_t>(fiber.entries.max),
                 .entries_cv = fiber.entries.of_nonempty.cv};
}

}  // namespace dynmo::tensor
