// SPDX-License-Identifier: Apache-2.0
#include <execinfo.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>

#include "machine_impl.h"

namespace dynmo::strict {
namespace {

thread_local const char* operator_of_thread = "none";

void say(const char* text) {
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text, std::strlen(text));
}

void on_fault(int /*signal*/, siginfo_t* info, void* /*context*/) {
  Machine& machine = Machine::get();
  const bool device = machine.is_device(info->si_addr);
  if (!device && !machine.is_pinned(info->si_addr)) {
    std::signal(SIGSEGV, SIG_DFL);  // the instruction runs again, and ends the process
    return;
  }
  say(device ? "strict device: the host touches memory of the device"
             : "strict device: the host touches pinned memory before it has waited for its copy");
  say("; this thread's last operator was ");
  say(operator_of_thread);
  say("\n");
  std::array<void*, 64> frames{};
  const int count = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  ::backtrace_symbols_fd(frames.data(), count, STDERR_FILENO);
  ::_exit(kTouched);
}

}  // namespace

const char*& last_operator() { return operator_of_thread; }

void catch_faults() {
  std::array<void*, 1> frames{};
  ::backtrace(frames.data(), 1);  // loads what it needs, which a handler must not
  struct sigaction action {};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGSEGV, &action, nullptr);
}

}  // namespace dynmo::strict
