// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/pruning/select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "dynmo/core/bit_mask.h"
#include "dynmo/core/rng.h"
#include "dynmo/dynamism/pruning/load.h"
#include "tests/support/samples.h"

namespace dynmo::dynamism {
namespace {

// A matrix of a test: all its weights, and the offsets of those that are left.
struct WholeMatrix {
  float std = 1;
  std::vector<float> weights;
  std::vector<std::int32_t> left;
};
using Pool = std::vector<WholeMatrix>;
// For each matrix of the pool, the offsets that are left.
using Left = std::vector<std::vector<std::int32_t>>;

std::int64_t size_of(const Pool& pool) {
  std::int64_t size = 0;
  for (const WholeMatrix& m : pool) size += std::ssize(m.weights);
  return size;
}

std::int64_t left_in(const Pool& pool) {
  std::int64_t size = 0;
  for (const WholeMatrix& m : pool) size += std::ssize(m.left);
  return size;
}

Left left_of(const Pool& pool) {
  Left left;
  for (const WholeMatrix& m : pool) left.push_back(m.left);
  return left;
}

PruningEvent event_of(const Pool& pool, double sparsity, double max_sparsity = 0.98) {
  return {.sparsity = sparsity,
          .max_sparsity = max_sparsity,
          .matrices = std::ssize(pool),
          .weights = size_of(pool)};
}

WholeMatrix dense_matrix(std::vector<float> weights, float std_of = 1) {
  WholeMatrix m = {.std = std_of, .weights = std::move(weights), .left = {}};
  m.left.resize(m.weights.size());
  std::iota(m.left.begin(), m.left.end(), 0);
  return m;
}

// Draws some kinds of numbers, so that keys tie, are 0 or denormal, or spread over all exponents.
float drawn_weight(Rng& rng, std::uint64_t kind) {
  const float sign = rng.below(2) == 0 ? 1.0F : -1.0F;
  switch (kind) {
    case 0:
      return static_cast<float>(rng.normal());
    case 1:
      return sign * static_cast<float>(rng.below(3));
    case 2:  // denormals and both zeros
      return sign * std::bit_cast<float>(static_cast<std::uint32_t>(rng.below(4)));
    case 3:  // every exponent that stays finite when it is divided by what drawn_pool draws
      return sign * std::bit_cast<float>(static_cast<std::uint32_t>(rng.below(0x70000000)));
    case 4:  // keys that differ in their last digit only
      return sign * std::bit_cast<float>(0x3F800000 + static_cast<std::uint32_t>(rng.below(5)));
    default:
      return drawn_weight(rng, rng.below(5));
  }
}

Pool drawn_pool(Rng& rng) {
  Pool pool;
  const std::uint64_t matrices = 1 + rng.below(10);
  const std::uint64_t kind = rng.below(8);  // of all matrices, or each of its own
  for (std::uint64_t i = 0; i < matrices; ++i) {
    std::vector<float> weights(1 + rng.below(120));
    const std::uint64_t own = kind < 6 ? kind : rng.below(6);
    for (float& w : weights) w = drawn_weight(rng, own);
    pool.push_back(
        dense_matrix(std::move(weights),
                     rng.below(2) == 0 ? 1 : static_cast<float>(std::exp(3 * rng.normal()))));
    if (rng.below(3) == 0) {
      const std::uint64_t gone = rng.below(100);
      std::erase_if(pool.back().left, [&](std::int32_t) { return rng.below(100) < gone; });
    }
  }
  return pool;
}

// The rule by sorting; nullopt where more is protected than is wanted.
std::optional<Left> by_sorting(const Pool& pool, const PruningEvent& event) {
  using Entry = std::tuple<float, std::size_t, std::int32_t>;  // -key, matrix, offset
  Left left(pool.size());
  std::vector<Entry> rest;
  std::int64_t wanted = std::llround((1 - event.sparsity) * static_cast<double>(event.weights));
  for (std::size_t i = 0; i < pool.size(); ++i) {
    std::vector<Entry> entries;
    for (const std::int32_t o : pool[i].left) {
      const float weight = pool[i].weights[static_cast<std::size_t>(o)];
      entries.emplace_back(-(std::abs(weight) / pool[i].std), i, o);
    }
    std::sort(entries.begin(), entries.end());
    std::int64_t size = 0;  // the least that keeps the matrix at max_sparsity or below
    const auto all = static_cast<double>(pool[i].weights.size());
    while ((all - static_cast<double>(size)) / all > event.max_sparsity) ++size;
    size = std::min(size, std::ssize(entries));
    for (const Entry& e : std::span(entries).first(static_cast<std::size_t>(size))) {
      left[i].push_back(std::get<2>(e));
    }
    wanted -= size;
    rest.insert(rest.end(), entries.begin() + size, entries.end());
  }
  if (wanted < 0) return std::nullopt;
  std::sort(rest.begin(), rest.end());
  rest.resize(std::min(rest.size(), static_cast<std::size_t>(wanted)));
  for (const auto& [key, matrix, offset] : rest) left[matrix].push_back(offset);
  for (auto& offsets : left) std::sort(offsets.begin(), offsets.end());
  return left;
}

// Ranks as threads whose sums wait for each other.
class SummingRanks {
 public:
  explicit SummingRanks(int ranks)
      : messages_(static_cast<std::size_t>(ranks)), bytes_(messages_.size()), barrier_(ranks) {}

  // Calls `body` with each rank and its sum, and returns when all have.
  void run(const std::function<void(std::size_t, const SumOverRanks&)>& body) {
    std::vector<std::jthread> threads;
    for (std::size_t rank = 1; rank < messages_.size(); ++rank) {
      threads.emplace_back([this, rank, &body] { run_rank(rank, body); });
    }
    run_rank(0, body);
  }
  // The most that a rank has sent.
  [[nodiscard]] std::size_t bytes() const { return std::ranges::max(bytes_); }
  [[nodiscard]] std::size_t largest() const { return largest_; }  // message of rank 0

 private:
  // A check that fails ends the program; other ranks would wait for this one.
  void run_rank(std::size_t rank,
                const std::function<void(std::size_t, const SumOverRanks&)>& body) noexcept {
    body(rank,
         [this, rank](std::vector<std::int64_t> message) { return sum(rank, std::move(message)); });
    barrier_.arrive_and_drop();  // so that others do not wait for a rank that failed
  }

  Expected<std::vector<std::int64_t>> sum(std::size_t rank, std::vector<std::int64_t> message) {
    bytes_[rank] += 8 * message.size();
    if (rank == 0) largest_ = std::max(largest_, 8 * message.size());
    messages_[rank] = std::move(message);
    barrier_.arrive_and_wait();
    if (rank == 0) add_up();
    barrier_.arrive_and_wait();
    if (total_.size() != messages_[rank].size()) {
      return make_error(ErrorCode::kPeerLost, "messages of other lengths");
    }
    return total_;
  }

  void add_up() {
    total_ = messages_[0];
    for (std::size_t rank = 1; rank < messages_.size(); ++rank) {
      if (messages_[rank].size() != total_.size()) return total_.clear();
      std::transform(total_.begin(), total_.end(), messages_[rank].begin(), total_.begin(),
                     std::plus<>());
    }
  }

  std::vector<std::vector<std::int64_t>> messages_;
  std::vector<std::int64_t> total_;
  std::vector<std::size_t> bytes_;
  std::size_t largest_ = 0;
  std::barrier<> barrier_;
};

// The result of an event on ranks; the same on all of them.
struct RanksOutcome {
  Expected<Selection> selection = Selection{};  // rank 0's; `stay` is of its matrices
  Digest digest;
  std::size_t bytes = 0;
  std::size_t largest = 0;
};

// All ranks have to agree on this text.
std::string said_of(const RanksOutcome& outcome) {
  if (!outcome.selection) return outcome.selection.error().message;
  const Selection& s = *outcome.selection;
  return fmt::format("{} of {} ties at {:#x}, {} left", s.ties, s.tied, s.threshold, s.left);
}

// Prunes the pool on ranks, each of which holds the matrices that `rank_of` gives it.
RanksOutcome prune(Pool& pool, const PruningEvent& event, const std::vector<std::size_t>& rank_of,
                   int ranks) {
  SummingRanks threads(ranks);
  std::vector<RanksOutcome> outcomes(static_cast<std::size_t>(ranks));
  threads.run([&](std::size_t rank, const SumOverRanks& sum) {
    std::vector<PoolMatrix> own;
    std::vector<std::vector<float>> kept(pool.size());
    for (std::size_t i = pool.size(); i-- > 0;) {  // any order will do
      if (rank_of[i] != rank) continue;
      for (const auto o : pool[i].left) {
        kept[i].push_back(pool[i].weights[static_cast<std::size_t>(o)]);
      }
      own.push_back({.index = static_cast<std::int64_t>(i),
                     .weights = std::ssize(pool[i].weights),
                     .std = pool[i].std,
                     .kept = kept[i]});
    }
    outcomes[rank].selection = keep_largest(event, own, sum);
    if (!outcomes[rank].selection) return;
    std::vector<MatrixMask> masks;
    for (std::size_t i = 0; i < own.size(); ++i) {
      auto& left = pool[static_cast<std::size_t>(own[i].index)].left;
      std::vector<std::int32_t> offsets;
      for (const auto p : outcomes[rank].selection->stay[i]) {
        offsets.push_back(left[static_cast<std::size_t>(p)]);
      }
      left = std::move(offsets);
      masks.push_back({own[i].index, own[i].weights, pack_mask(left, own[i].weights)});
    }
    outcomes[rank].digest = *digest_of_masks(masks, sum);
  });
  for (const RanksOutcome& other : outcomes) {
    EXPECT_EQ(other.digest, outcomes[0].digest);
    EXPECT_EQ(said_of(other), said_of(outcomes[0]));
  }
  outcomes[0].bytes = threads.bytes();
  outcomes[0].largest = threads.largest();
  return outcomes[0];
}

RanksOutcome prune_alone(Pool& pool, const PruningEvent& event) {
  return prune(pool, event, std::vector<std::size_t>(pool.size()), 1);
}

// Half of them contiguous, as stages are.
std::vector<std::size_t> drawn_ranks(Rng& rng, std::size_t matrices, int ranks) {
  std::vector<std::size_t> rank_of(matrices);
  for (auto& rank : rank_of) rank = rng.below(static_cast<std::uint64_t>(ranks));
  if (rng.below(2) == 0) std::sort(rank_of.begin(), rank_of.end());
  return rank_of;
}

TEST(PruningSelect, KeepsWhatSortingKeepsOnAnyRanks) {
  int refused = 0;
  int shared_ties = 0;
  int all_stay = 0;
  for (std::uint64_t seed = 0; seed < samples(1000U); ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(mix_key({0x5345, seed}));
    const Pool pool = drawn_pool(rng);
    const PruningEvent event =
        event_of(pool, rng.below(10) == 0 ? static_cast<double>(rng.below(2)) : rng.uniform(),
                 rng.below(4) == 0 ? 1 : 0.5 + 0.5 * rng.uniform());
    const std::optional<Left> sorted = by_sorting(pool, event);
    Pool alone = pool;
    const RanksOutcome outcome = prune_alone(alone, event);
    Pool shared = pool;
    const int ranks = 1 + static_cast<int>(seed % 4);
    const RanksOutcome on_ranks = prune(shared, event, drawn_ranks(rng, pool.size(), ranks), ranks);
    ASSERT_EQ(outcome.selection.has_value(), sorted.has_value());
    ASSERT_EQ(on_ranks.selection.has_value(), sorted.has_value());
    if (!sorted) {
      EXPECT_EQ(outcome.selection.error(), on_ranks.selection.error());
      ++refused;
      continue;
    }
    ASSERT_EQ(left_of(alone), *sorted);
    ASSERT_EQ(left_of(shared), *sorted) << ranks << " ranks";
    ASSERT_EQ(outcome.digest, on_ranks.digest);
    ASSERT_EQ(outcome.selection->threshold, on_ranks.selection->threshold);
    ASSERT_EQ(outcome.selection->left, left_in(alone));
    shared_ties += outcome.selection->ties < outcome.selection->tied ? 1 : 0;
    all_stay += outcome.selection->threshold == 0 && outcome.selection->tied == 0 ? 1 : 0;
  }
  EXPECT_GT(refused, samples(50));
  EXPECT_LT(refused, samples(500));
  EXPECT_GT(shared_ties, samples(100));
  EXPECT_GT(all_stay, samples(20));
}

// Seven matrices a block; those of index 3 and 6 are initialised smaller, as output matrices are.
// `keys` says whether their keys make up for that.
enum class Keys { kScaled, kRaw };
Pool transformer_pool(std::uint64_t blocks, Keys keys, std::size_t min_weights) {
  Pool pool;
  for (std::uint64_t i = 0; i < 7 * blocks; ++i) {
    Rng rng(mix_key({0x5346, i}));
    const float std_of = i % 7 == 3 || i % 7 == 6 ? 0.1F : 1.0F;
    std::vector<float> weights(min_weights + rng.below(50));
    for (float& w : weights) w = std_of * static_cast<float>(rng.normal());
    pool.push_back(dense_matrix(std::move(weights), keys == Keys::kScaled ? std_of : 1));
  }
  return pool;
}

TEST(PruningSelect, DefaultScheduleLeavesExactlyWhatItSays) {
  const PruningOptions options;
  const std::array<double, 5> sparsities = {0, 0.5203, 0.7875, 0.8859, 0.9};
  for (const Keys keys : {Keys::kScaled, Keys::kRaw}) {
    Pool pool = transformer_pool(12, keys, 1000);
    const auto all = size_of(pool);
    int at_the_cap = 0;
    for (std::size_t i = 0; i < sparsities.size(); ++i) {
      const std::int64_t step = options.start + static_cast<std::int64_t>(i) * options.every;
      const PruningEvent event = event_at(options, step, std::ssize(pool), all);
      EXPECT_EQ(event.sparsity, sparsity_at(options, step));
      EXPECT_NEAR(event.sparsity, sparsities[i], 5e-5);
      const Left before = left_of(pool);
      const RanksOutcome outcome = prune_alone(pool, event);
      ASSERT_TRUE(outcome.selection) << outcome.selection.error().message;
      EXPECT_EQ(left_in(pool), std::llround((1 - event.sparsity) * static_cast<double>(all)));
      EXPECT_EQ(outcome.selection->left, left_in(pool));
      for (std::size_t m = 0; m < pool.size(); ++m) {
        EXPECT_TRUE(std::ranges::includes(before[m], pool[m].left)) << "matrix " << m;
        const std::int64_t weights = std::ssize(pool[m].weights);
        const std::int64_t gone = weights - std::ssize(pool[m].left);
        EXPECT_LE(static_cast<double>(gone) / static_cast<double>(weights), 0.98);
        at_the_cap += weights - gone == protected_weights(0.98, weights) ? 1 : 0;
      }
    }
    EXPECT_EQ(at_the_cap > 0, keys == Keys::kRaw);  // what the cap is for
  }
}

TEST(PruningSelect, MasksAreTheSameOnAThousandCuts) {
  const PruningOptions options;
  Pool pool = transformer_pool(4, Keys::kRaw, 50);
  for (WholeMatrix& m : pool) {  // so that keys tie in every event
    for (float& w : m.weights) w = std::round(16 * w) / 16;
  }
  for (std::uint64_t i = 1; i <= 4; ++i) {
    const PruningEvent event =
        event_at(options, options.start + static_cast<std::int64_t>(i) * options.every,
                 std::ssize(pool), size_of(pool));
    Pool alone = pool;
    const RanksOutcome outcome = prune_alone(alone, event);
    ASSERT_TRUE(outcome.selection) << outcome.selection.error().message;
    ASSERT_LT(outcome.selection->ties, outcome.selection->tied);
    for (std::uint64_t seed = 0; seed < samples(250U); ++seed) {
      Rng rng(mix_key({0x5347, i, seed}));
      const int ranks = 1 + static_cast<int>(seed % 4);
      Pool shared = pool;
      const Digest digest =
          prune(shared, event, drawn_ranks(rng, pool.size(), ranks), ranks).digest;
      ASSERT_EQ(digest, outcome.digest) << "event " << i << ", seed " << seed;
      ASSERT_EQ(left_of(shared), left_of(alone)) << "event " << i << ", seed " << seed;
    }
    pool = alone;
  }
}

TEST(PruningSelect, SendsAtMost64KiB) {
  Pool pool;
  for (int i = 0; i < 4095; ++i) {
    pool.push_back(dense_matrix(std::vector<float>(50, 1.0F)));
  }
  Rng rng(mix_key({0x5348}));
  const auto outcome = prune(pool, event_of(pool, 0.5), drawn_ranks(rng, pool.size(), 4), 4);
  ASSERT_TRUE(outcome.selection);
  EXPECT_LT(outcome.selection->ties, outcome.selection->tied);  // so that ties were counted
  EXPECT_EQ(outcome.bytes, 16'352U + 8192 + 8192 + 8 * 4095 + 40);
  EXPECT_LE(outcome.bytes, 64U << 10);
  Pool small = {dense_matrix({1, 2, 3}), dense_matrix({1, 2, 3})};
  EXPECT_EQ(prune_alone(small, event_of(small, 0.5)).largest, 16'352U);
}

TEST(PruningSelect, RanksMayHoldNothing) {
  Pool pool = {dense_matrix({4, -3, 2, -1})};
  const auto outcome = prune(pool, event_of(pool, 0.5), {2}, 4);
  ASSERT_TRUE(outcome.selection);
  EXPECT_EQ(pool[0].left, (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(outcome.selection->threshold, std::bit_cast<std::uint32_t>(3.0F));
}

// Equal keys go by (matrix, offset), also where one of them is protected.
TEST(PruningSelect, TiesGoToLowerMatricesAndOffsets) {
  Pool pool(3, dense_matrix(std::vector<float>(10, -0.5F)));
  ASSERT_TRUE(prune_alone(pool, event_of(pool, 0.5, 0.9)).selection);
  const std::vector<std::int32_t> all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  EXPECT_EQ(left_of(pool), (Left{all, {0, 1, 2, 3}, {0}}));
}

// A weight of 0.2 in a matrix of std 0.1 is larger than one of 1 in a matrix of std 1.
TEST(PruningSelect, StdsScaleTheKeys) {
  Pool pool = {dense_matrix({1, 1}), dense_matrix({0.2F, 0.2F}, 0.1F)};
  ASSERT_TRUE(prune_alone(pool, event_of(pool, 0.5, 1)).selection);
  EXPECT_EQ(left_of(pool), (Left{{}, {0, 1}}));
}

TEST(PruningSelect, WhatIsGoneStaysGone) {
  Pool pool = {dense_matrix({5, 4, 3, 2, 1, 6, 7, 8}), dense_matrix({1, 2, 3, 4})};
  pool[0].left = {1, 4};
  const Left before = left_of(pool);
  const auto outcome = prune_alone(pool, event_of(pool, 0.1));
  ASSERT_TRUE(outcome.selection);
  EXPECT_EQ(left_of(pool), before);
  EXPECT_EQ(outcome.selection->threshold, 0U);
  EXPECT_EQ(outcome.selection->left, 6);
}

TEST(PruningSelect, ProtectionKeepsAMatrixAtItsCap) {
  EXPECT_EQ(protected_weights(0.98, 100), 2);
  EXPECT_EQ(protected_weights(0.98, 101), 3);
  EXPECT_EQ(protected_weights(0.98, 50), 1);
  EXPECT_EQ(protected_weights(0.98, 1), 1);
  EXPECT_EQ(protected_weights(1, 7), 0);
  EXPECT_EQ(protected_weights(0, 7), 7);
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    Rng rng(mix_key({0x5349, seed}));
    const double cap = static_cast<double>(rng.below(1000)) / 1000;
    const auto all = static_cast<std::int64_t>(1 + rng.below(rng.below(2) == 0 ? 1000 : 1U << 31));
    const auto size = static_cast<double>(all);
    const auto gone = static_cast<double>(all - protected_weights(cap, all));
    ASSERT_LE(gone / size, cap) << "seed " << seed;
    ASSERT_GT((gone + 1) / size, cap) << "seed " << seed;
  }
}

TEST(PruningSelect, NotFiniteKeysNameTheMatrixOnAllRanks) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  // The last one overflows when it is divided.
  for (const auto& [weight, std_of] : std::vector<std::pair<float, float>>{
           {nan, 1}, {-infinity, 1}, {-nan, 0.1F}, {1e38F, 1e-6F}}) {
    Pool pool(5, dense_matrix({3, 2, 1, 4}));
    pool[3] = dense_matrix({1, weight, weight, 0}, std_of);
    pool[4] = dense_matrix({nan, nan, nan, nan});
    const auto outcome = prune(pool, event_of(pool, 0.5, 0.5), {0, 1, 2, 1, 0}, 3);
    ASSERT_FALSE(outcome.selection);
    EXPECT_EQ(outcome.selection.error(),
              (Error{ErrorCode::kBadInput,
                     "pruning: matrix 3 of the pool has 2 weights whose |w| / std is NaN or Inf, "
                     "wanted finite ones: the training has diverged"}));
  }
}

TEST(PruningSelect, TooMuchProtectionNamesTheKeys) {
  Pool pool(4, dense_matrix({3, 2, 1, 4}));
  const auto outcome = prune(pool, event_of(pool, 0.9), {0, 1, 1, 0}, 2);
  ASSERT_FALSE(outcome.selection);
  EXPECT_EQ(outcome.selection.error(),
            (Error{ErrorCode::kBadInput,
                   "pruning.max_sparsity is 0.98 and protects 4 weights in 4 matrices, more than "
                   "the 2 of 16 that a sparsity of 0.9 leaves: raise max_sparsity or lower "
                   "final_sparsity"}));
}

TEST(PruningSelect, RanksThatDoNotHoldThePoolAreFound) {
  Pool pool(2, dense_matrix({3, 2, 1, 4}));
  const auto outcome = prune(pool, event_of(pool, 0.5), {0, 7}, 2);  // nobody holds matrix 1
  ASSERT_FALSE(outcome.selection);
  EXPECT_EQ(outcome.selection.error(),
            (Error{ErrorCode::kInternal,
                   "pruning: the ranks hold 1 matrices of 4 weights, wanted the pool's 2 of 8, "
                   "each once"}));
}

// Whichever message fails.
TEST(PruningSelect, ErrorsOfTheSumComeBack) {
  const std::vector<float> weights(100, 1.0F);
  const std::vector<PoolMatrix> own = {{.index = 0, .weights = 100, .std = 1, .kept = weights}};
  const PruningEvent event = {.sparsity = 0.5, .max_sparsity = 0.98, .matrices = 1, .weights = 100};
  for (int works = 0; works < 4; ++works) {
    int calls = 0;
    const auto sum = [&](std::vector<std::int64_t> message) -> Expected<std::vector<std::int64_t>> {
      if (calls++ == works) return make_error(ErrorCode::kPeerLost, "rank 1 is gone");
      return message;
    };
    const auto selection = keep_largest(event, own, sum);
    ASSERT_FALSE(selection) << works;
    EXPECT_EQ(selection.error(), (Error{ErrorCode::kPeerLost, "rank 1 is gone"}));
  }
}

}  // namespace
}  // namespace dynmo::dynamism
