// SPDX-License-Identifier: Apache-2.0
#pragma once

// A disk that is full for a while: files of this process do not grow above a size.

#include <sys/resource.h>

#include <csignal>

#include "dynmo/core/check.h"

namespace dynmo {

class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) : before_(std::signal(SIGXFSZ, SIG_IGN)) {
    DYNMO_CHECK(::getrlimit(RLIMIT_FSIZE, &free_) == 0, "the limit of files");
    rlimit full = free_;
    full.rlim_cur = bytes;
    DYNMO_CHECK(::setrlimit(RLIMIT_FSIZE, &full) == 0, "a limit of files");
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &free_);
    std::signal(SIGXFSZ, before_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  void (*before_)(int);
  rlimit free_{};
};

}  // namespace dynmo
