// SPDX-License-Identifier: Apache-2.0
#pragma once

// Makes one stream of lines out of what several ranks print.

#include <map>
#include <set>
#include <string>
#include <string_view>

#include "dynmo/core/ids.h"

namespace dynmo::process {

class LineMerger {
 public:
  // The lines that `bytes` complete, with the rank in front where it is not 0. A line "dynmo: ..."
  // is left out if another rank has printed it already, be it with "rank 1: " in front: all ranks
  // end with the reason of the first.
  [[nodiscard]] std::string feed(Rank rank, std::string_view bytes);
  // The line that was not completed.
  [[nodiscard]] std::string finish(Rank rank);

  // The launcher says itself how this rank ended: that others have lost it is no news.
  void expect_loss_of(Rank rank) { gone_.insert(rank); }
  // Whether the rank has printed a line "dynmo: ...".
  [[nodiscard]] bool has_explained(Rank rank) const { return explained_.contains(rank); }

 private:
  std::string show(Rank rank, std::string_view line);
  bool is_repeated(Rank rank, std::string_view line);

  std::map<Rank, std::string> partial_;
  std::map<std::string, Rank, std::less<>> first_;  // who printed a line of ours first
  std::set<Rank> gone_;
  std::set<Rank> explained_;
};

}  // namespace dynmo::process
