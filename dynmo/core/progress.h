// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reports of a thread to a watch that ends its process if it hangs. Long work without messages,
// such as reading a checkpoint, reports that it goes on. So does a wait for another thread. Threads
// without a watch report nothing.

namespace dynmo {

class ProgressWatch {
 public:
  virtual void goes_on() = 0;
  virtual void begin_wait() = 0;
  virtual void end_wait() = 0;

  // Returns the watch of the calling thread, or null. A watch sets it, and resets it before it
  // ends.
  [[nodiscard]] static ProgressWatch*& of_thread();

 protected:
  ~ProgressWatch() = default;
};

// Reports that the calling thread goes on.
void note_progress();

// While an object of this class exists, the calling thread waits.
class WaitMark {
 public:
  WaitMark();
  ~WaitMark();
  WaitMark(const WaitMark&) = delete;
  WaitMark& operator=(const WaitMark&) = delete;

 private:
  ProgressWatch* watch_;
};

}  // namespace dynmo
