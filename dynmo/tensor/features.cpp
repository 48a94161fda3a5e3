// SPDX-License-Identifier: Apache-2.0
#include "dynmo/tensor/features.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <numeric>
#include <span>
#include <type_traits>
#include <utility>

#include "dynmo/core/ordered_tasks.h"
#include "dynmo/tensor/counted_impl.h"
#include "dynmo/tensor/features_impl.h"
#include "dynmo/tensor/sort_impl.h"

namespace dynmo::tensor {
namespace {

template <typename Key>
struct Place {
  Key key;
};
template <typename Key>
struct ValuedPlace {
  Key key;
  double value;
};

// Returns part / mean, or 0 if the mean is 0 or too small for the quotient.
double relative(double part, double mean) {
  const double quotient = mean != 0 ? part / mean : 0;
  return std::isfinite(quotient) ? quotient : 0;
}

// Moments of real numbers, in one pass (Welford's method).
class Measured {
 public:
  void add(double value) {
    ++groups_;
    const double off = value - mean_;
    mean_ += off / static_cast<double>(groups_);
    squares_ += off * (value - mean_);
    sum_ += value;
    min_ = groups_ == 1 ? value : std::min(min_, value);
    max_ = groups_ == 1 ? value : std::max(max_, value);
  }
  [[nodiscard]] Distribution over(double possible) const {
    Distribution result{.groups = possible, .nonempty = groups_, .sum = sum_, .max = max_};
    if (groups_ == 0) return result;
    const auto own = static_cast<double>(groups_);
    result.of_nonempty = spread(mean_, squares_ / own, min_);
    // The empty groups are 0: Chan's sum of two samples.
    const double empty = std::max(possible - own, 0.0);
    const double mean = sum_ / possible;
    const double squares = squares_ + mean_ * mean_ * own * (empty / possible);
    if (empty > 0) result.max = std::max(max_, 0.0);
    result.all = spread(mean, squares / possible, empty > 0 ? std::min(min_, 0.0) : min_);
    return result;
  }

 private:
  [[nodiscard]] Spread spread(double mean, double variance, double min) const {
    const double std = std::sqrt(std::max(variance, 0.0));
    return {.min = min,
            .mean = mean,
            .std = std,
            .cv = relative(std, mean),
            .imbalance = relative(max_ - mean, mean)};
  }

  std::uint64_t groups_ = 0;
  double mean_ = 0;
  double squares_ = 0;
  double sum_ = 0;
  double min_ = 0;
  double max_ = 0;
};

int bits_of(std::uint64_t size) { return static_cast<int>(std::bit_width(size - 1)); }

double product(const SparseTensor& tensor, std::span<const int> modes) {
  double size = 1;
  for (const int mode : modes) size *= static_cast<double>(tensor.sizes[static_cast<size_t>(mode)]);
  return size;
}

std::vector<int> others(const SparseTensor& tensor, std::span<const int> free) {
  std::vector<int> fixed;
  for (int mode = 0; mode < tensor.order(); ++mode) {
    if (std::ranges::find(free, mode) == free.end()) fixed.push_back(mode);
  }
  return fixed;
}

int bits_of(const SparseTensor& tensor, std::span<const int> modes) {
  int bits = 0;
  for (const int mode : modes) bits += bits_of(tensor.sizes[static_cast<std::size_t>(mode)]);
  return bits;
}

// Returns the places of all entries, sorted by key. A key has the indices of `modes`, the first one
// in its highest bits.
template <typename Element>
std::vector<Element> sorted_places(const SparseTensor& tensor, std::span<const int> modes) {
  using Key = decltype(Element::key);
  std::vector<Element> places(tensor.entries());
  for (const int mode : modes) {
    const auto m = static_cast<std::size_t>(mode);
    const int shift = bits_of(tensor.sizes[m]);
    const std::vector<std::uint32_t>& indices = tensor.indices[m];
    for (std::size_t i = 0; i < places.size(); ++i) {
      places[i].key = static_cast<Key>(static_cast<Key>(places[i].key << shift) | indices[i]);
    }
  }
  if constexpr (std::is_same_v<Element, ValuedPlace<Key>>) {
    for (std::size_t i = 0; i < places.size(); ++i) places[i].value = tensor.values[i];
  }
  sort_by_key(std::span(places), bits_of(tensor, modes));
  return places;
}

// Statistics over groups of places with equal `key >> shift`: their numbers of entries, of
// different keys, and their sums of values.
struct Sums {
  Counted entries = {};
  Counted fibers = {};
  Measured values = {};
};
template <typename Element>
Sums sum_groups(const std::vector<Element>& places, int shift) {
  Sums sums;
  std::size_t begin = 0;
  while (begin < places.size()) {
    const auto group = places[begin].key >> shift;
    std::size_t end = begin;
    std::uint64_t fibers = 0;
    double value = 0;
    for (; end < places.size() && places[end].key >> shift == group; ++end) {
      if (end == begin || places[end].key != places[end - 1].key) ++fibers;
      if constexpr (requires { places[end].value; }) value += places[end].value;
    }
    sums.entries.add(end - begin);
    sums.fibers.add(fibers);
    sums.values.add(value);
    begin = end;
  }
  return sums;
}

GroupFeatures to_features(const SparseTensor& tensor, std::vector<int> free, const Sums& sums) {
  const double possible = product(tensor, others(tensor, free));
  GroupFeatures features{.free = std::move(free), .entries = sums.entries.over(possible)};
  if (!tensor.values.empty()) features.values = sums.values.over(possible);
  return features;
}

// A sort of all places. It finds the groups of equal keys, and the groups of equal upper parts.
struct Sorted {
  std::vector<int> key;  // the modes of the key, the first highest
  int coarse = -1;       // number of modes in the upper part, which slices fix; -1: no slices
  bool fine = true;      // whether groups of equal keys are wanted
};
struct Found {
  std::optional<GroupFeatures> fine;
  std::optional<GroupFeatures> coarse;
};

template <typename Element>
Found find_in(const SparseTensor& tensor, const Sorted& sorted) {
  const std::vector<Element> places = sorted_places<Element>(tensor, sorted.key);
  Found found;
  if (sorted.fine) {
    found.fine = to_features(tensor, others(tensor, sorted.key), sum_groups(places, 0));
  }
  if (sorted.coarse >= 0) {
    const auto fixed = std::span(sorted.key).first(static_cast<std::size_t>(sorted.coarse));
    const auto below = std::span(sorted.key).subspan(fixed.size());
    const Sums sums = sum_groups(places, bits_of(tensor, below));
    found.coarse = to_features(tensor, others(tensor, fixed), sums);
    found.coarse->fibers = sums.fibers.over(product(tensor, fixed));
  }
  return found;
}

// Like find_in(), without a sort. Returns nullopt if there are values, or no room for a cell for
// each place.
std::optional<Found> find_in_cells(const SparseTensor& tensor, const Sorted& sorted) {
  if (!tensor.values.empty()) return std::nullopt;
  const auto outer = static_cast<std::size_t>(std::max(sorted.coarse, 0));
  const std::optional<CellSums> sums = count_cells(tensor, sorted.key, outer);
  if (!sums) return std::nullopt;
  Found found;
  if (sorted.fine) {
    found.fine = to_features(tensor, others(tensor, sorted.key), {.entries = sums->cells});
  }
  if (sorted.coarse >= 0) {
    const auto fixed = std::span(sorted.key).first(outer);
    found.coarse = to_features(tensor, others(tensor, fixed), {.entries = sums->blocks});
    found.coarse->fibers = sums->cells_of_block.over(product(tensor, fixed));
  }
  return found;
}

Found find(const SparseTensor& tensor, const Sorted& sorted) {
  if (std::optional<Found> found = find_in_cells(tensor, sorted)) return *std::move(found);
  const int bits = bits_of(tensor, sorted.key);
  if (tensor.values.empty()) {
    return bits > 63   ? find_in<Place<Wide>>(tensor, sorted)
           : bits > 31 ? find_in<Place<std::uint64_t>>(tensor, sorted)
                       : find_in<Place<std::uint32_t>>(tensor, sorted);
  }
  return bits > 63 ? find_in<ValuedPlace<Wide>>(tensor, sorted)
                   : find_in<ValuedPlace<std::uint64_t>>(tensor, sorted);
}

// Returns the sorts that find all fibers and slices: one for each pair of modes. Fibers along mode
// m come from the pair of m and the mode before it.
std::vector<Sorted> sorts_of(const SparseTensor& tensor) {
  const int order = tensor.order();
  std::vector<Sorted> sorts;
  if (order == 1) return {{.key = {}}};
  for (int a = 0; a < order; ++a) {
    for (int b = a + 1; b < order; ++b) {
      const int free[] = {a, b};
      Sorted sorted{.key = others(tensor, free), .coarse = order - 2, .fine = a + 1 == b};
      sorted.key.push_back(a);  // so that the fibers are along b
      sorts.push_back(std::move(sorted));
    }
  }
  // Along mode 0.
  const int first[] = {0};
  sorts.push_back({.key = others(tensor, first)});
  for (int mode = 0; order >= 4 && mode < order; ++mode) {
    sorts.push_back({.key = {mode}});
  }
  // The longest keys come first (of 64, 32 or fewer bits), so that the others reuse their memory.
  std::ranges::stable_sort(sorts, std::greater<>(), [&](const Sorted& sorted) {
    return std::bit_width(static_cast<unsigned>(bits_of(tensor, sorted.key)));
  });
  return sorts;
}

// Returns how many sorts may run at once. In addition to the indices, each needs a key or a cell of
// at most the same size for each entry. With two million entries the whole program takes less than
// 40 bytes an entry.
int sorts_at_once(const SparseTensor& tensor, const std::vector<Sorted>& sorts, int threads) {
  if (!tensor.values.empty()) return threads;
  constexpr int kRoom = 35;                                          // bytes an entry
  const int key = bits_of(tensor, sorts.front().key) > 63 ? 16 : 8;  // of the longest
  const int indices = 4 * tensor.order();
  return std::clamp((kRoom - indices) / key, 1, threads);
}

Expected<void> check_modes(const SparseTensor& tensor, const FeatureOptions& options) {
  std::vector<int> all(tensor.sizes.size());
  std::iota(all.begin(), all.end(), 0);
  if (bits_of(tensor, all) > 127) {
    return make_error(ErrorCode::kBadInput,
                      "the indices of the {} modes take {} bits together, wanted at most 127",
                      tensor.order(), bits_of(tensor, all));
  }
  if (options.along && (*options.along < 0 || *options.along >= tensor.order())) {
    return make_error(ErrorCode::kBadInput, "the tensor has {} modes, got mode {} for the steps",
                      tensor.order(), *options.along + 1);
  }
  return {};
}

}  // namespace

Expected<Features> features_of(const SparseTensor& tensor, const FeatureOptions& options) {
  DYNMO_TRY(check_modes(tensor, options));
  std::vector<int> all(tensor.sizes.size());
  std::iota(all.begin(), all.end(), 0);
  Features features{.sizes = tensor.sizes,
                    .names = tensor.names,
                    .entries = tensor.entries(),
                    .density = static_cast<double>(tensor.entries()) / product(tensor, all)};
  if (!tensor.values.empty()) {
    Measured values;
    for (const double value : tensor.values) values.add(value);
    features.values = values.over(product(tensor, all));
  }
  const std::vector<Sorted> sorts = sorts_of(tensor);
  OrderedTasks<Found> tasks(sorts_at_once(tensor, sorts, std::max(options.threads, 1)));
  const auto take = [&] {
    Found found = tasks.take();
    if (found.fine) {
      auto& list = found.fine->free.size() == 1 ? features.fibers : features.modes;
      list.push_back(std::move(*found.fine));
    }
    if (found.coarse) features.slices.push_back(std::move(*found.coarse));
  };
  for (const Sorted& sorted : sorts) {
    if (tasks.full()) take();
    tasks.add([&tensor, &sorted] { return find(tensor, sorted); });
  }
  while (!tasks.empty()) take();
  const auto by_modes = [](const GroupFeatures& a, const GroupFeatures& b) {
    return a.free < b.free;
  };
  std::ranges::sort(features.fibers, by_modes);
  std::ranges::sort(features.slices, by_modes);
  std::ranges::sort(features.modes, [&](const auto& a, const auto& b) { return by_modes(b, a); });
  if (options.along) {
    DYNMO_ASSIGN(features.along, persistence_of(tensor, *options.along));
    if (*options.along == 0 && tensor.order() == 3 && !tensor.values.empty()) {
      DYNMO_ASSIGN(features.uneven, unevenness_of(tensor));
    }
  }
  return features;
}

}  // namespace dynmo::tensor
