// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include "dynmo/data/byte_pairs_impl.h"

namespace dynmo::data {
namespace {

constexpr std::size_t kShortBytes = 48;  // up to which a scan is faster than a heap
constexpr std::size_t kCached = std::size_t{1} << 14;
constexpr std::int32_t kNoRank = std::numeric_limits<std::int32_t>::max();

std::uint64_t pair_of(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
}

std::uint64_t mixed(std::uint64_t pair) { return pair * 0x9E3779B97F4A7C15ULL; }

// Puts the lowest rank on top, and among equal ones the leftmost place.
struct ComesLater {
  bool operator()(const BytePairs::Scratch::Candidate& a,
                  const BytePairs::Scratch::Candidate& b) const {
    return std::pair(a.rank, a.place) > std::pair(b.rank, b.place);
  }
};

}  // namespace

BytePairs::BytePairs(const std::array<std::int32_t, 256>& bytes, std::span<const TokenMerge> merges,
                     std::unordered_map<std::string, std::int32_t> whole)
    : bytes_(bytes), whole_(std::move(whole)) {
  const std::size_t size = std::bit_ceil(2 * merges.size() + 2);
  slots_.resize(size);
  shift_ = 64 - std::countr_zero(size);
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const std::uint64_t pair = pair_of(merges[rank].left, merges[rank].right);
    std::size_t i = mixed(pair) >> shift_;
    while (slots_[i].made >= 0 && slots_[i].pair != pair) i = (i + 1) & (size - 1);
    slots_[i] = {.pair = pair, .rank = static_cast<std::int32_t>(rank), .made = merges[rank].made};
  }
}

const BytePairs::Slot* BytePairs::find(std::int32_t left, std::int32_t right) const {
  const std::uint64_t pair = pair_of(left, right);
  for (std::size_t i = mixed(pair) >> shift_;; i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i].made < 0) return nullptr;
    if (slots_[i].pair == pair) return &slots_[i];
  }
}

void BytePairs::encode(std::string_view piece, Scratch& scratch,
                       std::vector<std::int32_t>& tokens) const {
  using Cached = Scratch::Cached;
  if (piece.empty()) return;
  if (piece.size() > Cached::kMaxBytes) return merge(piece, scratch, tokens);
  if (scratch.cache.empty()) scratch.cache.resize(kCached);
  Cached& entry = scratch.cache[std::hash<std::string_view>()(piece) & (kCached - 1)];
  if (entry.count == 0 || std::string_view(entry.text.data(), entry.bytes) != piece) {
    const std::size_t before = tokens.size();
    merge(piece, scratch, tokens);
    const std::size_t count = tokens.size() - before;
    if (count > Cached::kMaxTokens) return;
    std::memcpy(entry.text.data(), piece.data(), piece.size());
    entry.bytes = static_cast<std::uint8_t>(piece.size());
    entry.count = static_cast<std::uint8_t>(count);
    std::copy_n(tokens.end() - static_cast<std::ptrdiff_t>(count), count, entry.tokens.begin());
    return;
  }
  tokens.insert(tokens.end(), entry.tokens.begin(), entry.tokens.begin() + entry.count);
}

void BytePairs::merge(std::string_view piece, Scratch& scratch,
                      std::vector<std::int32_t>& tokens) const {
  if (!whole_.empty()) {
    if (const auto found = whole_.find(std::string(piece)); found != whole_.end()) {
      tokens.push_back(found->second);
      return;
    }
  }
  if (piece.size() <= kShortBytes) {
    merge_short(piece, tokens);
  } else {
    merge_long(piece, scratch, tokens);
  }
}

void BytePairs::merge_short(std::string_view piece, std::vector<std::int32_t>& tokens) const {
  struct Part {
    std::int32_t token;
    std::int32_t rank;  // of the merge with the next one
    std::int32_t made;
  };
  std::array<Part, kShortBytes> parts;
  std::size_t count = piece.size();
  for (std::size_t i = 0; i < count; ++i) {
    parts[i].token = bytes_[static_cast<unsigned char>(piece[i])];
  }
  const auto look = [&](std::size_t i) {
    const Slot* slot = i + 1 < count ? find(parts[i].token, parts[i + 1].token) : nullptr;
    parts[i].rank = slot != nullptr ? slot->rank : kNoRank;
    parts[i].made = slot != nullptr ? slot->made : -1;
  };
  for (std::size_t i = 0; i < count; ++i) look(i);
  while (count > 1) {
    std::size_t best = 0;
    for (std::size_t i = 1; i + 1 < count; ++i) {
      if (parts[i].rank < parts[best].rank) best = i;
    }
    if (parts[best].rank == kNoRank) break;
    parts[best].token = parts[best].made;
    std::copy(parts.begin() + static_cast<std::ptrdiff_t>(best) + 2,
              parts.begin() + static_cast<std::ptrdiff_t>(count),
              parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    --count;
    look(best);
    if (best > 0) look(best - 1);
  }
  for (std::size_t i = 0; i < count; ++i) tokens.push_back(parts[i].token);
}

void BytePairs::merge_long(std::string_view piece, Scratch& scratch,
                           std::vector<std::int32_t>& tokens) const {
  auto& nodes = scratch.nodes;
  auto& heap = scratch.heap;
  nodes.resize(piece.size());
  heap.clear();
  const auto at = [&](std::int32_t place) -> Scratch::Node& {
    return nodes[static_cast<std::size_t>(place)];
  };
  const auto add = [&](std::int32_t place) {
    const Scratch::Node& node = at(place);
    if (node.behind < 0) return;
    const std::int32_t right = at(node.behind).token;
    const Slot* slot = find(node.token, right);
    if (slot == nullptr) return;
    heap.push_back({.rank = slot->rank, .place = place, .right = right});
    std::ranges::push_heap(heap, ComesLater());
  };
  const auto count = static_cast<std::int32_t>(piece.size());
  for (std::int32_t i = 0; i < count; ++i) {
    at(i) = {.token = bytes_[static_cast<unsigned char>(piece[static_cast<std::size_t>(i)])],
             .before = i - 1,
             .behind = i + 1 < count ? i + 1 : -1};
  }
  for (std::int32_t i = 0; i < count; ++i) add(i);
  while (!heap.empty()) {
    std::ranges::pop_heap(heap, ComesLater());
    const Scratch::Candidate candidate = heap.back();
    heap.pop_back();
    Scratch::Node& node = at(candidate.place);
    if (node.token < 0 || node.behind < 0) continue;  // merged since
    Scratch::Node& right = at(node.behind);
    const Slot* slot = right.token == candidate.right ? find(node.token, right.token) : nullptr;
    if (slot == nullptr || slot->rank != candidate.rank) continue;
    node.token = slot->made;
    right.token = -1;
    node.behind = right.behind;
    if (node.behind >= 0) at(node.behind).before = candidate.place;
    add(candidate.place);
    if (node.before >= 0) add(node.before);
  }
  for (std::int32_t i = 0; i >= 0; i = at(i).behind) tokens.push_back(at(i).token);
}

}  // namespace dynmo::data
