# SPDX-License-Identifier: Apache-2.0
# Writes OUT, a source with VERSION and the commit that the checkout SOURCE is at, or that the source archive was made of. What has
# not changed is not written again.
set(commit "")
if(EXISTS "${SOURCE}/.git")
  execute_process(COMMAND git --no-optional-locks -C "${SOURCE}" describe --always --dirty --abbrev=10 "--exclude=*"
    OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
else()
  file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/commit.txt" commit REGEX "^[0-9a-f]+$")
  string(SUBSTRING "${commit}" 0 10 commit)
endif()
if(commit)
  string(APPEND VERSION " (${commit})")
endif()
file(CONFIGURE OUTPUT "${OUT}" @ONLY CONTENT [[
// SPDX-License-Identifier: Apache-2.0
#include <string_view>
namespace dynmo {
extern const std::string_view kVersion;
const std::string_view kVersion = "@VERSION@";
}
]])
