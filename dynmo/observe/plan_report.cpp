// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/plan_report.h"

#include <algorithm>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/observe/table.h"
#include "dynmo/plan/balance.h"

namespace dynmo::observe {
namespace {

constexpr std::size_t kMaxStages = 64;
constexpr std::size_t kMaxNameBytes = 32;

// Returns a name from a file as one short line for a terminal.
std::string plain(const std::string& name) {
  std::string text = name.substr(0, kMaxNameBytes);
  if (name.size() > kMaxNameBytes) {  // not in the middle of a character
    while (!text.empty() && (static_cast<unsigned char>(name[text.size()]) & 0xC0) == 0x80) {
      text.pop_back();
    }
    text += "..";
  }
  std::replace_if(
      text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }, '?');
  return text;
}

std::string numbers_of(const plan::LayerRange& range) {
  if (range.count == 1) return fmt::format("{}", range.first);
  return fmt::format("{}-{}", range.first, range.end() - 1);
}

std::string names_of(const plan::LayerRange& range, const cost::ModelCost& model) {
  const std::string first = plain(model.layers[range.first.index()].name);
  if (range.count == 1) return first;
  const auto last = static_cast<std::size_t>(range.end() - 1);
  return first + " .. " + plain(model.layers[last].name);
}

std::string percent(double share) { return fmt::format("{:.1f} %", share * 100); }

std::string stage_table(const PlanReport& report) {
  const std::vector<Column> columns = {{.title = "stage"},
                                       {.title = "rank"},
                                       {.title = "layers", .align = Column::Align::kLeft},
                                       {.title = "named", .align = Column::Align::kLeft},
                                       {.title = "time"},
                                       {.title = "memory"},
                                       {.title = "in flight"}};
  const std::vector<sim::StageCost> costs = plan::stage_costs(report.plan, report.model);
  const std::size_t stages = report.plan.stages.size();
  const std::size_t hidden = stages > kMaxStages ? stages - kMaxStages : 0;
  std::vector<std::vector<std::string>> rows;
  for (std::size_t s = 0; s < stages; ++s) {
    if (hidden > 0 && s == kMaxStages / 2) {
      rows.push_back({"...", "", "", fmt::format("({} more stages)", hidden), "", "", ""});
      s += hidden;
    }
    const plan::PlanStage& stage = report.plan.stages[s];
    const std::int64_t held = report.evaluation.in_flight[s];
    rows.push_back(
        {fmt::format("{}", s), fmt::format("{}", stage.rank), numbers_of(stage.layers),
         names_of(stage.layers, report.model), format_seconds(report.evaluation.stage_time_s[s]),
         format_bytes(costs[s].state + costs[s].activation * held), fmt::format("{}", held)});
  }
  return table(columns, rows);
}

std::string step_line(std::string_view name, const plan::Evaluation& evaluation, bool fits) {
  std::string text = fmt::format("{:<16}{}", name, format_seconds(evaluation.step_time_s));
  if (evaluation.ideal_step_time_s > 0) {
    text += fmt::format(", {:.3f} x ideal", evaluation.step_time_s / evaluation.ideal_step_time_s);
  }
  return text + (fits ? "\n" : ", needs more memory than there is\n");
}

std::string step_lines(const PlanReport& report) {
  std::string text = step_line("step time", report.evaluation, true);
  for (const Compared& other : report.compared) {
    text += step_line("  " + other.name, other.evaluation, other.fits);
  }
  return text + fmt::format("{:<16}{} = {} x work / speed of all ranks\n", "  ideal",
                            format_seconds(report.evaluation.ideal_step_time_s),
                            report.micro_batches);
}

std::string speed_line(const PlanReport& report) {
  if (!(report.tokens > 0)) return "";
  const double speed = report.tokens * report.micro_batches / report.evaluation.step_time_s;
  return fmt::format("{:<16}{:.0f} tokens/s, {:.0f} of each of {}\n", "speed", speed,
                     speed / report.plan.ranks, format_count(report.plan.ranks, "rank"));
}

std::string bubble_line(const plan::Evaluation& evaluation) {
  const sim::BubbleSplit& split = evaluation.result.bubble_split;
  return fmt::format("{:<16}{}: fill and drain {}, imbalance {}, communication {}, straggler {}\n",
                     "bubble", percent(evaluation.result.bubble), percent(split.fill_drain),
                     percent(split.imbalance), percent(split.communication),
                     percent(split.straggler));
}

std::string imbalance_line(const PlanReport& report) {
  std::string text = fmt::format("{:<16}", "imbalance");
  if (!report.compared.empty()) {
    text += percent(report.compared.front().evaluation.imbalance) + " -> ";
  }
  return text + percent(report.evaluation.imbalance) + "\n";
}

// Describes the rank nearest to its memory limit, or without limits the one that holds most.
std::string memory_line(const PlanReport& report) {
  const auto& usage = report.evaluation.result.ranks;
  const auto fill = [&](std::size_t r) {
    return static_cast<double>(usage[r].peak_memory.value) /
           static_cast<double>(std::max<std::int64_t>(report.cluster.ranks[r].memory.value, 1));
  };
  std::size_t fullest = 0;
  for (std::size_t r = 1; r < usage.size(); ++r) {
    if (fill(r) > fill(fullest)) fullest = r;
  }
  const Bytes limit = report.cluster.ranks[fullest].memory;
  return fmt::format("{:<16}{} at most{} on rank {}, {} of them stashes\n", "memory",
                     format_bytes(usage[fullest].peak_memory),
                     limit == cost::kUnlimitedMemory ? "" : " of " + format_bytes(limit), fullest,
                     format_bytes(usage[fullest].peak_activation));
}

// Lists what was assumed for the user: costs, memory that stays free, links between ranks.
std::string assumed_lines(const PlanReport& report) {
  std::string text;
  if (!report.costs.empty()) text += fmt::format("{:<16}{}\n", "costs", report.costs);
  if (report.head_room > 0) {
    text += fmt::format("{:<16}{:.3g} % of the memory of every rank stays free\n", "head-room",
                        100 * report.head_room);
  }
  if (report.links.empty()) return text;
  const cost::Link& link = report.cluster.inside_node;
  return text + fmt::format("{:<16}{}: {} and {:.0f} GB/s a message\n", "links", report.links,
                            format_seconds(link.latency_s), link.bandwidth_bytes_per_s / 1e9);
}

// Returns text such as "2 of 8 layers run forward again: 1, 4-7".
std::string recompute_line(const PlanReport& report) {
  const plan::LayerSet& layers = report.recomputed;
  if (layers.empty()) return "";
  std::string ranges;
  for (std::size_t i = 0; i < layers.size();) {
    std::size_t end = i + 1;
    while (end < layers.size() && layers[end].value == layers[end - 1].value + 1) ++end;
    ranges += (ranges.empty() ? "" : ", ") +
              numbers_of({layers[i], layers[end - 1].value - layers[i].value + 1});
    i = end;
  }
  return fmt::format("{:<16}{} of {} layers run forward again: {}\n", "recompute", layers.size(),
                     report.model.size(), ranges);
}

// Returns "4 slices of the head are joined, which costs 10.0 % of the step time (...)".
std::string joined_line(const PlanReport& report) {
  if (!report.joined_head) return "";
  const plan::JoinedHead& joined = *report.joined_head;
  std::string text = fmt::format("{:<16}{} slices of the head are joined", "head", joined.slices);
  if (joined.sliced_step_time_s <= 0) return text + "; no plan was found with slices apart\n";
  const double longer = joined.step_time_s / joined.sliced_step_time_s - 1;
  if (longer <= 0) return text + ", which costs nothing\n";
  return text + fmt::format(", which costs {}: a step would take {} with slices apart\n",
                            percent(longer), format_seconds(joined.sliced_step_time_s));
}

std::string idle_ranks_line(const plan::Plan& plan) {
  std::vector<bool> used(static_cast<std::size_t>(plan.ranks), false);
  for (const plan::PlanStage& stage : plan.stages) used[stage.rank.index()] = true;
  const auto idle = std::count(used.begin(), used.end(), false);
  return idle == 0 ? "" : fmt::format("{:<16}{} of {}\n", "idle ranks", idle, plan.ranks);
}

bool has_nodes(const cost::Cluster& cluster) {
  return std::any_of(cluster.ranks.begin(), cluster.ranks.end(),
                     [&](const auto& rank) { return rank.node != cluster.ranks.front().node; });
}

// Returns "12.0 MiB a step between stages, 4.0 MiB of them between nodes; 8.0 MiB of gradients to
// other replicas; 1.0 MiB of the moves between nodes".
std::string traffic_line(const PlanReport& report) {
  TrafficRows stages;
  TrafficRows moves;
  Bytes between_stages;
  Bytes reduction;
  for (const TrafficRow& row : report.traffic) {
    if (row.purpose == Purpose::kReduction) {
      reduction += row.count.bytes;
    } else if (row.purpose == Purpose::kMigration) {
      moves.push_back(row);
    } else {
      between_stages += row.count.bytes;
      stages.push_back(row);
    }
  }
  if (report.traffic.empty()) return "";
  std::string text =
      fmt::format("{:<16}{} a step between stages", "traffic", format_bytes(between_stages));
  if (has_nodes(report.cluster)) {
    const MessageCount crossing = plan::between_nodes(stages, report.cluster);
    text += fmt::format(", {} of them in {} between nodes", format_bytes(crossing.bytes),
                        format_count(crossing.messages, "message"));
  }
  if (reduction > Bytes{0}) {
    text += fmt::format("; {} of gradients to other replicas", format_bytes(reduction));
  }
  if (has_nodes(report.cluster) && !moves.empty()) {
    text += fmt::format("; {} of the moves between nodes",
                        format_bytes(plan::between_nodes(moves, report.cluster).bytes));
  }
  return text + '\n';
}

std::string made_by(const plan::Proposal& proposal, const plan::Question& question) {
  const std::string balancer(plan::name(question.balancer));
  std::string text = proposal.winner;
  if (text.find(balancer) == std::string::npos) text = balancer + ": " + text;
  if (proposal.candidates > 1) text += fmt::format(", best of {} plans", proposal.candidates);
  if (proposal.rounds > 0) {
    text += fmt::format(" after {} rounds (bound {:.0f})", proposal.rounds, proposal.rounds_bound);
  }
  return text;
}

// Lists the plans to compare with: the plan in force, and an even cut under 1F1B where there is
// one.
std::vector<Compared> comparisons(const plan::Question& question) {
  const plan::Costs costs{question.model, question.cluster, question.micro_batches};
  std::vector<Compared> compared;
  const auto add = [&](std::string name, const plan::Plan& plan) {
    auto evaluation = plan::evaluate(plan, costs);
    if (!evaluation) return;  // more ranks than layers, an order for other micro-batches
    const bool fits = plan::fits_memory(evaluation->result, question.cluster);
    compared.push_back({std::move(name), std::move(*evaluation), fits});
  };
  if (question.from) add("plan in force", *question.from);
  const auto even = plan::balance(plan::Balancer::kUniform, {costs});
  if (even) add("uniform 1f1b", plan::make_plan(*even, schedule::ScheduleKind::k1F1B));
  return compared;
}

// Returns the flags of `dynmo plan` and the fields of its cluster file. A measured head is sliced
// by the config of its training.
AdviceWords words_of(const plan::Question& question) {
  using Key = plan::AdviceKey;
  AdviceWords words{
      .keys = {
          {Key::kHeadSlices, question.device.empty() ? "model.head_slices =" : "--head-slices"},
          {Key::kSchedule, "--schedule"},
          {Key::kMicroBatches, "--micro-batches"},
          {Key::kMemory, question.memory_key},
          {Key::kBalancer, "--balancer"},
          {Key::kRanks, question.ranks_key},
          {Key::kMicroBatchSize, question.size_key},
          {Key::kInsideLatency, "--cluster with inside_node.latency_s ="},
          {Key::kInsideBandwidth, "--cluster with inside_node.bandwidth_bytes_per_s ="},
          {Key::kBetweenLatency, "--cluster with between_nodes.latency_s ="},
          {Key::kBetweenBandwidth, "--cluster with between_nodes.bandwidth_bytes_per_s ="},
          {Key::kNicBandwidth, "--cluster with nic_bandwidth_bytes_per_s ="},
          {Key::kSpeed, "--cluster with all ranks at speed ="}}};
  const bool gpus = !question.device.empty() && question.device != "cpu";
  if (gpus && question.parallelism.tensor == 1) words.hour = "GPU-hour";
  return words;
}

}  // namespace

std::string cut_text(const plan::Plan& plan, std::vector<std::string> names) {
  bool halves = false;
  bool experts = false;
  bool whole = false;
  for (std::string& name : names) {
    name = plain(name);
    halves = halves || name.ends_with(".attention");
    experts = experts || name.ends_with(".moe");
    whole = whole || (name.starts_with("blocks.") && name.find('.', 7) == std::string::npos);
  }
  if (!halves) return plan::named_cut(plan, names);
  return fmt::format("{} (a block moves in halves: its attention, its {}{})",
                     plan::named_cut(plan, names), experts ? "mlp or experts" : "mlp",
                     whole ? "; one named without a half, whole" : "");
}

std::string plan_report(const PlanReport& report, const PictureOptions& options) {
  DYNMO_CHECK(report.evaluation.in_flight.size() == report.plan.stages.size() &&
                  report.evaluation.result.ranks.size() == report.cluster.ranks.size(),
              "an evaluation of {} stages on {} ranks, got {} on {}", report.plan.stages.size(),
              report.cluster.size(), report.evaluation.in_flight.size(),
              report.evaluation.result.ranks.size());
  std::string text = fmt::format(
      "{} on {}, {} micro-batch{}; schedule {}; {}\n\n", format_count(report.model.size(), "layer"),
      format_count(report.plan.ranks, "rank"), report.micro_batches,
      report.micro_batches == 1 ? "" : "es", schedule::name(report.plan.schedule), report.made_by);
  text += stage_table(report) + '\n';
  std::vector<std::string> names;
  for (const cost::LayerCost& layer : report.model.layers) names.push_back(layer.name);
  text += fmt::format("{:<16}{}\n", "cut", cut_text(report.plan, std::move(names)));
  text += step_lines(report) + speed_line(report) + bubble_line(report.evaluation) +
          imbalance_line(report);
  text +=
      memory_line(report) + assumed_lines(report) + joined_line(report) + recompute_line(report);
  text += idle_ranks_line(report.plan) + traffic_line(report);
  if (report.migration) {
    text += fmt::format("{:<16}{} of {} layers, {}\n", "moves", report.migration->moves.size(),
                        report.model.size(), format_bytes(report.migration->bytes()));
  }
  const std::string drawn = picture(report.evaluation.result.timeline, options);
  if (!drawn.empty()) text += '\n' + drawn;
  if (!report.advice) return text;
  return text + '\n' +
         advice_text(*report.advice, report.tokens * report.micro_batches, report.words);
}

PlanReport report_of(const plan::Question& question, const plan::Answer& answer) {
  PlanReport report{.model = answer.costs,
                    .cluster = question.cluster,
                    .micro_batches = question.micro_batches,
                    .plan = answer.proposal.plan,
                    .evaluation = answer.evaluation,
                    .made_by = made_by(answer.proposal, question),
                    .compared = comparisons(question),
                    .migration = {},
                    .recomputed = answer.proposal.recomputed,
                    .head_room = question.head_room,
                    .links = question.links,
                    .costs = question.costs,
                    .tokens = question.tokens,
                    .traffic = answer.traffic,
                    .advice = answer.advice,
                    .words = words_of(question),
                    .joined_head = answer.joined_head};
  if (question.from) report.migration = answer.migration;
  return report;
}

}  // namespace dynmo::observe
