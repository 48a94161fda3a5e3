// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "dynmo/core/check.h"
#include "dynmo/elastic/group_star_impl.h"

namespace dynmo::elastic {

using process::FrameType;
using process::Word;

GroupStar::GroupStar(WatchOptions options)
    : options_(std::move(options)),
      spokes_(is_rank_0() ? static_cast<std::size_t>(options_.size) : 1) {}

int GroupStar::name(int rank) const {
  return options_.names.empty() ? rank : options_.names[static_cast<std::size_t>(rank)];
}

Error GroupStar::lost(int rank, const std::string& why) const {
  return make_error(ErrorCode::kPeerLost, "rank {} was lost: {}", name(rank), why);
}

int GroupStar::rank_of(const PlanePeer& peer) const {
  const auto found =
      std::ranges::find_if(spokes_, [&](const Spoke& spoke) { return spoke.peer == &peer; });
  return found == spokes_.end() ? -1 : static_cast<int>(found - spokes_.begin());
}

void GroupStar::send(const Spoke& to, FrameType type, std::string_view text) {
  to.peer->out += process::encode(type, process::OfGroup{to.channel, text});
}

void GroupStar::broadcast(FrameType type, std::string_view text, int but) {
  for (int rank = 0; rank < std::ssize(spokes_); ++rank) {
    if (rank != but && spoke(rank).peer != nullptr) send(spoke(rank), type, text);
  }
}

bool GroupStar::connect(int rank, PlanePeer& peer, std::uint32_t channel) {
  if (rank < (is_rank_0() ? 1 : 0) || rank >= std::ssize(spokes_) || spoke(rank).was_here ||
      rank_of(peer) >= 0) {
    return false;
  }
  spoke(rank) = {.peer = &peer, .channel = channel, .was_here = true};
  if (!is_rank_0()) return true;
  // A rank that connects late gets the earlier words and the verdict.
  for (const auto& [key, value] : words_) {
    send(spoke(rank), FrameType::kWord, process::text_of(Word{key, value}));
  }
  if (verdict_) send(spoke(rank), FrameType::kVerdict, process::text_of(*verdict_));
  return true;
}

bool GroupStar::take(const PlanePeer& peer, FrameType type, std::string_view rest) {
  const int rank = rank_of(peer);
  switch (type) {
    case FrameType::kDone:
      spoke(rank).done = true;
      check_all_done();
      return true;
    case FrameType::kAllDone:
      all_done_ = all_done_ || !is_rank_0();
      return true;
    case FrameType::kVerdict: {
      const auto verdict = process::parse_verdict(rest);
      if (verdict) decide(*verdict);
      return verdict.has_value();
    }
    case FrameType::kWord: {
      auto word = process::parse_word(rest);
      if (!word) return false;
      // Rank 0 forwards it.
      if (is_rank_0()) broadcast(type, rest, rank);
      words_[std::move(word->key)] = std::move(word->value);
      return true;
    }
    default:
      return false;
  }
}

void GroupStar::close(const PlanePeer& peer) {
  const int rank = rank_of(peer);
  spoke(rank).peer = nullptr;
  if (!spoke(rank).done) decide(lost(rank, "its connection closed"));
}

void GroupStar::find_silent(const PlanePeer& peer, const std::string& why) {
  decide(lost(rank_of(peer), why));
}

void GroupStar::tell(const Word& word) {
  words_[word.key] = word.value;
  broadcast(FrameType::kWord, process::text_of(word));
}

void GroupStar::announce(const Error& why) {
  if (is_over()) return;
  verdict_ = why;
  // A loss names the lost rank. Any other reason is this rank's own.
  Error told = why;
  if (why.code != ErrorCode::kPeerLost) {
    told.message = fmt::format("rank {}: {}", name(options_.rank.value), why.message);
  }
  broadcast(FrameType::kVerdict, process::text_of(told));
}

void GroupStar::leave() {
  if (leaving_ || is_over()) return;
  leaving_ = true;
  if (is_rank_0()) return check_all_done();
  broadcast(FrameType::kDone, {});
}

void GroupStar::check_all_done() {
  const auto done = std::ranges::count_if(spokes_, [](const Spoke& spoke) { return spoke.done; });
  if (!leaving_ || is_over() || !is_rank_0() || done != options_.size - 1) return;
  broadcast(FrameType::kAllDone, {});
  all_done_ = true;
}

bool GroupStar::is_flushed() const {
  return std::ranges::all_of(
      spokes_, [](const Spoke& spoke) { return spoke.peer == nullptr || spoke.peer->out.empty(); });
}

void GroupStar::end() {
  broadcast(FrameType::kGone, {});
  for (Spoke& spoke : spokes_) {
    if (spoke.peer != nullptr) spoke.peer->channels.erase(spoke.channel);
    spoke.peer = nullptr;
  }
}

void GroupStar::decide(const Error& error) {
  if (is_over()) return;
  verdict_ = error;
  news_ = true;
  // Rank 0 tells the others first. Another rank tells rank 0 only about a loss of rank 0 itself. If
  // rank 0 was merely paused, it learns that it is excluded.
  broadcast(FrameType::kVerdict, process::text_of(error));
}

}  // namespace dynmo::elastic
