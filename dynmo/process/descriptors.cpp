// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/descriptors.h"

#include <sys/resource.h>

namespace dynmo::process {

Expected<void> allow_descriptors(int wanted, std::string_view whom) {
  rlimit limit{};
  const auto needed = static_cast<rlim_t>(wanted);
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return {};
  rlimit raised = limit;
  raised.rlim_cur = needed;
  if (needed <= limit.rlim_max && setrlimit(RLIMIT_NOFILE, &raised) == 0) return {};
  return make_error(ErrorCode::kBadInput,
                    "{} may have at most {} open files here, wanted {}: raise the limit, such as "
                    "'ulimit -n {}' as root, or use fewer ranks",
                    whom, limit.rlim_max, wanted, wanted);
}

}  // namespace dynmo::process
