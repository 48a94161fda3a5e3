// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>

namespace dynmo::process {

// Blocks all signals in threads that start while it exists. Signals are for the thread in which the
// program expects them.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

}  // namespace dynmo::process
