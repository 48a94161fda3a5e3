// SPDX-License-Identifier: Apache-2.0
#pragma once

// Makes one stream of lines from the output of several ranks.

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/ids.h"

namespace dynmo::process {

class LineMerger {
 public:
  // Returns the lines that `bytes` complete, with the rank in front if it is not 0. A line "dynmo:
  // ..." is left out if another rank has printed it already, also with "rank 1: " in front. All
  // ranks end with the reason of the first.
  [[nodiscard]] std::string feed(WorldRank rank, std::string_view bytes);
  // Returns the incomplete last line of a rank whose output has ended.
  [[nodiscard]] std::string finish(WorldRank rank);

  // Expects that other ranks report the loss of this rank. It is not shown again, because the
  // launcher itself reports how the rank ended.
  void expect_loss_of(WorldRank rank) { gone_.insert(rank); }
  // Returns whether the rank has printed a line "dynmo: ...".
  [[nodiscard]] bool has_explained(WorldRank rank) const { return explained_.contains(rank); }

 private:
  std::string show(WorldRank rank, std::string_view line);
  bool is_repeated(WorldRank rank, std::string_view line);

  std::map<WorldRank, std::string> partial_;
  // First rank that printed a line of ours.
  std::map<std::string, WorldRank, std::less<>> first_;
  std::set<WorldRank> gone_;
  std::set<WorldRank> explained_;
};

// Returns the ranks that our lines in the output name first, as a report of a loss does.
[[nodiscard]] std::vector<int> ranks_named(std::string_view output);

}  // namespace dynmo::process
