// SPDX-License-Identifier: Apache-2.0
#pragma once

// Makes one stream of lines out of what several ranks print.

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/ids.h"

namespace dynmo::process {

class LineMerger {
 public:
  // The lines that `bytes` complete, with the rank in front where it is not 0. A line "dynmo: ..."
  // is left out if another rank has printed it already, be it with "rank 1: " in front: all ranks
  // end with the reason of the first.
  [[nodiscard]] std::string feed(WorldRank rank, std::string_view bytes);
  // The line that was not completed.
  [[nodiscard]] std::string finish(WorldRank rank);

  // The launcher says itself how this rank ended: that others have lost it is no news.
  void expect_loss_of(WorldRank rank) { gone_.insert(rank); }
  // Whether the rank has printed a line "dynmo: ...".
  [[nodiscard]] bool has_explained(WorldRank rank) const { return explained_.contains(rank); }

 private:
  std::string show(WorldRank rank, std::string_view line);
  bool is_repeated(WorldRank rank, std::string_view line);

  std::map<WorldRank, std::string> partial_;
  std::map<std::string, WorldRank, std::less<>> first_;  // who printed a line of ours first
  std::set<WorldRank> gone_;
  std::set<WorldRank> explained_;
};

// The ranks that our lines in the output name first, as each that tells of a loss does.
[[nodiscard]] std::vector<int> ranks_named(std::string_view output);

}  // namespace dynmo::process
