// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/progress.h"

namespace dynmo {

ProgressWatch*& ProgressWatch::of_thread() {
  thread_local ProgressWatch* watch = nullptr;
  return watch;
}

void note_progress() {
  if (ProgressWatch* watch = ProgressWatch::of_thread()) watch->goes_on();
}

WaitMark::WaitMark() : watch_(ProgressWatch::of_thread()) {
  if (watch_ != nullptr) watch_->begin_wait();
}
WaitMark::~WaitMark() {
  if (watch_ != nullptr) watch_->end_wait();
}

}  // namespace dynmo
