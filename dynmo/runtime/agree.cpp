// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/agree.h"

#include <span>
#include <string>

#include "dynmo/core/digest.h"

namespace dynmo::runtime {

Expected<void> agree(transport::Transport& transport, transport::Tag tag, std::string_view what,
                     std::string_view text) {
  const std::string mine = digest_of(text).hex();
  DYNMO_ASSIGN(const auto all,
               transport::all_gather(transport, tag, std::as_bytes(std::span(mine))));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const std::string_view theirs(reinterpret_cast<const char*>(all[rank].data()),
                                  all[rank].size());
    if (theirs == mine) continue;
    return make_error(ErrorCode::kInternal, "rank {} derived {} {}, rank {} derived {}",
                      transport.number_of(transport.rank()), what, mine,
                      transport.number_of(transport::Member(static_cast<int>(rank))), theirs);
  }
  return {};
}

}  // namespace dynmo::runtime
