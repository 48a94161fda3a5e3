// SPDX-License-Identifier: Apache-2.0
#pragma once

// Gives Gloo's loop patience.
//
// Gloo has one thread a process that waits for sockets with epoll_wait. Where another thread holds
// the lock of a connection that has something to read, Gloo's passes over it and asks again at
// once, until the lock is free. On a host with fewer processors than threads that takes long: who
// holds the lock writes to a socket, which wakes the peer, which gets the holder's processor; the
// loop then asks until its time slice is used up, some milliseconds, which the holder would need.
// Measured with four ranks on two cores: a third of the processor time of a migration.
//
// Gloo has no option for it. So programs with this library have their own epoll_wait: the system's,
// but that a thread that is answered again and again at once sleeps for some microseconds before it
// asks the next time. Only Gloo's waits are meant: those of 10 ms.

namespace dynmo::c10d {

// Does nothing: who calls it has the epoll_wait above linked in, also from a static library.
void have_patient_gloo_loop();

}  // namespace dynmo::c10d
