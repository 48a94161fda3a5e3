// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/pruning/select.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/dynamism/pruning/load.h"

namespace dynmo::dynamism {
namespace {

// A key's 31 bits are three digits, highest first.
struct KeyDigit {
  int shift;
  int bits;
  [[nodiscard]] std::size_t values() const { return std::size_t{1} << bits; }
};
constexpr std::array<KeyDigit, 3> kKeyDigits = {{{20, 11}, {10, 10}, {0, 10}}};

constexpr std::uint32_t kInfiniteKey = 0x7F800000;
constexpr std::uint32_t kAnyKey = 0x7FFFFFFF;

// The first message has the number of unprotected keys for each first digit of a finite number,
// then these numbers.
constexpr std::size_t kFiniteDigits = kInfiniteKey >> kKeyDigits[0].shift;
constexpr std::size_t kNotFinite = kFiniteDigits;         // keys that are NaN or Inf
constexpr std::size_t kProtected = kFiniteDigits + 1;     // weights
constexpr std::size_t kHeldMatrices = kFiniteDigits + 2;  // number of matrices
constexpr std::size_t kHeldWeights = kFiniteDigits + 3;   // of them at the start
constexpr std::size_t kFirstMessage = kFiniteDigits + 4;

using Counts = std::vector<std::int64_t>;

// Calls `visit` with each key of a matrix, by offset. Keys are made in blocks, which compilers
// vectorize; counting them is not.
template <typename Visit>
void for_each_key(const PoolMatrix& matrix, Visit visit) {
  std::array<std::uint32_t, 1024> keys;  // NOLINT: written before it is read
  for (std::size_t begin = 0; begin < matrix.kept.size(); begin += keys.size()) {
    const std::size_t size = std::min(keys.size(), matrix.kept.size() - begin);
    const float* weights = matrix.kept.data() + begin;
    for (std::size_t i = 0; i < size; ++i) {
      keys[i] = std::bit_cast<std::uint32_t>(weights[i] / matrix.std) & kAnyKey;
    }
    for (std::size_t i = 0; i < size; ++i) visit(keys[i]);
  }
}

// Adds to `counts` the number of keys of a matrix for each value of `digit`. Only keys up to
// `max_key` whose higher digits are `found` count.
void count_keys(const PoolMatrix& matrix, KeyDigit digit, std::uint32_t found,
                std::uint32_t max_key, std::span<std::int64_t> counts) {
  const int higher = digit.shift + digit.bits;
  const auto last = static_cast<std::uint32_t>(digit.values() - 1);
  for_each_key(matrix, [=](std::uint32_t key) {
    if (key <= max_key && key >> higher == found) ++counts[key >> digit.shift & last];
  });
}

// A search, digit by digit, for the `rank`-th largest key.
struct RadixSelect {
  std::int64_t rank = 0;  // among the keys with the digits found
  std::uint32_t found = 0;
  std::int64_t equal = 0;  // number of keys with the digits found

  // Finds the next digit. `counts` has the number of keys for each value of it. Requires at least
  // `rank` keys.
  void descend(KeyDigit digit, std::span<const std::int64_t> counts) {
    std::size_t value = counts.size() - 1;
    while (counts[value] < rank) {
      DYNMO_CHECK(value > 0, "{} more keys in a histogram", rank);
      rank -= counts[value--];
    }
    equal = counts[value];
    found = found << digit.bits | static_cast<std::uint32_t>(value);
  }
};

// Selects, in a matrix or the pool, the keys above `key` and the first `ties` keys equal to it.
struct KeyCut {
  std::uint32_t key = kInfiniteKey;
  std::int64_t ties = 0;
};

// Returns the cut that keeps the `size` largest keys of a matrix. `first` counts the first digits
// of its keys, and loses those of the keys that are kept.
KeyCut protect(const PoolMatrix& matrix, std::int64_t size, std::span<std::int64_t> first) {
  if (size == 0) return {};
  RadixSelect search = {.rank = size};
  search.descend(kKeyDigits[0], first);
  std::fill(first.begin() + search.found + 1, first.end(), 0);
  first[search.found] -= search.rank;
  for (const KeyDigit digit : {kKeyDigits[1], kKeyDigits[2]}) {
    Counts counts(digit.values());
    count_keys(matrix, digit, search.found, kAnyKey, counts);
    search.descend(digit, counts);
  }
  return {.key = search.found, .ties = search.rank};
}

void require_valid(const PruningEvent& event, std::span<const PoolMatrix> matrices) {
  DYNMO_CHECK(event.sparsity >= 0 && event.sparsity <= 1, "a sparsity in [0, 1], got {}",
              event.sparsity);
  DYNMO_CHECK(event.max_sparsity >= 0 && event.max_sparsity <= 1,
              "a max_sparsity in [0, 1], got {}", event.max_sparsity);
  std::vector<bool> seen(static_cast<std::size_t>(event.matrices));
  for (const PoolMatrix& m : matrices) {
    DYNMO_CHECK(m.index >= 0 && m.index < event.matrices, "matrix {} of {}", m.index,
                event.matrices);
    DYNMO_CHECK(!seen[static_cast<std::size_t>(m.index)], "matrix {} once", m.index);
    seen[static_cast<std::size_t>(m.index)] = true;
    DYNMO_CHECK(m.weights <= std::numeric_limits<std::int32_t>::max() &&
                    std::cmp_less_equal(m.kept.size(), m.weights),
                "matrix {}: {} kept of {} weights", m.index, m.kept.size(), m.weights);
    DYNMO_CHECK(m.std > 0 && std::isfinite(m.std), "matrix {}: a std of {}", m.index, m.std);
  }
}

Expected<Counts> summed(const SumOverRanks& sum, Counts counts) {
  const std::size_t size = counts.size();
  DYNMO_ASSIGN(Counts all, sum(std::move(counts)));
  DYNMO_CHECK(all.size() == size, "a sum of {} numbers, got {}", size, all.size());
  return all;
}

// Returns this rank's part of the first message. Adds to `cuts` the protected keys of each matrix.
Counts first_message(const PruningEvent& event, std::span<const PoolMatrix> matrices,
                     std::vector<KeyCut>& cuts) {
  Counts message(kFirstMessage);
  for (const PoolMatrix& m : matrices) {
    Counts first(kKeyDigits[0].values());
    count_keys(m, kKeyDigits[0], 0, kAnyKey, first);
    message[kNotFinite] += std::accumulate(first.begin() + kFiniteDigits, first.end(), 0LL);
    const std::int64_t size = std::min(protected_weights(event.max_sparsity, m.weights),
                                       static_cast<std::int64_t>(m.kept.size()));
    cuts.push_back(protect(m, size, first));
    for (std::size_t i = 0; i < kFiniteDigits; ++i) message[i] += first[i];
    message[kProtected] += size;
    message[kHeldMatrices] += 1;
    message[kHeldWeights] += m.weights;
  }
  return message;
}

// Returns the error that names the first matrix with NaN or Inf. Only in this case the ranks
// exchange one more message.
Error not_finite(const PruningEvent& event, std::span<const PoolMatrix> matrices,
                 const SumOverRanks& sum) {
  Counts by_matrix(static_cast<std::size_t>(event.matrices));
  for (const PoolMatrix& m : matrices) {
    for_each_key(m, [&count = by_matrix[static_cast<std::size_t>(m.index)]](std::uint32_t key) {
      if (key >= kInfiniteKey) ++count;
    });
  }
  const Expected<Counts> all = summed(sum, std::move(by_matrix));
  if (!all) return all.error();
  const auto first = std::find_if(all->begin(), all->end(), [](auto count) { return count > 0; });
  return make_error(ErrorCode::kBadInput,
                    "pruning: matrix {} of the pool has {} weights whose |w| / std is NaN or Inf, "
                    "wanted finite ones: the training has diverged",
                    first - all->begin(), *first);
}

Expected<void> check_counts(const PruningEvent& event, const Counts& counts) {
  if (counts[kHeldMatrices] != event.matrices || counts[kHeldWeights] != event.weights) {
    return make_error(ErrorCode::kInternal,
                      "pruning: the ranks hold {} matrices of {} weights, wanted the pool's {} "
                      "of {}, each once",
                      counts[kHeldMatrices], counts[kHeldWeights], event.matrices, event.weights);
  }
  const std::int64_t wanted = weights_left(event.sparsity, event.weights);
  if (counts[kProtected] > wanted) {
    return make_error(ErrorCode::kBadInput,
                      "pruning.max_sparsity is {} and protects {} weights in {} matrices, more "
                      "than the {} of {} that a sparsity of {} leaves: raise max_sparsity or "
                      "lower final_sparsity",
                      event.max_sparsity, counts[kProtected], event.matrices, wanted, event.weights,
                      event.sparsity);
  }
  return {};
}

// Finds the threshold of the unprotected weights of the pool. `counts` is the sum of the first
// messages.
Expected<void> find_threshold(std::span<const PoolMatrix> matrices, std::span<const KeyCut> cuts,
                              const Counts& counts, const SumOverRanks& sum, Selection& selection) {
  const auto first = std::span(counts).first(kFiniteDigits);
  RadixSelect search = {.rank = selection.left - counts[kProtected]};
  const std::int64_t unprotected = std::accumulate(first.begin(), first.end(), std::int64_t{0});
  if (search.rank == 0 || search.rank >= unprotected) {
    selection.threshold = search.rank == 0 ? kInfiniteKey : 0;
    selection.left = counts[kProtected] + std::min(search.rank, unprotected);
    return {};
  }
  search.descend(kKeyDigits[0], first);
  for (const KeyDigit digit : {kKeyDigits[1], kKeyDigits[2]}) {
    Counts own(digit.values());
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      // Keys above the cut are protected, and the first ones equal to it.
      const KeyCut& cut = cuts[i];
      count_keys(matrices[i], digit, search.found, cut.key, own);
      if (cut.key >> (digit.shift + digit.bits) == search.found) {
        own[cut.key >> digit.shift & (digit.values() - 1)] -= cut.ties;
      }
    }
    DYNMO_ASSIGN(const Counts all, summed(sum, std::move(own)));
    search.descend(digit, all);
  }
  selection.threshold = search.found;
  selection.ties = search.rank;
  selection.tied = search.equal;
  return {};
}

// Returns, for each of this rank's matrices, how many of the unprotected weights equal to the
// threshold stay.
Expected<Counts> share_ties(const PruningEvent& event, std::span<const PoolMatrix> matrices,
                            std::span<const KeyCut> cuts, const SumOverRanks& sum,
                            const Selection& selection) {
  Counts shares;
  if (selection.ties == selection.tied) {  // all of them, up to a matrix's limit
    for (const PoolMatrix& m : matrices) shares.push_back(m.weights);
    return shares;
  }
  Counts by_matrix(static_cast<std::size_t>(event.matrices));
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    if (selection.threshold > cuts[i].key) continue;
    std::int64_t equal = 0;
    for_each_key(matrices[i], [&](std::uint32_t key) { equal += key == selection.threshold; });
    by_matrix[static_cast<std::size_t>(matrices[i].index)] =
        equal - (selection.threshold == cuts[i].key ? cuts[i].ties : 0);
  }
  DYNMO_ASSIGN(Counts all, summed(sum, std::move(by_matrix)));
  std::int64_t rest = selection.ties;
  for (std::int64_t& share : all) {
    share = std::min(share, rest);
    rest -= share;
  }
  for (const PoolMatrix& m : matrices) shares.push_back(all[static_cast<std::size_t>(m.index)]);
  return shares;
}

// Returns the union of the protected keys and those that the threshold keeps. Among equal keys the
// protected ones are first in their matrix, so the ties add up.
KeyCut union_of(KeyCut protection, KeyCut threshold) {
  if (threshold.key > protection.key) return protection;
  if (threshold.key == protection.key) threshold.ties += protection.ties;
  return threshold;
}

std::vector<std::int32_t> positions_in(const PoolMatrix& matrix, KeyCut cut) {
  std::vector<std::int32_t> positions;
  std::int32_t position = 0;
  for_each_key(matrix, [&](std::uint32_t key) {
    bool stays = key > cut.key;
    if (key == cut.key && cut.ties > 0) {
      stays = true;
      --cut.ties;
    }
    if (stays) positions.push_back(position);
    ++position;
  });
  return positions;
}

}  // namespace

std::int64_t weights_left(double sparsity, std::int64_t weights) {
  return std::llround((1 - sparsity) * static_cast<double>(weights));
}

std::int64_t protected_weights(double max_sparsity, std::int64_t weights) {
  const auto all = static_cast<double>(weights);
  std::int64_t gone = std::llround(max_sparsity * all);
  if (static_cast<double>(gone) / all > max_sparsity) --gone;
  return weights - gone;
}

PruningEvent event_at(const PruningOptions& options, std::int64_t step, std::int64_t matrices,
                      std::int64_t weights) {
  return {.sparsity = sparsity_at(options, step),
          .max_sparsity = options.max_sparsity,
          .matrices = matrices,
          .weights = weights};
}

Expected<Selection> keep_largest(const PruningEvent& event, std::span<const PoolMatrix> matrices,
                                 const SumOverRanks& sum) {
  require_valid(event, matrices);
  std::vector<KeyCut> cuts;
  DYNMO_ASSIGN(const Counts counts, summed(sum, first_message(event, matrices, cuts)));
  if (counts[kNotFinite] > 0) return not_finite(event, matrices, sum);
  DYNMO_TRY(check_counts(event, counts));
  Selection selection;
  selection.left = weights_left(event.sparsity, event.weights);
  DYNMO_TRY(find_threshold(matrices, cuts, counts, sum, selection));
  DYNMO_ASSIGN(const Counts shares, share_ties(event, matrices, cuts, sum, selection));
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const KeyCut threshold = {.key = selection.threshold, .ties = shares[i]};
    selection.stay.push_back(positions_in(matrices[i], union_of(cuts[i], threshold)));
  }
  return selection;
}

Expected<Digest> digest_of_masks(std::span<const MatrixMask> masks, const SumOverRanks& sum) {
  constexpr std::uint64_t kPart = 0xFFFFFFFF;  // parts of 32 bits, so that no sum overflows
  std::array<std::uint64_t, 5> sums = {masks.size(), 0, 0, 0, 0};
  for (const MatrixMask& mask : masks) {
    const std::array<std::int64_t, 2> shape = {mask.index, mask.weights};
    Digester digester;
    digester.update(std::as_bytes(std::span(shape)));
    digester.update(std::as_bytes(std::span(mask.bits)));
    const auto [high, low] = digester.digest();
    sums[1] += high >> 32;
    sums[2] += high & kPart;
    sums[3] += low >> 32;
    sums[4] += low & kPart;
  }
  std::vector<std::int64_t> message;
  for (const std::uint64_t part : sums) message.push_back(static_cast<std::int64_t>(part & kPart));
  DYNMO_ASSIGN(const std::vector<std::int64_t> all, sum(std::move(message)));
  DYNMO_CHECK(all.size() == sums.size(), "a sum of {} numbers, got {}", sums.size(), all.size());
  std::transform(all.begin(), all.end(), sums.begin(),
                 [](std::int64_t part) { return static_cast<std::uint64_t>(part) & kPart; });
  return digest_of(std::as_bytes(std::span(sums)));
}

}  // namespace dynmo::dynamism
