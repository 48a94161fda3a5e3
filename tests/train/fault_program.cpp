// SPDX-License-Identifier: Apache-2.0
// Trains like `dynmo train`, but one rank kills itself at a scripted message: in forward, in
// backward, in the middle of the pieces of a migrating layer of 64 MiB or of one that was pruned
// and compressed, in a pruning event, or, of two replicas, in summing gradients; in forward and in
// migration also with sparse attention, with experts and the bias that evens them out, and with
// mixture of depths, whose blocks move as one layer; where tokens leave on the way, in forward, in
// the second of two messages and in a migration.
//
//   fault_program [sparse-|experts-|routed-|rows-]forward|backward|
//                 [pruned-|sparse-|experts-|routed-|rows-]migration|rows-second-message|event|
//                 reduction VICTIM DATA RUN [launch]
//                                            ranks from the environment, or launched here
//   fault_program verify 0 DATA RUN          is there a checkpoint that verifies?
//   fault_program elastic 0 DATA RUN launch  a run that others may join
//   fault_program join N DATA RUN            joins it, and dies at the N-th message that it sends
//   fault_program join-asked N DATA RUN      joins it, and is sent SIGTERM when it waits for the
//   N-th
//                                            message about the run's size
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "dynmo/c10d/c10d_transport.h"
#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/dynamism/early_exit/options.h"
#include "dynmo/dynamism/mixture_of_depths/options.h"
#include "dynmo/dynamism/moe/options.h"
#include "dynmo/dynamism/pruning/options.h"
#include "dynmo/dynamism/sparse_attention/options.h"
#include "dynmo/train/rank_process.h"
#include "dynmo/transport/tags.h"
#include "dynmo/transport/testing/fault.h"

namespace {

using namespace dynmo;

config::Config config_for(const std::string& where, const std::string& data,
                          const std::string& run) {
  config::Config config;
  config.data.path = data;
  config.run.directory = run;
  config.model.shape = {
      .hidden = 32, .blocks = 3, .heads = 4, .kv_heads = 2, .intermediate = 48, .sequence = 16};
  config.batch = {.micro_batches = 4, .micro_batch_size = 2};
  config.train.steps = 100000;
  config.train.validation_every = 0;
  config.checkpoint.every = 5;
  config.pipeline.cut = {2, 3, 3};
  config.balance.enabled = false;
  if (where == "reduction") {
    config.pipeline.replicas = 2;
    config.pipeline.cut = {4, 4};
  }
  if (where == "elastic") {
    config.elastic.enabled = true;
    config.model.shape.blocks = 6;
    config.pipeline.cut = {};
  }
  if (where == "event") {
    auto& pruning = config.sources.enable<dynamism::PruningOptions>();
    pruning.start = 7;
    pruning.every = 5;
    pruning.end = 107;
    pruning.initial_sparsity = 0.5;
    config.checkpoint.asynchronous = false;  // one is there when the victim dies
  }
  if (where == "pruned-migration") {
    auto& pruning = config.sources.enable<dynamism::PruningOptions>();
    pruning.start = pruning.end = 0;  // before anything moves
    pruning.final_sparsity = 0.8;
  }
  if (where.starts_with("rows-")) {
    auto& exits = config.sources.enable<dynamism::EarlyExitOptions>();
    exits.exit_every = 1;
    exits.warm_up = exits.ramp_steps = 1;
    exits.survivors = 0.3;
    if (where == "rows-second-message") exits.row_room = 1e-6;  // of one row
  }
  if (where.starts_with("sparse-")) {
    config.sources.enable<dynamism::SparseAttentionOptions>().buckets = 4;
  }
  if (where.starts_with("experts-")) {
    auto& experts = config.sources.enable<dynamism::MoeOptions>();
    experts.router = dynamism::MoeRouter::kBias;
    experts.experts = 4;
    if (where.ends_with("migration")) experts.expert_hidden = 910;  // together as wide as the MLP
  }
  const bool routed = where.starts_with("routed-");
  if (routed) {
    config.sources.enable<dynamism::MixtureOfDepthsOptions>().capacity = 0.25;
    config.pipeline.cut = {2, 3, 2};
  }
  if (where.ends_with("migration")) {
    // An MLP layer of 3 x 512 x 3640 parameters: 64 MiB with its two moments. The cut is so uneven
    // that it must move.
    config.model.shape = {.hidden = 512,
                          .blocks = 3,
                          .heads = 4,
                          .kv_heads = 4,
                          .intermediate = 3640,
                          .sequence = 16};
    config.batch.micro_batch_size = 1;  // steps are short
    config.pipeline.cut = {routed ? 5 : 6, 1, 1};
    config.balance.enabled = true;
    config.balance.minimum_gain = config.balance.noise_factor = 0;  // also on a busy machine
    config.checkpoint.every = 0;
  }
  return config;
}

void die(const std::string& run) {
  ::close(::open((run + "/killed").c_str(), O_CREAT | O_WRONLY, 0644));
  std::raise(SIGKILL);
}

// The messages at which the victim dies: a send to the rank behind it is an activation, to the one
// before a gradient.
transport::Fault fault_for(const std::string& where, int victim, const std::string& run) {
  transport::Fault fault{.kind = transport::Fault::Kind::kCall, .call = [run] { die(run); }};
  fault.first_tag = transport::schedule_tag(0, 0);
  fault.first = 250;
  if (where.ends_with("forward")) fault.peer = transport::Member(victim + 1);
  if (where == "backward") fault.peer = transport::Member(victim - 1);
  if (where == "reduction") {
    fault.first_tag = transport::reduction_tag(LayerId(0));
    fault.last_tag = transport::reduction_tag(LayerId(7));
    fault.first = 1000;
  }
  if (where == "event") {  // after those of the start: in the sums over all weights
    fault.first_tag = fault.last_tag = transport::control_tag(transport::Control::kSources);
    fault.first = 9;
  }
  if (where == "rows-second-message") {
    fault.first_tag = transport::second_message_tag(0, 0);
    fault.peer = transport::Member(victim + 1);
  }
  if (where.ends_with("migration")) {
    fault.first_tag = transport::migration_tag(LayerId(0));
    fault.last_tag = transport::migration_tag(LayerId(7));
    fault.first = where == "pruned-migration" ? 4 : 20;
    fault.on = victim == 0 ? transport::Fault::On::kSend : transport::Fault::On::kReceive;
  }
  return fault;
}

[[noreturn]] void end(const Expected<void>& done) {
  if (done) dynmo::c10d::quit(0);
  std::fprintf(stderr, "dynmo: error: %s\n", done.error().message.c_str());
  dynmo::c10d::quit(exit_code(done.error().code));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  const std::string where = argv[1];
  const int victim = std::atoi(argv[2]);
  const std::string run = argv[4];
  if (where == "verify") {
    const auto newest = checkpoint::newest_verified(run + "/checkpoints", nullptr);
    if (!newest) std::fprintf(stderr, "%s\n", newest.error().message.c_str());
    return newest ? 0 : 4;
  }
  train::RankProcess process;
  if (where == "join" || where == "join-asked") {
    process.reporter.line = [](std::string_view line) {
      std::printf("%.*s\n", static_cast<int>(line.size()), line.data());
      std::fflush(stdout);
    };
    process.decorate = [&](std::unique_ptr<transport::Transport> inner) {
      const bool asked = where == "join-asked";
      transport::Fault fault{.kind = transport::Fault::Kind::kCall,
                             .first = victim,
                             .call = [asked] { std::raise(asked ? SIGTERM : SIGKILL); }};
      if (asked) {
        fault.first_tag = fault.last_tag = transport::control_tag(transport::Control::kSize);
        fault.on = transport::Fault::On::kReceive;
      }
      return transport::with_faults(std::move(inner), {fault});
    };
    end(train::join_run({.run = run, .secret_file = "", .data = ""}, process));
  }
  process.options.config = config_for(where, argv[3], run);
  process.decorate = [&](std::unique_ptr<transport::Transport> inner) {
    if (where == "elastic" || inner->rank() != transport::Member(victim)) return inner;
    return transport::with_faults(std::move(inner), {fault_for(where, victim, run)});
  };
  process.options.config.pipeline.ranks = where == "reduction" ? 2 : 3;
  process.options.config.pipeline.pin = false;
  if (argc == 6) {
    const auto code = train::launch(process.options, {argv, argv + argc - 1});
    if (code) return *code;
    std::fprintf(stderr, "dynmo: error: %s\n", code.error().message.c_str());
    return exit_code(code.error().code);
  }
  end(train::run_rank(process));
}
