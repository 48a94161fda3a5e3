// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/freezing/convergence_rule.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::dynamism {
namespace {

// Adds new numbers to the averages with this weight. The first numbers become the averages.
void add(ConvergenceRule& rule, double weight, const std::vector<double>& numbers) {
  if (!std::ranges::all_of(numbers, [](double number) { return std::isfinite(number); })) return;
  const bool fresh = rule.average.empty();
  DYNMO_CHECK(fresh || rule.average.size() == numbers.size(), "numbers of {} layers, got {}",
              rule.average.size(), numbers.size());
  rule.average.resize(numbers.size(), 0.0);
  rule.converged.resize(numbers.size(), 0);
  for (auto i = static_cast<std::size_t>(rule.frozen); i < numbers.size(); ++i) {
    rule.average[i] += (fresh ? 1 : weight) * (numbers[i] - rule.average[i]);
  }
}

void check_layers(ConvergenceRule& rule, const FreezingOptions& options, double learning_rate) {
  if (rule.average.empty()) return;
  if (rule.first.empty()) {
    rule.first = rule.average;
    return;
  }
  for (auto i = static_cast<std::size_t>(rule.frozen); i < rule.average.size(); ++i) {
    const bool below = rule.average[i] < options.tolerance * rule.first[i];
    rule.converged[i] = below ? rule.converged[i] + 1 : 0;
  }
  const int before = rule.frozen;
  const int max = max_frozen(options, rule.average.size());
  while (rule.frozen < max &&
         rule.converged[static_cast<std::size_t>(rule.frozen)] >= options.patience) {
    ++rule.frozen;
  }
  if (before == 0 && rule.frozen > 0) rule.learning_rate = learning_rate;
}

// Reads an array of finite numbers of 0 or more.
template <typename Number>
Expected<std::vector<Number>> read_numbers(const Json& json, const std::string& key) {
  std::vector<Number> numbers;
  const auto found = json.find(key);
  bool good = found != json.end() && found->is_array();
  for (std::size_t i = 0; good && i < found->size(); ++i) {
    const Json& number = (*found)[i];
    good = std::is_integral_v<Number> ? number.is_number_integer() : number.is_number();
    if (good) numbers.push_back(number.get<Number>());
    good = good && numbers.back() >= 0 && std::isfinite(static_cast<double>(numbers.back()));
  }
  if (good) return numbers;
  return make_error(ErrorCode::kBadInput,
                    "state of freezing: /{} is not an array of numbers that are 0 or more", key);
}

}  // namespace

std::int64_t first_check(const FreezingOptions& options, std::int64_t steps) {
  const auto first = static_cast<std::int64_t>(options.bootstrap * static_cast<double>(steps));
  return first > 0 ? first : options.check_every;  // nothing is known before the first step
}

bool is_check(const FreezingOptions& options, std::int64_t step, std::int64_t steps) {
  const std::int64_t first = first_check(options, steps);
  return step >= first && (step - first) % options.check_every == 0;
}

// Rounds down with the tolerance of frozen_layers().
int max_frozen(const FreezingOptions& options, std::size_t layers) {
  const auto count = static_cast<double>(layers);
  return static_cast<int>(std::min(std::floor(options.max_fraction * count + 1e-9), count - 1));
}

ConvergenceRule after_step(ConvergenceRule rule, const FreezingOptions& options,
                           const NormStep& done) {
  std::vector<double> norms;
  for (const double squared : done.squared_norms) norms.push_back(std::sqrt(squared));
  add(rule, 1 / static_cast<double>(options.smooth_steps), norms);
  if (is_check(options, done.step + 1, done.steps)) {
    check_layers(rule, options, done.learning_rate);
  }
  return rule;
}

ConvergenceRule after_check(ConvergenceRule rule, const FreezingOptions& options,
                            double learning_rate, const std::vector<double>& slopes) {
  const auto steps = static_cast<double>(options.check_every);
  add(rule, std::min(1.0, steps / static_cast<double>(options.smooth_steps)), slopes);
  check_layers(rule, options, learning_rate);
  return rule;
}

ConvergenceRule unfrozen_below(ConvergenceRule rule, const FreezingOptions& options,
                               double learning_rate) {
  const bool dropped =
      options.unfreeze_below > 0 && learning_rate <= options.unfreeze_below * rule.learning_rate;
  if (rule.frozen > 0 && dropped) rule = {.first = std::move(rule.first)};
  return rule;
}

double next_to_first(const ConvergenceRule& rule) {
  const auto next = static_cast<std::size_t>(rule.frozen);
  if (rule.first.size() <= next || rule.average.size() <= next || rule.first[next] <= 0) return 0;
  return rule.average[next] / rule.first[next];
}

Json to_json(const ConvergenceRule& rule) {
  return {{"frozen", rule.frozen},
          {"learning_rate", rule.learning_rate},
          {"average", rule.average},
          {"first", rule.first},
          {"converged", rule.converged}};
}

Expected<ConvergenceRule> parse_convergence_rule(const Json& json) {
  JsonObject object(json, "state of freezing");
  ConvergenceRule rule;
  const std::int64_t frozen = object.integer("frozen");
  rule.learning_rate = object.number("learning_rate");
  for (const char* key : {"average", "first", "converged"}) object.ignore(key);
  DYNMO_TRY(object.finish());
  DYNMO_ASSIGN(rule.average, read_numbers<double>(json, "average"));
  DYNMO_ASSIGN(rule.first, read_numbers<double>(json, "first"));
  DYNMO_ASSIGN(rule.converged, read_numbers<std::int64_t>(json, "converged"));
  const std::size_t layers = std::max(rule.average.size(), rule.first.size());
  const auto fits = [&](const auto& numbers) {
    return numbers.empty() || numbers.size() == layers;
  };
  const bool good = fits(rule.average) && fits(rule.first) &&
                    rule.converged.size() == rule.average.size() && frozen >= 0 &&
                    frozen <= std::max<std::int64_t>(std::ssize(rule.average) - 1, 0);
  if (!good) {
    return make_error(ErrorCode::kBadInput,
                      "state of freezing: {} frozen of {}, {} and {} layers, wanted one number of "
                      "layers and fewer that are frozen",
                      frozen, rule.average.size(), rule.first.size(), rule.converged.size());
  }
  rule.frozen = static_cast<int>(frozen);
  return rule;
}

}  // namespace dynmo::dynamism
