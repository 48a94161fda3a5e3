// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/signalfd.h>
#include <unistd.h>

#include <csignal>

#include "dynmo/process/sockets.h"

namespace dynmo::process {

// Blocks the signals that end a run, and SIGPIPE, while it exists. They are read from a descriptor.
// The system keeps a blocked signal even if it is ignored. (Jobs that a script starts with `&`
// ignore SIGINT.)
class EndingSignals {
 public:
  EndingSignals() {
    sigset_t wanted;
    sigemptyset(&wanted);
    for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGPIPE}) {
      if (signal == SIGHUP && ignores(SIGHUP)) continue;
      sigaddset(&wanted, signal);
    }
    pthread_sigmask(SIG_BLOCK, &wanted, &before_);
    fd_ = UniqueFd(signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK));
  }
  EndingSignals(const EndingSignals&) = delete;
  EndingSignals& operator=(const EndingSignals&) = delete;
  ~EndingSignals() {
    while (next() != 0) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] const sigset_t& before() const { return before_; }
  // Returns the next signal that has arrived, or 0 if none has.
  [[nodiscard]] int next() const {
    signalfd_siginfo info{};
    return read(fd_.get(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo)
                                                              : 0;
  }

 private:
  // Returns whether this process ignores the signal, as under nohup.
  static bool ignores(int signal) {
    struct sigaction now {};
    return sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
  }

  sigset_t before_{};
  UniqueFd fd_;
};

}  // namespace dynmo::process
