// SPDX-License-Identifier: Apache-2.0
#include "dynmo/process/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <ranges>
#include <tuple>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/process/ending.h"
#include "dynmo/process/ending_signals_impl.h"
#include "dynmo/process/host_memory.h"
#include "dynmo/process/late_ranks.h"
#include "dynmo/process/launch_environment_impl.h"
#include "dynmo/process/line_merger_impl.h"
#include "dynmo/process/sockets.h"
#include "dynmo/process/spawn_impl.h"
#include "dynmo/process/started_hooks_impl.h"

namespace dynmo::process {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kTerminateTime{1000};  // from SIGTERM to SIGKILL
constexpr milliseconds kDrainTime{500};       // to read the rest of the pipes at the end
constexpr milliseconds kCauseTime{3000};      // for a lost rank's own end to become visible
constexpr milliseconds kPoll{20};             // if the kernel has no pidfd
constexpr std::string_view kClearRow = "\r\033[K";
constexpr int kLastOutput = 32;  // reads of the output of a rank that has failed

// The exit code of a rank that was killed, or that has lost another rank.
const int kLostExit = exit_code(ErrorCode::kPeerLost);

// The process of one rank. It is reaped after its end, except for the first one, whose number is
// that of the process group of all.
struct Child {
  WorldRank rank;
  pid_t pid = -1;
  UniqueFd process;     // readable once it has ended
  UniqueFd output;      // its output, except for rank 0's stdout, which is ours
  std::string unshown;  // read, but not shown yet
  bool running = true;
  bool signalled = false;  // we sent it a signal before it ended
  bool counts = true;      // false: a late process that is no rank yet
  bool met = false;        // it has said that it has met the others
  int turn = 0;            // turn in which its end was noticed
  int code = 0;
  int signal = 0;
};

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written > 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (written < 0 && errno == EAGAIN) {
      pollfd wait{.fd = fd, .events = POLLOUT, .revents = 0};
      poll(&wait, 1, 1000);
    } else if (written == 0 || errno != EINTR) {
      return;  // without a reader, the ranks still matter
    }
  }
}

// Returns whether a rank ended for a reason that the others have as well, and was not just lost.
bool is_fault(const Child& child) {
  return child.counts && child.code != 0 && child.code != exit_code(ErrorCode::kInternal) &&
         child.code != kLostExit;
}

bool is_running_rank(const Child& child) { return child.running && child.counts; }

class Launch {
 public:
  explicit Launch(const LaunchOptions& options) : options_(options) {}

  Expected<void> start();
  int run();

 private:
  Expected<void> start_rank(int rank, const UniqueFd& store);
  Expected<void> start_late();
  Expected<void> start_child(Child child, ChildOptions how, bool own_output);
  void hear_ranks();
  void hear(const LaunchRequest& request);
  void start_wanted();
  void say(const std::string& line) { show("dynmo: " + line + "\n"); }
  // Writes whole lines. Clears rank 0's progress line on a terminal first.
  void show(const std::string& lines) {
    if (lines.empty()) return;
    const bool clears = isatty(options_.output) == 1 && isatty(options_.errors) == 1;
    write_all(options_.errors, clears ? std::string(kClearRow) + lines : lines);
  }

  void wait_for_events(milliseconds at_most);
  bool read_output(Child& child);
  void show_output(Child& child);
  void wait_for_causes(const std::vector<int>& ranks);
  std::vector<Child*> newly_ended();
  void note_ended();
  void note_end(Child& child);
  void handle_signals();
  void begin_ending(milliseconds grace);
  void escalate();
  void signal_running(int signal);
  void drain();
  void reap();
  [[nodiscard]] int result() const;
  [[nodiscard]] bool any_running() const { return std::ranges::any_of(children_, &Child::running); }
  // Returns whether the ranks have met, and so notice each other's losses. True if ranks cannot
  // report it.
  [[nodiscard]] bool have_met() const {
    return !requests_ || std::ranges::any_of(children_, &Child::met);
  }

  struct Ending {
    bool interrupted = false;
    bool warned = false;                            // only SIGUSR1 came
    std::optional<Clock::time_point> terminate_at;  // set while ending
    std::optional<Clock::time_point> kill_at;
  };

  const LaunchOptions& options_;
  EndingSignals signals_;
  UniqueFd requests_;  // socket for messages of the ranks
  UniqueFd asking_;    // its other end, which ranks inherit
  int wanted_ = 0;     // number of ranks to start
  int late_ = 0;       // number of late ranks started
  std::vector<Child> children_;
  StartedHooks hooks_;
  LineMerger merger_;
  int turn_ = 0;
  Ending ending_;
};

Expected<void> Launch::start() {
  DYNMO_TRY(allow_descriptors(descriptors_of_launcher(options_.ranks),
                              fmt::format("the launcher of {} ranks", options_.ranks)));
  DYNMO_ASSIGN(const UniqueFd store, listen_on(options_.address, 0));
  if (!options_.late_command.empty()) {
    std::array<int, 2> ends{};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) {
      return make_error(ErrorCode::kBadInput, "cannot make a socket for the ranks: {}",
                        system_reason(errno));
    }
    requests_ = UniqueFd(ends[0]);
    asking_ = UniqueFd(ends[1]);
  }
  for (int rank = 0; rank < options_.ranks; ++rank) {
    const auto started = start_rank(rank, store);
    if (started) continue;
    signal_running(SIGKILL);
    reap();
    return started.error();
  }
  return {};
}

Expected<void> Launch::start_rank(int rank, const UniqueFd& store) {
  ChildOptions how;
  how.command = options_.command;
  how.environment = environment_of(options_, asking_.get(), place_of(options_, rank, store));
  if (rank == 0) how.inherited.push_back(store.get());
  if (!options_.cores.empty()) {
    how.core = options_.cores[static_cast<std::size_t>(rank) % options_.cores.size()];
  }
  Child child;
  child.rank = WorldRank(rank);
  return start_child(std::move(child), std::move(how), rank == 0 || options_.all_report);
}

// Starts a late rank. Its number for users is a guess until it is a rank.
Expected<void> Launch::start_late() {
  ChildOptions how;
  how.command = options_.late_command;
  how.environment = environment_of(options_, asking_.get(), no_place());
  Child child;
  child.rank = WorldRank(options_.ranks + late_++);
  child.counts = false;
  return start_child(std::move(child), std::move(how), options_.all_report);
}

Expected<void> Launch::start_child(Child child, ChildOptions how, bool own_output) {
  DYNMO_ASSIGN(how.program, find_program(how.command.front()));
  std::array<int, 2> pipe{};
  if (pipe2(pipe.data(), O_CLOEXEC) != 0) {
    return make_error(ErrorCode::kBadInput, "cannot make a pipe for rank {}: {}", child.rank,
                      system_reason(errno));
  }
  child.output = UniqueFd(pipe[0]);
  const UniqueFd to_output(pipe[1]);
  how.output = own_output ? options_.output : to_output.get();
  how.errors = to_output.get();
  if (asking_) how.inherited.push_back(asking_.get());
  how.group = children_.empty() ? 0 : children_.front().pid;
  how.signals = signals_.before();
  DYNMO_ASSIGN(child.pid, spawn(how));
  child.process = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, child.pid, 0)));
  fcntl(child.output.get(), F_SETFL, fcntl(child.output.get(), F_GETFL) | O_NONBLOCK);
  children_.push_back(std::move(child));
  return {};
}

void Launch::hear_ranks() {
  std::array<char, 64> bytes;
  while (requests_) {
    const ssize_t got = recv(requests_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got <= 0) return;
    const auto request = parse_launch_request({bytes.data(), static_cast<std::size_t>(got)});
    if (request) hear(*request);
  }
}

void Launch::hear(const LaunchRequest& request) {
  if (const auto* wanted = std::get_if<WantedRanks>(&request)) wanted_ += wanted->ranks;
  if (const auto* met = std::get_if<MetRank>(&request)) {
    auto newest_first = std::views::reverse(children_);  // because process numbers are reused
    const auto found = std::ranges::find(newest_first, met->pid, &Child::pid);
    if (found == newest_first.end()) return;
    // A rank may have been lost after the ranks met, but before this message.
    const bool joins = options_.survives && !found->counts;
    if ((joins || !have_met()) && !ending_.interrupted &&
        std::ranges::none_of(children_, is_fault)) {
      ending_.terminate_at.reset();
    }
    found->met = true;
    if (!std::exchange(found->counts, true)) found->rank = WorldRank(met->number);
  }
  if (const auto* hook = std::get_if<StartedHook>(&request)) hooks_.add(hook->pid);
}

// Starts the wanted ranks. Call it in the main thread, because ranks end with the thread that
// started them.
void Launch::start_wanted() {
  const bool ending = ending_.interrupted || ending_.terminate_at || ending_.kill_at;
  for (; wanted_ > 0; --wanted_) {
    if (ending) continue;
    if (const auto started = start_late(); !started) say(started.error().message);
  }
}

int Launch::run() {
  while (any_running()) {
    wait_for_events(std::chrono::hours(1));
    ++turn_;
    note_ended();  // before the output of other ranks about it
    for (Child& child : children_) show_output(child);
    handle_signals();
    hear_ranks();
    if (std::ranges::none_of(children_, is_running_rank)) begin_ending(options_.grace);
    start_wanted();
    escalate();
  }
  drain();
  reap();
  return result();
}

void Launch::wait_for_events(milliseconds at_most) {
  std::vector<pollfd> events = {{.fd = signals_.fd(), .events = POLLIN, .revents = 0},
                                {.fd = requests_.get(), .events = POLLIN, .revents = 0}};
  for (const Child& child : children_) {
    events.push_back({.fd = child.output.get(), .events = POLLIN, .revents = 0});
    if (!child.running) continue;
    events.push_back({.fd = child.process.get(), .events = POLLIN, .revents = 0});
    if (!child.process) at_most = std::min(at_most, kPoll);
  }
  const auto now = Clock::now();
  for (const auto& deadline : {ending_.terminate_at, ending_.kill_at}) {
    if (!deadline) continue;
    const auto left = std::chrono::ceil<milliseconds>(*deadline - now);
    at_most = std::clamp(left, milliseconds(0), at_most);
  }
  poll(events.data(), events.size(), static_cast<int>(at_most.count()));
}

// Reads output once, so that a rank that prints without end does not delay the others. Returns
// false if there was none.
bool Launch::read_output(Child& child) {
  std::array<char, 1 << 16> bytes;
  const ssize_t got = child.output ? read(child.output.get(), bytes.data(), bytes.size()) : -1;
  if (got == 0) child.output.reset();
  if (got <= 0) return false;
  child.unshown.append(bytes.data(), static_cast<std::size_t>(got));
  return true;
}

void Launch::show_output(Child& child) {
  read_output(child);
  const std::vector<int> causes = ranks_named(child.unshown);
  wait_for_causes(causes);
  if (!causes.empty()) note_ended();
  show(merger_.feed(child.rank, std::exchange(child.unshown, {})));
}

// Waits up to kCauseTime for the ends of these ranks. A killed process closes its
// connections before its end is visible. A failing one tells the others before it ends. So others
// may report the loss earlier, but the rank's own message and exit status take precedence.
void Launch::wait_for_causes(const std::vector<int>& ranks) {
  if (ending_.terminate_at || ending_.kill_at) return;  // known already
  const Clock::time_point deadline = Clock::now() + kCauseTime;
  for (const int rank : ranks) {
    const auto found = std::ranges::find_if(
        children_, [&](const Child& child) { return child.rank == WorldRank(rank); });
    if (found == children_.end() || !found->running || !found->process) continue;
    wait_for(found->process, POLLIN, deadline);
  }
}

// Returns the children that have ended since the last call, with their last output read.
std::vector<Child*> Launch::newly_ended() {
  std::vector<Child*> ended;
  for (Child& child : children_) {
    if (!child.running) continue;
    siginfo_t info{};
    const int status =
        waitid(P_PID, static_cast<id_t>(child.pid), &info, WEXITED | WNOHANG | WNOWAIT);
    if (status != 0 || info.si_pid != child.pid) continue;
    child.running = false;
    child.turn = turn_;
    (info.si_code == CLD_EXITED ? child.code : child.signal) = info.si_status;
    ended.push_back(&child);
  }
  if (!ended.empty()) hear_ranks();  // their earlier messages
  for (Child* child : ended) {
    child->process.reset();
    const bool is_first = child == &children_.front();
    if (!is_first) waitpid(std::exchange(child->pid, -1), nullptr, 0);
    if (child->counts) continue;
    tell_leader_ended(requests_.get(), child->signal != 0 ? 128 + child->signal : child->code);
  }
  for (Child* child : ended) {
    for (int more = kLastOutput; more > 0 && read_output(*child); --more) {
    }
  }
  return ended;
}

void Launch::note_ended() {
  std::vector<Child*> ended;
  // Children that end during the wait count as ended at the same time.
  for (auto newer = newly_ended(); !newer.empty(); newer = newly_ended()) {
    ended.insert(ended.end(), newer.begin(), newer.end());
    for (const Child* child : newer) wait_for_causes(ranks_named(child->unshown));
  }
  // Among those that end at the same time, first come killed ranks, then those that name no other
  // rank.
  const auto speaks = [](const Child* child) { return !ranks_named(child->unshown).empty(); };
  std::ranges::stable_partition(ended, std::not_fn(speaks));
  std::ranges::stable_partition(ended, [](const Child* child) { return child->signal != 0; });
  for (Child* child : ended) note_end(*child);
}

void Launch::note_end(Child& child) {
  if (child.signalled || (child.code == 0 && child.signal == 0)) return;
  merger_.expect_loss_of(child.rank);
  if (child.signal != 0) {
    say(fmt::format("rank {} was killed by signal {} ({})", child.rank, child.signal,
                    strsignal(child.signal)));
  }
  show(merger_.feed(child.rank, std::exchange(child.unshown, {})));
  const bool stopped = child.code == exit_code(ErrorCode::kInterrupted);  // rank 0 reports it
  if (child.code != 0 && !stopped && !merger_.has_explained(child.rank)) {
    say(fmt::format("rank {} ended with exit code {}", child.rank, child.code));
  }
  if (child.counts && (!options_.survives || is_fault(child) || !have_met())) {
    begin_ending(options_.grace);
  }
}

void Launch::handle_signals() {
  while (const int signal = signals_.next()) {
    if (signal == SIGPIPE) continue;
    // Slurm announces a later SIGTERM by SIGUSR1. That SIGTERM is no second order to end.
    const bool again = ending_.interrupted && !(ending_.warned && signal == SIGTERM);
    ending_.warned = !ending_.interrupted && signal == SIGUSR1;
    signal_running(again ? SIGKILL : signal);
    if (ending_.interrupted) continue;
    ending_.interrupted = true;
    for (const Child& child : children_) merger_.expect_loss_of(child.rank);
    ending_.terminate_at.reset();
    const bool stops = signal == SIGTERM || signal == SIGUSR1;
    begin_ending(stops ? options_.stop_grace : options_.interrupt_grace);
  }
}

void Launch::begin_ending(milliseconds grace) {
  if (ending_.terminate_at || ending_.kill_at) return;
  ending_.terminate_at = Clock::now() + grace;
  // Only SIGKILL ends a stopped rank.
  for (Child& child : children_) {
    if (!child.running || state_of(child.pid) != 'T') continue;
    child.signalled = true;
    kill(child.pid, SIGKILL);
  }
}

void Launch::escalate() {
  const auto now = Clock::now();
  if (ending_.kill_at && now >= *ending_.kill_at) {
    signal_running(SIGKILL);
    ending_.kill_at = now + kTerminateTime;  // the kernel may delay the end of a process
  } else if (!ending_.kill_at && ending_.terminate_at && now >= *ending_.terminate_at) {
    signal_running(SIGTERM);
    ending_.terminate_at.reset();
    ending_.kill_at = now + kTerminateTime;
  }
}

void Launch::signal_running(int signal) {
  for (Child& child : children_) {
    if (!child.running) continue;
    child.signalled = true;
    kill(child.pid, signal);
  }
}

// Ends the processes that the ranks themselves have started, so that the pipes end. Shows the rest
// of the ranks' output.
void Launch::drain() {
  kill(-children_.front().pid, SIGKILL);
  hear_ranks();  // a rank may have started a hook just before
  hooks_.end();
  const auto deadline = Clock::now() + kDrainTime;
  const auto is_open = [](const Child& child) { return static_cast<bool>(child.output); };
  ending_.terminate_at.reset();
  ending_.kill_at.reset();
  while (std::ranges::any_of(children_, is_open) && Clock::now() < deadline) {
    wait_for_events(kPoll);
    for (Child& child : children_) show_output(child);
  }
  for (const Child& child : children_) show(merger_.finish(child.rank));
}

void Launch::reap() {
  for (const Child& child : children_) {
    if (child.running || &child == &children_.front()) waitpid(child.pid, nullptr, 0);
  }
}

int Launch::result() const {
  const auto done = [](const Child& child) {
    return !child.counts || (child.code == 0 && child.signal == 0);
  };
  // A signal after the end of all work has interrupted nothing.
  if (ending_.interrupted && !std::ranges::all_of(children_, done)) return 130;
  // If the run survives losses, ranks that ended last come first. Among them one without a failure
  // does.
  int last = 0;
  for (const Child& child : children_) {
    if (options_.survives && child.counts && !child.signalled) last = std::max(last, child.turn);
  }
  // A rank that failed by itself precedes those that failed because of it, then the earliest.
  const auto worse = [last](const Child& a, const Child& b) {
    const auto order = [last](const Child& child) {
      const bool is_failure = !child.signalled && (child.code != 0 || child.signal != 0);
      const bool is_cause = is_failure && child.code != kLostExit;
      const bool survives = last > 0;
      const int kind = is_cause ? 0 : is_failure ? 1 : 2;
      return std::tuple(!child.counts || (survives && child.signalled), child.turn < last,
                        survives && is_failure, kind, child.turn, child.signal == 0);
    };
    return order(a) < order(b);
  };
  const Child& first = *std::ranges::min_element(children_, worse);
  return first.signal != 0 ? kLostExit : first.code;
}

}  // namespace

Expected<int> launch_ranks(const LaunchOptions& options) {
  DYNMO_CHECK(options.ranks >= 1, "at least one rank, got {}", options.ranks);
  DYNMO_CHECK(!options.command.empty(), "a program to start");
  Launch launch(options);
  DYNMO_TRY(launch.start());
  return launch.run();
}

}  // namespace dynmo::process
