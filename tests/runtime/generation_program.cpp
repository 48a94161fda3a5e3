// SPDX-License-Identifier: Apache-2.0
// A member of the training of generations.h as a process: `generation_program launch GROUPS` starts
// four of them, which go through that many groups over c10d.
#include <fmt/format.h>

#include <cstdlib>
#include <cstring>

#include "dynmo/c10d/c10d_transport.h"
#include "dynmo/process/launcher.h"
#include "tests/runtime/generations.h"
#include "tests/runtime/resources.h"

namespace dynmo::runtime::testing {
namespace {

// Groups one after the other through one store.
class Groups {
 public:
  Expected<void> open() {
    DYNMO_ASSIGN(const auto environment, process::rank_environment());
    if (!environment) return make_error(ErrorCode::kBadInput, "not started as a rank");
    options_ = c10d::group_options(*environment);
    return {};
  }

  [[nodiscard]] int number() const { return options_.rank.value; }

  Expected<std::unique_ptr<transport::Transport>> join(Generation generation, int size) {
    options_.generation = generation;
    options_.size = size;
    DYNMO_ASSIGN(std::unique_ptr<c10d::Group> group, c10d::join_group(options_));
    options_.store = group->store();
    return std::unique_ptr<transport::Transport>(std::move(group));
  }

 private:
  c10d::GroupOptions options_;
};

Expected<void> compare(const History& history, const RunOptions& run) {
  DYNMO_ASSIGN(const History alone, live_alone(run.steps, run));
  if (history == alone) return {};
  return make_error(ErrorCode::kInternal, "the training differs from that of one rank");
}

Expected<void> be_member(int count) {
  Groups groups;
  DYNMO_TRY(groups.open());
  RunOptions run;
  run.micro_batches = 2;
  run.steps = count * Member().steps_of_a_group;
  std::ptrdiff_t at_first = 0;
  const Member member{
      .number = groups.number(),
      .groups = count,
      .run = run,
      .join = [&](Generation generation, int size) { return groups.join(generation, size); },
      .leave = [](std::unique_ptr<transport::Transport> group) -> Expected<void> {
        return static_cast<c10d::Group&>(*group).leave();
      },
      .changed =
          [&](int group) {
            if (group == 2) at_first = resources();
          }};
  DYNMO_ASSIGN(const History history, live(member));
  if (const std::ptrdiff_t at_last = resources(); at_last > at_first) {
    return make_error(ErrorCode::kInternal, "{} descriptors and threads, {} after the first groups",
                      at_last, at_first);
  }
  if (member.number != 0) return {};
  DYNMO_TRY(compare(history, run));
  fmt::print("done\n");
  return {};
}

int launch(const char* groups) {
  process::LaunchOptions options;
  options.ranks = kMembers;
  options.command = {"/proc/self/exe", groups};
  const auto code = process::launch_ranks(options);
  if (code) return *code;
  fmt::print(stderr, "dynmo: {}\n", code.error().message);
  return exit_code(code.error().code);
}

}  // namespace
}  // namespace dynmo::runtime::testing

int main(int argc, char** argv) {
  using dynmo::c10d::quit;
  namespace program = dynmo::runtime::testing;
  if (argc == 3 && std::strcmp(argv[1], "launch") == 0) quit(program::launch(argv[2]));
  if (argc != 2) return 2;
  const auto done = program::be_member(std::atoi(argv[1]));
  if (done) return 0;
  fmt::print(stderr, "dynmo: {}\n", done.error().message);
  quit(dynmo::exit_code(done.error().code));
}
