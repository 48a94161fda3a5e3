// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>
#include <charconv>

#include "dynmo/process/line_merger_impl.h"

namespace dynmo::process {
namespace {

constexpr std::string_view kOurs = "dynmo: ";
constexpr std::string_view kNote = "note: ";  // of a rank that continues
constexpr std::size_t kMaxLine = 1 << 16;     // longer ones are cut
constexpr std::size_t kMaxRemembered = 1000;

// Returns the text without the command line's prefix of an error. So a loss that rank 1 reports as
// an error equals the loss that the launcher has reported.
std::string_view without_error(std::string_view text) {
  constexpr std::string_view kError = "error: ";
  return text.starts_with(kError) ? text.substr(kError.size()) : text;
}

// Returns the text without "rank 1: ", which other ranks put before the reason of rank 1.
std::string_view without_rank(std::string_view text) {
  constexpr std::string_view kRank = "rank ";
  if (!text.starts_with(kRank)) return text;
  const std::size_t end = text.find_first_not_of("0123456789", kRank.size());
  if (end == kRank.size() || end == std::string_view::npos) return text;
  return text.substr(end).starts_with(": ") ? text.substr(end + 2) : text;
}

// Returns the text without details that differ between ranks: how a loss was noticed, and folders.
std::string_view without_detail(std::string_view text) {
  if (text.starts_with(kNote)) return text.substr(0, text.rfind(" ('"));
  constexpr std::string_view kLost = " was lost: ";
  const std::size_t at = text.find(kLost);
  return at == std::string_view::npos ? text : text.substr(0, at + kLost.size());
}

}  // namespace

std::string LineMerger::feed(WorldRank rank, std::string_view bytes) {
  std::string& partial = partial_[rank];
  std::string shown;
  while (!bytes.empty()) {
    const std::size_t end = bytes.find('\n');
    partial += bytes.substr(0, end);
    const bool complete = end != std::string_view::npos;
    bytes.remove_prefix(complete ? end + 1 : bytes.size());
    if (!complete && partial.size() < kMaxLine) break;
    shown += show(rank, partial);
    partial.clear();
  }
  return shown;
}

std::string LineMerger::finish(WorldRank rank) {
  const std::string line = std::move(partial_[rank]);
  partial_.erase(rank);
  return line.empty() ? "" : show(rank, line);
}

std::string LineMerger::show(WorldRank rank, std::string_view line) {
  if (line.starts_with(kOurs)) {
    const std::string_view text = line.substr(kOurs.size());
    if (!text.starts_with(kNote)) explained_.insert(rank);
    if (is_repeated(rank, without_error(text))) return "";
  }
  return (rank == WorldRank(0) ? "" : fmt::format("[rank {}] ", rank)) + std::string(line) + "\n";
}

bool LineMerger::is_repeated(WorldRank rank, std::string_view line) {
  const auto lost = [line](WorldRank gone) {
    return line.starts_with(fmt::format("rank {} was lost: ", gone));
  };
  if (std::ranges::any_of(gone_, lost)) return true;
  const std::string_view reason = without_detail(without_rank(line));
  const auto found = first_.find(reason);
  if (found != first_.end()) return found->second != rank;
  if (first_.size() < kMaxRemembered) first_.emplace(reason, rank);
  return false;
}

std::vector<int> ranks_named(std::string_view output) {
  std::vector<int> ranks;
  for (const std::string_view prefix : {"dynmo: rank ", "dynmo: error: rank "}) {
    for (std::size_t at = output.find(prefix); at != std::string_view::npos;
         at = output.find(prefix, at + 1)) {
      const std::string_view rest = output.substr(at + prefix.size());
      int rank = 0;
      if (std::from_chars(rest.data(), rest.data() + rest.size(), rank).ec == std::errc()) {
        ranks.push_back(rank);
      }
    }
  }
  return ranks;
}

}  // namespace dynmo::process
