// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/move_log.h"

#include <fmt/format.h>

#include <utility>

#include "dynmo/core/median.h"
#include "dynmo/core/units.h"

namespace dynmo::train {
namespace {

constexpr std::size_t kCompared = 3;  // number of compared steps before and after a move

double median_of(const std::deque<double>& times) { return median({times.begin(), times.end()}); }

// Returns by how many percent `after` is shorter than `before`.
double gain_percent(double before, double after) { return 100 * (1 - after / before); }

}  // namespace

std::vector<std::string> MoveLog::add(const std::string& name, const runtime::StepReport& report,
                                      const plan::Plan& plan) {
  std::vector<std::string> lines;
  const std::optional<Begun> begun = std::exchange(begun_, std::nullopt);
  std::optional<Begun> decided;
  if (report.decision) {
    const control::Decision& decision = *report.decision;
    decided = {.predicted_gain = gain_percent(decision.current_step_s, decision.planned_step_s),
               .reason = decision.reason,
               .work_changed = report.announced != cost::Announced::kNothing};
    const bool at_once = report.moved_layers > 0 && !begun;
    if (decision.migrate && !at_once) begun_ = decided;
  }
  if (report.moved_layers > 0) {
    const double before_s = step_s_.empty() ? 0 : median_of(step_s_);
    const Begun move = begun     ? *begun
                       : decided ? *decided
                                 : Begun{.reason = "moved to " + plan::to_string(plan)};
    lines.push_back(fmt::format("step {:5}  {}: {}, moved in {}", report.step, name, move.reason,
                                format_seconds(report.move_pause_s)));
    move_ =
        Move{.step = report.step,
             .before_s = before_s,
             .predicted_gain = move.predicted_gain,
             .work_changed = move.work_changed || report.announced != cost::Announced::kNothing};
    step_s_.clear();
  }
  step_s_.push_back(report.step_s - report.profile_s - report.plan_s - report.migrate_s);
  if (step_s_.size() > kCompared) step_s_.pop_front();
  if (!move_ || step_s_.size() < kCompared) return lines;
  if (move_->before_s > 0) {
    const double after_s = median_of(step_s_);
    lines.push_back(fmt::format(
        "step {:5}  {}: {} at step {} gained {:.1f} % (predicted {}{:.1f} %): a step took {} "
        "before, {} after",
        report.step, name, move_->work_changed ? "the change of work and the move" : "the move",
        move_->step, gain_percent(move_->before_s, after_s),
        move_->work_changed ? "of the move alone " : "", move_->predicted_gain,
        format_seconds(move_->before_s), format_seconds(after_s)));
  }
  move_.reset();
  return lines;
}

}  // namespace dynmo::train
