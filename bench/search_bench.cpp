// SPDX-License-Identifier: Apache-2.0
// Step time / (work x M / ranks) of schedules, balancers and searches on the loads of
// bench/data/search_loads.json, and with --fresh on unseen seeds of the six load models:
//
//   search_bench bench/data/search_loads.json [--fresh SEEDS]
//
// Every ratio is of the replay of the lowered schedule; beside it the largest stash of a rank over
// the limit, and the CPU time that finding the plan took (no time: a balancer and one replay).
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <string>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/search.h"
#include "tests/dynamism/default_loads.h"

namespace dynmo::plan {
namespace {

using schedule::ScheduleKind;

constexpr std::int64_t kOneSecond = 6500;  // evaluations
constexpr std::int64_t kFifteenSeconds = 96000;

struct Load {
  std::string name;
  cost::ModelCost halves;
  cost::ModelCost blocks;
};

struct Suite {
  int micro_batches = 0;
  cost::Cluster cluster;  // memory is the limit of stashes: these layers have no parameters
  std::vector<Load> loads;
};

double cpu_s() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

cost::LayerCost layer(double forward_s, double stash_bytes, bool frozen) {
  cost::LayerCost cost;
  cost.forward_s = forward_s;
  cost.backward_input_s = cost.backward_weight_s = frozen ? 0 : forward_s;
  cost.activation_bytes = Bytes{frozen ? 0 : static_cast<std::int64_t>(stash_bytes)};
  cost.frozen = frozen;
  return cost;
}

Load parse_load(const Json& json) {
  Load load{.name = json["name"].get<std::string>(), .halves = {}, .blocks = {}};
  const int frozen_blocks = json["frozen_blocks"].get<int>();
  int index = 0;
  for (const Json& block : json["forward_ns"]) {
    const double forward_s = 1e-9 * block.get<double>();
    const bool frozen = index++ < frozen_blocks;
    load.blocks.layers.push_back(layer(forward_s, 1e9, frozen));
    load.halves.layers.push_back(layer(0.4 * forward_s, 4e8, frozen));
    load.halves.layers.push_back(layer(0.6 * forward_s, 6e8, frozen));
  }
  const double head_s = 1e-9 * json["head_ns"].get<double>();
  if (head_s > 0) {
    load.blocks.layers.push_back(layer(head_s, 5e8, false));
    load.halves.layers.push_back(layer(head_s, 5e8, false));
  }
  return load;
}

Suite read_suite(const std::string& path) {
  const auto text = read_file(path);
  DYNMO_CHECK(text.has_value(), "a readable file, got {}", text.error().message);
  const Json json = Json::parse(*text);
  Suite suite;
  suite.micro_batches = json["micro_batches"].get<int>();
  suite.cluster = cost::equal_ranks(json["ranks"].get<int>(),
                                    Bytes{json["stash_limit_bytes"].get<std::int64_t>()});
  suite.cluster.inside_node.latency_s = 1e-9 * json["link_latency_ns"].get<double>();
  for (const Json& load : json["loads"]) suite.loads.push_back(parse_load(load));
  return suite;
}

// No placement and no order takes less: all work, and rank k idle until F of k layers and k
// messages can have reached it, spread over the ranks; and no layer can be split.
double lower_bound_s(const cost::ModelCost& model, const cost::Cluster& cluster,
                     int micro_batches) {
  const std::vector<double> work = cost::layer_work_s(model, micro_batches);
  double sum = 0;
  double largest = 0;
  for (const double one : work) {
    sum += micro_batches * one;
    largest = std::max(largest, micro_batches * one);
  }
  double reach = 0;
  for (int rank = 1; rank < cluster.size() && rank < model.size(); ++rank) {
    reach +=
        model.layers[static_cast<std::size_t>(rank) - 1].forward_s + cluster.inside_node.latency_s;
    sum += reach;
  }
  return std::max(sum / cluster.size(), largest);
}

struct Cell {
  double ratio = 0;
  double peak = 0;  // of the limit
  std::string note;
};

Cell cell(const Evaluation& evaluation, const cost::Cluster& cluster, std::string note = "") {
  Bytes peak;
  for (const auto& rank : evaluation.result.ranks) peak = std::max(peak, rank.peak_activation);
  return {evaluation.step_time_s / evaluation.ideal_step_time_s,
          static_cast<double>(peak.value) / static_cast<double>(cluster.ranks[0].memory.value),
          std::move(note)};
}

// Templates take the memory they take: only the search is held to the limit.
Cell of_template(const cost::ModelCost& model, const Suite& suite, ScheduleKind kind,
                 Balancer balancer) {
  const cost::Cluster roomy = cost::equal_ranks(suite.cluster.size());
  const BalanceProblem problem{{model, roomy, suite.micro_batches}, kind};
  const auto counts = balance(balancer, problem);
  DYNMO_CHECK(counts.has_value(), "a cut, got {}", counts.error().message);
  const Plan plan = make_plan(*counts, placement(balancer, problem), suite.cluster.size(), kind);
  const auto evaluation = evaluate(plan, {model, suite.cluster, suite.micro_batches});
  DYNMO_CHECK(evaluation.has_value(), "a replay, got {}", evaluation.error().message);
  return cell(*evaluation, suite.cluster);
}

Cell of_search(const cost::ModelCost& model, const Suite& suite, std::int64_t evaluations) {
  const double start = cpu_s();
  const auto found =
      search({model, suite.cluster, suite.micro_batches}, {.evaluations = evaluations});
  DYNMO_CHECK(found.has_value(), "a plan, got {}", found.error().message);
  DYNMO_CHECK(fits_memory(found->evaluation.result, suite.cluster), "a plan that fits memory");
  return cell(found->evaluation, suite.cluster,
              fmt::format("{:.1f} s {}", cpu_s() - start, found->winner));
}

template <typename Make>
void print_row(const std::string& name, const Suite& suite, Make make) {
  std::string notes;
  double sum = 0;
  int counted = 0;
  fmt::print("{:<26}", name);
  for (const Load& load : suite.loads) {
    const Cell one = make(load);
    fmt::print(" {:6.3f} ({:4.2f})", one.ratio, one.peak);
    std::fflush(stdout);
    if (!one.note.empty()) notes += fmt::format("  {}: {};", load.name, one.note);
    if (load.name == "uniform") continue;
    sum += one.ratio;
    ++counted;
  }
  fmt::print(" {:7.4f}\n", sum / std::max(counted, 1));
  if (!notes.empty()) fmt::print("   {}\n", notes);
}

void print_table(const Suite& suite) {
  fmt::print("{:<26}", "step time / ideal (stash)");
  for (const Load& load : suite.loads) fmt::print(" {:>13}", load.name);
  fmt::print("  mean but uniform\n");
  const auto row = [&](const std::string& name, ScheduleKind kind, Balancer balancer,
                       cost::ModelCost Load::*model) {
    print_row(name, suite,
              [&](const Load& load) { return of_template(load.*model, suite, kind, balancer); });
  };
  row("1F1B uniform, blocks", ScheduleKind::k1F1B, Balancer::kUniform, &Load::blocks);
  row("1F1B time, blocks", ScheduleKind::k1F1B, Balancer::kTime, &Load::blocks);
  row("1F1B time, halves", ScheduleKind::k1F1B, Balancer::kTime, &Load::halves);
  row("ZB-H1 time, halves", ScheduleKind::kZbH1, Balancer::kTime, &Load::halves);
  row("ZB-V uniform, blocks", ScheduleKind::kZbV, Balancer::kUniform, &Load::blocks);
  row("ZB-V v-pair, blocks", ScheduleKind::kZbV, Balancer::kVPair, &Load::blocks);
  row("ZB-V v-pair, halves", ScheduleKind::kZbV, Balancer::kVPair, &Load::halves);
  for (const int seconds : {1, 15}) {
    print_row(fmt::format("search {} s, halves", seconds), suite, [&](const Load& load) {
      return of_search(load.halves, suite, seconds == 1 ? kOneSecond : kFifteenSeconds);
    });
  }
  print_row("lower bound, any placement", suite, [&](const Load& load) {
    double work = 0;
    for (const double one : cost::layer_work_s(load.halves, suite.micro_batches)) work += one;
    return Cell{lower_bound_s(load.halves, suite.cluster, suite.micro_batches) *
                    suite.cluster.size() / (work * suite.micro_batches),
                0, ""};
  });
}

// 8 ranks with the memory of the fullest one in even 1F1B on the model as it starts.
cost::Cluster cluster_for(const cost::ModelCost& start, int micro_batches) {
  cost::Cluster cluster = cost::equal_ranks(8);
  cluster.inside_node.latency_s = 1e-5;
  const auto counts = balance(Balancer::kUniform, {start, cluster, micro_batches});
  const auto even =
      evaluate(make_plan(*counts, ScheduleKind::k1F1B), {start, cluster, micro_batches});
  DYNMO_CHECK(even.has_value(), "a replay, got {}", even.error().message);
  Bytes most;
  for (const auto& rank : even->result.ranks) most = std::max(most, rank.peak_memory);
  for (cost::ClusterRank& rank : cluster.ranks) rank.memory = most;
  return cluster;
}

struct Fresh {
  std::string name;
  double sum = 0;
  double worst = 0;
  int worst_seed = 0;
  int won = 0;  // by an adaptive order
};

// Unseen loads: what the default models of dynamism/ make of seeds 1001 and on, in step 6000.
void print_fresh(int seeds, std::int64_t evaluations) {
  constexpr int kMicroBatches = 32;
  const cost::Device device = cost::find_device("h100").value();
  std::vector<Fresh> rows;
  const double start = cpu_s();
  for (int seed = 1001; seed <= 1000 + seeds; ++seed) {
    const auto loads =
        dynamism::default_loads(device, static_cast<std::uint64_t>(seed), dynamism::Ends::kLeftOut);
    DYNMO_CHECK(loads.has_value(), "loads, got {}", loads.error().message);
    rows.resize(loads->size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const cost::Cluster cluster = cluster_for((*loads)[i].load->at(0), kMicroBatches);
      const cost::ModelCost model = (*loads)[i].load->at(6000);
      const auto found = search({model, cluster, kMicroBatches}, {.evaluations = evaluations});
      DYNMO_CHECK(found.has_value(), "a plan, got {}", found.error().message);
      const double ratio = found->evaluation.step_time_s / found->evaluation.ideal_step_time_s;
      Fresh& row = rows[i];
      row.name = (*loads)[i].name;
      row.sum += ratio;
      row.won += found->winner.starts_with("adaptive/") ? 1 : 0;
      if (ratio <= row.worst) continue;
      row.worst = ratio;
      row.worst_seed = seed;
    }
  }
  double all = 0;
  const double count = std::max(1, seeds);
  fmt::print("{} seeds, {:.1f} s a plan    mean   worst (seed)   adaptive won\n", seeds,
             (cpu_s() - start) / count / static_cast<double>(rows.size()));
  for (const Fresh& row : rows) {
    fmt::print("{:<24} {:7.4f} {:7.4f} ({}) {:6}\n", row.name, row.sum / count, row.worst,
               row.worst_seed, row.won);
    all += row.sum / count / static_cast<double>(rows.size());
  }
  fmt::print("{:<24} {:7.4f}\n", "all", all);
}

}  // namespace
}  // namespace dynmo::plan

int main(int argc, char** argv) {
  if (argc != 2 && !(argc == 4 && std::string(argv[2]) == "--fresh")) {
    fmt::print(stderr, "usage: search_bench bench/data/search_loads.json [--fresh SEEDS]\n");
    return 2;
  }
  if (argc == 2) {
    dynmo::plan::print_table(dynmo::plan::read_suite(argv[1]));
  } else {
    dynmo::plan::print_fresh(std::stoi(argv[3]), dynmo::plan::kOneSecond);
  }
  return 0;
}
