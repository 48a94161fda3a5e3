// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>

namespace dynmo::process {

// While it lives, threads begin with all signals blocked: signals are for the thread that the
// program expects them in.
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
