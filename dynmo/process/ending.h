// SPDX-License-Identifier: Apache-2.0
#pragma once

// Processes of this host that end. A killed process gives its connections and its memory back some
// tens of milliseconds after it has run its last instruction, on busy cores many more; its state
// and those of its threads that wait tell of it at once.

#include <sys/types.h>

#include <string_view>

#include "dynmo/process/sockets.h"

namespace dynmo::process {

// The letter that the system gives a process's state (proc(5)), 'X' where it runs no instruction
// any more: it is killed, or ends; it may seem to run for some microseconds in between. ' ': there
// is no such process, or not any more.
[[nodiscard]] char state_of(pid_t pid);

// Readable once the thread of this name of process `pid` has ended. None where the process has no
// such thread, or the system cannot tell (Linux before 6.9).
[[nodiscard]] UniqueFd end_of_thread(pid_t pid, std::string_view name);

}  // namespace dynmo::process
