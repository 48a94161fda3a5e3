// SPDX-License-Identifier: Apache-2.0
// How long training stands still while layers change ranks, beside the bare transfer of the same
// pieces: two processes over Gloo on loopback, in turn in one run, forth and back.
// migration_bench [ROUNDS]. Two tables: medians and quartiles of the pauses and of the paired
// ratios, after one round that is not counted.
//
// The first one is of moves between two steps, the second of moves during one, whose layers compute
// by sleeping. There the pause is by how much longer the step of the move and the one after it take
// than a step without a move, of which each plan runs some. A column has what the pipeline itself
// says.
//
// The pause is all of Pipeline::apply: agreeing on the plan, new memory, checksums at both ends,
// the vote, new schedules. The bare transfer goes from the same memory into memory that was used
// before. Both are those of the rank that took longer. The last column is the ratio of the
// processor time that all threads of both ranks took, which a loaded machine changes less.
#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "dynmo/c10d/c10d_transport.h"
#include "dynmo/config/learning_rate.h"
#include "dynmo/core/rng.h"
#include "dynmo/model/adamw.h"
#include "dynmo/model/emulated/layer.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/process/launcher.h"
#include "dynmo/runtime/pieces.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/transport/tags.h"

namespace {

using namespace dynmo;  // NOLINT: a program
using Clock = std::chrono::steady_clock;
using transport::Transport;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
const transport::Tag kStart = transport::control_tag(transport::Control::kUser, 1);
const transport::Tag kTimes = transport::control_tag(transport::Control::kUser, 2);
const transport::Tag kRaw = transport::migration_tag(LayerId(1000));

struct Case {
  int layers;
  std::int64_t mib;  // of a layer's state: values and two moments
};
constexpr Case kCases[] = {{1, 1}, {1, 16}, {1, 64}, {4, 16}};

constexpr int kMicroBatches = 4;
constexpr double kComputeS = 0.2;  // of a step, where it computes

// The layers that move, between two small ones that stay; all computing is theirs.
model::Model layers_of(const Case& moved, double compute_s = 0) {
  cost::ModelCost costs;
  costs.layers.resize(static_cast<std::size_t>(moved.layers) + 2);
  for (std::size_t i = 0; i < costs.layers.size(); ++i) {
    cost::LayerCost& layer = costs.layers[i];
    layer.name = "layer";
    layer.parameter_bytes = Bytes{moved.mib * kMiB / 3};
    layer.boundary_bytes = Bytes{64};
    if (i == 0 || i + 1 == costs.layers.size()) continue;
    layer.forward_s = layer.backward_input_s = layer.backward_weight_s =
        compute_s / (3 * kMicroBatches * moved.layers);
  }
  costs.layers.front().parameter_bytes = costs.layers.back().parameter_bytes = Bytes{4096};
  return model::make_emulated({.costs = [=](std::int64_t) { return costs; }}).value();
}

plan::Plan plan_of(const Case& moved, bool forth, int generation) {
  return plan::make_plan(
      forth ? std::vector{1, moved.layers + 1} : std::vector{moved.layers + 1, 1},
      schedule::ScheduleKind::k1F1B, static_cast<Generation>(generation));
}

struct Sample {
  double wall_s = 0;  // of the rank that took longer
  double cpu_s = 0;   // of both, all threads
};

double cpu_s() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Times `work`; both ranks begin together.
template <typename Work>
Expected<Sample> timed(Transport& transport, Work work) {
  const std::byte here{1};
  DYNMO_TRY(transport::all_gather(transport, kStart, std::span(&here, 1)));
  const auto start = Clock::now();
  const double cpu_start = cpu_s();
  DYNMO_TRY(work());
  const Sample mine{std::chrono::duration<double>(Clock::now() - start).count(),
                    cpu_s() - cpu_start};
  DYNMO_ASSIGN(const auto all,
               transport::all_gather(transport, kTimes, std::as_bytes(std::span(&mine, 1))));
  Sample both;
  for (const auto& bytes : all) {
    Sample theirs;
    std::memcpy(&theirs, bytes.data(), sizeof theirs);
    both.wall_s = std::max(both.wall_s, theirs.wall_s);
    both.cpu_s += theirs.cpu_s;
  }
  return both;
}

Expected<void> transfer(Transport& transport, const std::vector<std::span<std::byte>>& pieces,
                        bool sends) {
  const transport::Member peer(1 - transport.rank().value);
  std::vector<std::unique_ptr<transport::Operation>> operations;
  for (const auto piece : pieces) {
    operations.push_back(sends ? transport.send(peer, kRaw, piece)
                               : transport.receive(peer, kRaw, piece));
  }
  for (const auto& operation : operations) DYNMO_TRY(operation->wait());
  return {};
}

std::string spread(std::vector<double> values, double unit, int digits) {
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return fmt::format("{:>7.{}f} ({:.{}f} to {:.{}f})", unit * values[n / 2], digits,
                     unit * values[n / 4], digits, unit * values[n - 1 - n / 4], digits);
}

Expected<void> measure(Transport& transport, const Case& moved, int rounds) {
  const model::Model model = layers_of(moved);
  runtime::PipelineOptions options;
  options.steps = 1;
  options.boundary_shape = {16};
  options.learning_rate.total_steps = 1;
  options.balancing = runtime::Balancing::kNever;
  const plan::Plan first = plan_of(moved, false, 0);
  runtime::Pipeline pipeline(
      transport, model, options,
      {first, runtime::initial_states(model, first, Rank(transport.rank().value), 1)});
  // The same bytes wherever the layers are; what arrives is compared with what was made.
  std::vector<model::LayerState> made;
  std::vector<std::span<std::byte>> bare;
  for (int i = 1; i <= moved.layers; ++i) {
    made.push_back(model::make_state(*model[static_cast<std::size_t>(i)], LayerId(i), 1));
    Rng rng(static_cast<std::uint64_t>(i));
    for (const auto& tensor : model::tensors(made.back())) {
      for (std::byte& byte : tensor.bytes) byte = static_cast<std::byte>(rng.next());
      const auto pieces = runtime::pieces_of(tensor.bytes);
      bare.insert(bare.end(), pieces.begin(), pieces.end());
    }
    const auto here = pipeline.states().find(LayerId(i));
    if (here == pipeline.states().end()) continue;
    auto from = model::tensors(made.back());
    auto into = model::tensors(here->second);
    for (std::size_t t = 0; t < from.size(); ++t) {
      std::memcpy(into[t].bytes.data(), from[t].bytes.data(), from[t].bytes.size());
    }
  }
  std::vector<Digest> wanted;
  for (const auto& state : made) wanted.push_back(model::digest(state));

  std::vector<double> raw;
  std::vector<double> pause;
  std::vector<double> ratio;
  std::vector<double> cpu_ratio;
  for (int move = 0; move < 2 * (rounds + 1); ++move) {
    const bool forth = move % 2 == 0;
    const bool sends = transport.rank() == transport::Member(forth ? 0 : 1);
    Sample bare_sample;
    Sample move_sample;
    for (int k = 0; k < 2; ++k) {
      if ((k + move / 2) % 2 == 0) {
        DYNMO_ASSIGN(bare_sample,
                     timed(transport, [&] { return transfer(transport, bare, sends); }));
      } else {
        DYNMO_ASSIGN(move_sample, timed(transport, [&]() -> Expected<void> {
                       DYNMO_ASSIGN(const bool moved_all,
                                    pipeline.apply(plan_of(moved, forth, move + 1)));
                       if (moved_all) return {};
                       return make_error(ErrorCode::kInternal, "a copy was refused: {}",
                                         pipeline.last_migration().refusal);
                     }));
      }
    }
    for (int i = 1; i <= moved.layers; ++i) {
      const auto here = pipeline.states().find(LayerId(i));
      const bool right =
          sends ? here == pipeline.states().end()
                : here != pipeline.states().end() &&
                      model::digest(here->second) == wanted[static_cast<std::size_t>(i) - 1];
      if (!right) return make_error(ErrorCode::kInternal, "layer {} did not move whole", i);
    }
    if (move < 2) continue;
    raw.push_back(bare_sample.wall_s);
    pause.push_back(move_sample.wall_s);
    ratio.push_back(move_sample.wall_s / bare_sample.wall_s);
    cpu_ratio.push_back(move_sample.cpu_s / bare_sample.cpu_s);
  }
  if (transport.rank() != transport::Member(0)) return {};
  std::vector<double> sorted = raw;
  std::nth_element(sorted.begin(), sorted.begin() + std::ssize(sorted) / 2, sorted.end());
  const double mib = static_cast<double>(moved.layers * moved.mib);
  fmt::print("{:>2} x {:>2} MiB {:<28}{:<28}{:<24}{:>8.0f}{}\n", moved.layers, moved.mib,
             spread(raw, 1e3, 2), spread(pause, 1e3, 2), spread(ratio, 1, 2),
             mib / sorted[sorted.size() / 2], spread(cpu_ratio, 1, 2));
  std::fflush(stdout);
  return {};
}

// The same numbers on both ranks, wherever the layers are.
void fill(model::LayerState& state) {
  Rng rng(static_cast<std::uint64_t>(state.id.value));
  for (const auto& tensor : model::tensors(state)) {
    const std::span<float> floats(reinterpret_cast<float*>(tensor.bytes.data()),
                                  tensor.bytes.size() / sizeof(float));
    for (float& value : floats) value = static_cast<float>(rng.uniform());
  }
}

// Moves while steps run. The state that arrives is compared with one that has made the same updates
// and was never sent.
Expected<void> measure_during_steps(Transport& transport, const Case& moved, int rounds) {
  const model::Model model = layers_of(moved, kComputeS);
  runtime::PipelineOptions options;
  options.steps = 1 << 20;
  options.micro_batches = kMicroBatches;
  options.boundary_shape = {16};
  options.learning_rate.total_steps = options.steps;
  options.balancing = runtime::Balancing::kNever;
  const plan::Plan first = plan_of(moved, false, 0);
  runtime::Pipeline pipeline(
      transport, model, options,
      {first, runtime::initial_states(model, first, Rank(transport.rank().value), 1)});
  std::vector<model::LayerState> never_sent;
  std::vector<std::span<std::byte>> bare;
  for (int i = 1; i <= moved.layers; ++i) {
    never_sent.push_back(model::make_state(*model[static_cast<std::size_t>(i)], LayerId(i), 1));
    fill(never_sent.back());
    for (const auto& tensor : model::tensors(never_sent.back())) {
      const auto pieces = runtime::pieces_of(tensor.bytes);
      bare.insert(bare.end(), pieces.begin(), pieces.end());
    }
    const auto here = pipeline.states().find(LayerId(i));
    if (here != pipeline.states().end()) fill(here->second);
  }
  const auto step = [&]() -> Expected<void> {
    DYNMO_ASSIGN(const auto report,
                 pipeline.step([](std::int64_t, MicroBatchId) { return runtime::MicroBatch(); }));
    return report.stop ? Expected<void>(*report.stop) : Expected<void>();
  };
  const auto update_never_sent = [&](std::int64_t until, std::int64_t& updated) {
    for (; updated < until; ++updated) {
      model::AdamWOptions optimizer = options.optimizer;
      optimizer.learning_rate = config::learning_rate(options.learning_rate, updated);
      for (model::LayerState& state : never_sent) model::update(state, optimizer);
    }
  };

  std::int64_t updated = 0;
  std::vector<double> raw;
  std::vector<double> pause;
  std::vector<double> ratio;
  std::vector<double> said_ratio;
  for (int move = 0; move < 2 * (rounds + 1); ++move) {
    const bool forth = move % 2 == 0;
    const bool sends = transport.rank() == transport::Member(forth ? 0 : 1);
    DYNMO_ASSIGN(const Sample before, timed(transport, step));
    DYNMO_ASSIGN(const Sample during, timed(transport, [&]() -> Expected<void> {
                   DYNMO_TRY(pipeline.begin_move(plan_of(moved, forth, move + 1)));
                   return step();
                 }));
    DYNMO_ASSIGN(const Sample after, timed(transport, step));
    DYNMO_ASSIGN(const Sample later, timed(transport, step));
    update_never_sent(pipeline.next_step(), updated);
    for (const model::LayerState& state : never_sent) {
      const auto here = pipeline.states().find(state.id);
      const bool right = sends ? here == pipeline.states().end()
                               : here != pipeline.states().end() &&
                                     model::digest(here->second) == model::digest(state);
      if (!right) return make_error(ErrorCode::kInternal, "{} did not move whole", state.id);
    }
    // Sent from numbers that stay what they are, into memory of their size.
    std::vector<std::span<std::byte>> pieces = bare;
    static std::vector<std::byte> into;
    into.resize(static_cast<std::size_t>(moved.layers * moved.mib * kMiB));
    if (!sends) {
      std::size_t at = 0;
      for (auto& piece : pieces) {
        piece = std::span(into).subspan(at, piece.size());
        at += piece.size();
      }
    }
    DYNMO_ASSIGN(const Sample bare_sample,
                 timed(transport, [&] { return transfer(transport, pieces, sends); }));
    const double own_s = pipeline.last_migration().seconds;
    DYNMO_ASSIGN(const auto said,
                 transport::all_gather(transport, kTimes, std::as_bytes(std::span(&own_s, 1))));
    double said_s = 0;
    for (const auto& bytes : said) {
      double theirs = 0;
      std::memcpy(&theirs, bytes.data(), sizeof theirs);
      said_s = std::max(said_s, theirs);
    }
    if (move < 2) continue;
    raw.push_back(bare_sample.wall_s);
    pause.push_back(during.wall_s - before.wall_s + after.wall_s - later.wall_s);
    ratio.push_back(pause.back() / bare_sample.wall_s);
    said_ratio.push_back(said_s / bare_sample.wall_s);
  }
  if (transport.rank() != transport::Member(0)) return {};
  fmt::print("{:>2} x {:>2} MiB {:<28}{:<28}{:<24}{}\n", moved.layers, moved.mib,
             spread(raw, 1e3, 2), spread(pause, 1e3, 2), spread(ratio, 1, 2),
             spread(said_ratio, 1, 2));
  std::fflush(stdout);
  return {};
}

Expected<void> run_rank(const process::RankEnvironment& environment, int rounds) {
  DYNMO_ASSIGN(const auto group, dynmo::c10d::join_group(dynmo::c10d::group_options(environment)));
  if (group->rank() == transport::Member(0)) {
    fmt::print("{} moves each way, raw and moved in turn; median (quartiles)\n", rounds);
    fmt::print("{:<12}{:<28}{:<28}{:<24}{:<11}{}\n", "layers", "   raw, ms", "   pause, ms",
               "   pause / raw", "raw MiB/s", "processor time");
  }
  for (const Case& moved : kCases) DYNMO_TRY(measure(*group, moved, rounds));
  if (group->rank() == transport::Member(0)) {
    fmt::print("during a step of {:.0f} ms\n{:<12}{:<28}{:<28}{:<24}{}\n", 1e3 * kComputeS,
               "layers", "   raw, ms", "   pause, ms", "   pause / raw", "   as the pipeline says");
  }
  for (const Case& moved : kCases) DYNMO_TRY(measure_during_steps(*group, moved, rounds));
  return group->leave();
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 12;
  const auto environment = process::rank_environment();
  const auto done = [&]() -> Expected<int> {
    if (!environment) return environment.error();
    if (!*environment) {
      return process::launch_ranks(
          {.ranks = 2, .command = {"/proc/self/exe", std::to_string(rounds)}});
    }
    DYNMO_TRY(run_rank(**environment, rounds));
    return 0;
  }();
  if (!done) fmt::print(stderr, "migration_bench: {}\n", done.error().message);
  const int code = done ? *done : 1;
  if (environment && *environment) dynmo::c10d::quit(code);
  return code;
}
