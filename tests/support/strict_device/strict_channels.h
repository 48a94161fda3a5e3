// SPDX-License-Identifier: Apache-2.0
#pragma once

// Groups of two ranks on the strict device, in the place of NCCL's. A send and a receive work in a
// stream of their own. wait() of a work makes the current stream wait for that stream. The bytes
// pass between the two processes, or threads, on a connection of their own.
//
// As with NCCL, a lost peer is not noticed: what waits for it does so until abort(). The strict
// device runs operators when they are called. So wait() of a work is where a rank hangs on such a
// device, and it returns after abort() without bytes. The late mode is not for these groups.

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <string>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace dynmo::strict {

// Makes the group of the two ranks 0 (sends) and 1 (receives) that meet in `store`. Returns when
// both are connected. Throws if that fails.
// A group that ignores abort() is a planted mistake.
enum class OnAbort { kEnds, kIgnores };
[[nodiscard]] c10::intrusive_ptr<::c10d::Backend> connect_pair(
    const c10::intrusive_ptr<::c10d::Store>& store, int rank, at::Device device,
    OnAbort on_abort = OnAbort::kEnds);

// Returns how many groups of this process wait for a peer that is lost.
[[nodiscard]] int pairs_that_spin();

}  // namespace dynmo::strict
