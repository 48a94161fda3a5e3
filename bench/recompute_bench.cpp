// SPDX-License-Identifier: Apache-2.0
// Plans of large models on H100 ranks, where memory asks for recomputation:
//
//   recompute_bench [MODEL [MAX_RANKS [EVALUATIONS]]]      llama3-8b, llama3-70b, mixtral or all
//
// A row has the step of `dynmo plan --model` without flags, the best of all schedules, balancers
// and choices of recomputation, and three bounds: the work spread evenly, the slowest rank of the
// best cut of one stage a rank without a limit of memory, and of that with 1F1B's.
#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/json.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/cost/hugging_face.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/question/question.h"

namespace dynmo::plan {
namespace {

struct Model {
  std::string name;
  Json config;
};

Json llama(int hidden, int layers, int heads, int inner, int vocabulary) {
  return {{"model_type", "llama"},       {"hidden_size", hidden},
          {"num_hidden_layers", layers}, {"num_attention_heads", heads},
          {"num_key_value_heads", 8},    {"intermediate_size", inner},
          {"vocab_size", vocabulary},    {"max_position_embeddings", 8192}};
}

std::vector<Model> models() {
  Json mixtral = llama(4096, 32, 32, 14336, 32000);
  mixtral["model_type"] = "mixtral";
  mixtral["num_local_experts"] = 8;
  mixtral["num_experts_per_tok"] = 2;
  return {{"llama3-8b", llama(4096, 32, 32, 14336, 128256)},
          {"llama3-70b", llama(8192, 80, 64, 28672, 128256)},
          {"mixtral", std::move(mixtral)}};
}

Question question_of(const Model& model, int ranks, int tokens, std::int64_t evaluations) {
  Question question;
  const cost::Device device = cost::find_device("h100").value();
  const auto shape = cost::parse_config(model.config, model.name, tokens, 1);
  DYNMO_CHECK(shape && set_shape(question, *shape, device), "a model that is known");
  set_ranks(question, ranks, std::nullopt, device, std::nullopt);
  question.micro_batches = 4 * ranks;
  question.evaluations = evaluations;
  return question;
}

std::string text_of(double seconds) { return seconds > 0 ? fmt::format("{:.3f}", seconds) : "-"; }

double step_of(const Expected<Proposal>& proposal) {
  return proposal ? proposal->evaluation.step_time_s : 0;
}

struct Best {
  double step_s = 0;
  std::string name = "-";
};

BalanceProblem problem_of(const Question& question, schedule::ScheduleKind kind,
                          Recompute recompute) {
  BalanceProblem problem{{question.model, question.cluster, question.micro_batches}, kind};
  problem.recompute = recompute;
  return problem;
}

Best best_of_all(const Question& question) {
  Best best;
  for (const schedule::KindTraits& kind : schedule::schedule_kinds()) {
    for (const Balancer balancer : balancers()) {
      if (balancer == Balancer::kSearch) continue;
      for (const Recompute choice : {Recompute::kNone, Recompute::kWhole, Recompute::kAuto}) {
        const double step = step_of(propose(balancer, problem_of(question, kind.kind, choice)));
        if (step <= 0 || (best.step_s > 0 && step >= best.step_s)) continue;
        best = {step, fmt::format("{}/{}", kind.name, name(balancer))};
      }
    }
  }
  return best;
}

// M micro-batches of the slowest rank; 0: no cut fits.
double slowest_s(Question question, bool limited) {
  if (!limited) {
    for (cost::ClusterRank& rank : question.cluster.ranks) rank.memory = cost::kUnlimitedMemory;
  }
  const auto kind = schedule::ScheduleKind::k1F1B;
  const auto counts = balance(Balancer::kOptimal, problem_of(question, kind, Recompute::kAuto));
  if (!counts) return 0;
  const auto judged = judge(Recompute::kAuto, make_plan(*counts, kind),
                            {question.model, question.cluster, question.micro_batches});
  return judged ? question.micro_batches * judged->evaluation.bottleneck_s : 0;
}

void print_row(const Model& model, int ranks, int tokens, std::int64_t evaluations) {
  const Question question = question_of(model, ranks, tokens, evaluations);
  const auto start = std::chrono::steady_clock::now();
  const auto given = answer(question);
  const double plan_s = seconds_since(start);
  const Best best = best_of_all(question);
  double work = 0;
  for (const double layer : cost::layer_work_s(question.model, question.micro_batches))
    work += layer;
  const double own = given ? given->evaluation.step_time_s : 0;
  fmt::print("{:<11} {:>5} {:>6} {:>9} {:<34} {:>9} {:<18} {:>8} {:>9} {:>9} {:>9} {:>7}\n",
             model.name, ranks, tokens, text_of(own), given ? given->proposal.winner : "-",
             text_of(best.step_s), best.name,
             own > 0 && best.step_s > 0 ? fmt::format("{:.4f}", own / best.step_s) : "-",
             text_of(question.micro_batches * work / ranks), text_of(slowest_s(question, false)),
             text_of(slowest_s(question, true)), fmt::format("{:.1f}", plan_s));
}

void print_table(std::string_view only, int max_ranks, std::int64_t evaluations) {
  fmt::print("{:<11} {:>5} {:>6} {:>9} {:<34} {:>9} {:<18} {:>8} {:>9} {:>9} {:>9} {:>7}\n",
             "model", "ranks", "tokens", "step s", "plan", "best s", "of all others", "ratio",
             "work s", "layers s", "memory s", "plan s");
  for (const Model& model : models()) {
    if (only != "all" && only != model.name) continue;
    for (int ranks = 4; ranks <= max_ranks; ranks *= 2) {
      for (const int tokens : {4096, 8192}) print_row(model, ranks, tokens, evaluations);
    }
  }
}

}  // namespace
}  // namespace dynmo::plan

int main(int argc, char** argv) {
  const std::string_view only = argc > 1 ? argv[1] : "all";
  const int max_ranks = argc > 2 ? std::atoi(argv[2]) : 64;
  dynmo::plan::print_table(only, max_ranks, argc > 3 ? std::atoll(argv[3]) : 6500);
}
