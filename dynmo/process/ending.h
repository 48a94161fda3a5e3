// SPDX-License-Identifier: Apache-2.0
#pragma once

// Detects processes of this host that end. A killed process returns its connections and its memory
// some tens of milliseconds after its last instruction, and later on busy cores. Its state, and
// those of its waiting threads, show the end at once.

#include <sys/types.h>

#include <string>
#include <string_view>

#include "dynmo/process/sockets.h"

namespace dynmo::process {

// Returns the letter of a process's state (proc(5)), or ' ' if there is no such process. The letter
// 'X' means that the process runs no more instructions, because it was killed or ends. Between its
// kill and its end it may have another letter for some microseconds.
[[nodiscard]] char state_of(pid_t pid);

// Returns a descriptor that is readable once the thread of this name of process `pid` has ended.
// Returns none if the process has no such thread, or the system cannot tell (Linux before 6.9).
[[nodiscard]] UniqueFd end_of_thread(pid_t pid, std::string_view name);

}  // namespace dynmo::process
