// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/tensor/popularity_impl.h"

namespace dynmo::tensor {
namespace {

constexpr std::int64_t kSample = std::int64_t{1} << 21;  // counts that the fit measures, in blocks
constexpr std::int64_t kMaxBlock = std::int64_t{1}
                                   << 26;  // counts of a block, which is not divided
constexpr int kMaxCorrections = 60;
constexpr int kPatience = 10;     // the fit ends if so many corrections
constexpr double kNearer = 0.99;  // do not reduce the distance by this factor
constexpr double kClose = 2e-3;   // relative tolerance
constexpr double kFits = 2e-2;
constexpr double kEvenCv = 1e-3;  // largest coefficient of variation of an even load
constexpr double kAutocorrelationFits = 0.03;
constexpr double kUnevenFits = 1e-2;
constexpr double kNoLasting = 1e-3;  // so small a lasting part changes nothing
constexpr double kLeastRho = -0.999;

struct Measures {
  double cv = 0;
  double lasting_cv = 0;
  double autocorrelation = 0;
  Unevenness uneven = {};  // in parts as requested; of the blocks those that were made
};

// Limits shares, which are proportional to exp(logs), to `most` times their sum. The others divide
// the rest in proportion.
void cut_down(std::vector<double>& shares, const std::vector<double>& logs, double most) {
  constexpr double kSmall = 1e-9;  // of the sum: subtraction leaves few digits of less
  double total = 0;
  for (const double share : shares) total += share;
  std::vector<char> is_cut(shares.size(), 0);
  double rest = total;  // left for the shares below the limit
  double sum = total;   // of their shares
  for (bool again = true; again;) {
    again = false;
    if (sum < kSmall * total) {
      double max = -std::numeric_limits<double>::infinity();
      for (std::size_t i = 0; i < shares.size(); ++i) {
        if (is_cut[i] == 0) max = std::max(max, logs[i]);
      }
      sum = 0;
      for (std::size_t i = 0; i < shares.size(); ++i) {
        if (is_cut[i] == 0) sum += shares[i] = std::exp(logs[i] - max);
      }
    }
    const double scale = sum > 0 ? rest / sum : 0;
    for (std::size_t i = 0; i < shares.size(); ++i) {
      if (is_cut[i] != 0 || shares[i] * scale <= most * total) continue;
      is_cut[i] = 1;
      sum -= shares[i];
      rest -= shares[i] = most * total;
      again = true;
    }
    if (again) continue;
    for (std::size_t i = 0; i < shares.size(); ++i) {
      if (is_cut[i] == 0) shares[i] *= scale;
    }
  }
}

// The draws of some blocks, made once: for each series u, then e(0), e(1), ...
struct Draws {
  std::int64_t blocks = 0;
  std::vector<float> normals;

  // Returns the block of a draw. Drawn blocks are evenly spread over `all` blocks.
  [[nodiscard]] std::int64_t block_of(std::int64_t draw, std::int64_t all) const {
    return draw * all / blocks;
  }
};

// Draws at least one block. Returns kBadInput if a block has too many counts.
Expected<Draws> draw_of(const CountsRequest& request, std::string_view series) {
  const std::int64_t cells = request.steps * request.experts;
  if (cells > kMaxBlock) {
    return make_error(ErrorCode::kBadInput,
                      "{} steps of {} {} have {} values, wanted at most 2^26: choose fewer steps",
                      request.steps, request.experts, series, cells);
  }
  Draws draws{.blocks = std::clamp<std::int64_t>(kSample / cells, 1, request.blocks),
              .normals = {}};
  draws.normals.reserve(static_cast<std::size_t>(draws.blocks * (cells + request.experts)));
  for (std::int64_t draw = 0; draw < draws.blocks; ++draw) {
    const std::int64_t block = draws.block_of(draw, request.blocks);
    for (std::int64_t expert = 0; expert < request.experts; ++expert) {
      Rng rng = series_of(request, block, expert);
      for (std::int64_t i = 0; i <= request.steps; ++i) {
        draws.normals.push_back(static_cast<float>(rng.normal()));
      }
    }
  }
  return draws;
}

// The sums from which the measures are computed.
class SeriesSums {
 public:
  void add_series(const double* counts, std::int64_t steps, std::int64_t stride, double mean) {
    double sum = 0;
    for (std::int64_t t = 0; t < steps; ++t) sum += counts[t * stride];
    const double own = sum / static_cast<double>(steps);
    for (std::int64_t t = 0; t < steps; ++t) {
      const double off = counts[t * stride] - own;
      inside_ += off * off;
      if (t + 1 < steps) lagged_ += off * (counts[(t + 1) * stride] - own);
      cells_ += (counts[t * stride] - mean) * (counts[t * stride] - mean);
    }
    lasting_ += (own - mean) * (own - mean);
    ++series_;
    steps_ = steps;
  }
  [[nodiscard]] Measures measures(double mean) const {
    const auto steps = static_cast<double>(steps_);
    return {
        .cv = std::sqrt(cells_ / (series_ * steps)) / mean,
        .lasting_cv = std::sqrt(lasting_ / series_) / mean,
        .autocorrelation = inside_ > 0 && steps > 1 ? lagged_ / inside_ * steps / (steps - 1) : 0};
  }

 private:
  double cells_ = 0;
  double lasting_ = 0;
  double inside_ = 0;
  double lagged_ = 0;
  double series_ = 0;
  std::int64_t steps_ = 0;
};

// Means of `count` values in equal parts.
class PartMeans {
 public:
  PartMeans(std::size_t parts, std::int64_t count)
      : count_(count), sums_(parts, 0.0), numbers_(parts, 0.0) {}
  void add(std::int64_t index, double value) {
    if (sums_.empty()) return;
    const auto part = static_cast<std::size_t>(index * std::ssize(sums_) / count_);
    sums_[part] += value;
    numbers_[part] += 1;
  }
  // Returns the mean of each part, 0 for a part without values.
  [[nodiscard]] std::vector<double> means() const {
    std::vector<double> all;
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      all.push_back(numbers_[i] > 0 ? sums_[i] / numbers_[i] : 0);
    }
    return all;
  }

 private:
  std::int64_t count_;
  std::vector<double> sums_;
  std::vector<double> numbers_;
};

double cv_of(const std::vector<double>& row, double mean) {
  double squares = 0;
  for (const double value : row) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / static_cast<double>(row.size())) / mean;
}

Measures measure(const CountsRequest& request, const Draws& draws, const Popularity& popularity) {
  const auto tokens = static_cast<double>(request.tokens);
  const double mean = tokens / static_cast<double>(request.experts);
  const double fresh = std::sqrt(1 - popularity.rho * popularity.rho);
  std::vector<double> state(static_cast<std::size_t>(request.experts));
  std::vector<double> row(state.size());
  std::vector<double> counts(static_cast<std::size_t>(request.steps) * row.size());
  SeriesSums sums;
  PartMeans of_steps(request.uneven.steps.size(), request.steps);
  PartMeans of_blocks(request.uneven.rows.size(), request.blocks);
  for (std::int64_t draw = 0; draw < draws.blocks; ++draw) {
    const float* normals = draws.normals.data() + draw * request.experts * (request.steps + 1);
    const std::int64_t block = draws.block_of(draw, request.blocks);
    const double of_block = popularity.of_block(block, request.blocks);
    for (std::int64_t t = 0; t < request.steps; ++t) {
      const double factor = of_block * popularity.of_step(t, request.steps);
      for (std::size_t e = 0; e < row.size(); ++e) {
        const float* own = normals + static_cast<std::int64_t>(e) * (request.steps + 1);
        state[e] = t == 0 ? own[1] : popularity.rho * state[e] + fresh * own[t + 1];
        row[e] = factor * (popularity.lasting * own[0] + popularity.drifting * state[e]);
      }
      apportion(row, tokens, request.max_share);
      const double cv = cv_of(row, mean);
      of_steps.add(t, cv);
      of_blocks.add(block, cv);
      std::ranges::copy(row, counts.begin() + t * request.experts);
    }
    for (std::int64_t e = 0; e < request.experts; ++e) {
      sums.add_series(counts.data() + e, request.steps, request.experts, mean);
    }
  }
  Measures measures = sums.measures(mean);
  measures.uneven = {.steps = of_steps.means(), .rows = of_blocks.means()};
  return measures;
}

// Returns the factor by which a parameter changes. It is bounded, so that corrections do not
// oscillate.
double correction(double wanted, double measured) {
  if (wanted <= 0) return 0;
  return std::clamp(wanted / std::max(measured, 1e-9), 0.5, 2.0);
}

double mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

// Returns the distance of `found` from the shape of `wanted`, as a multiple of the tolerance.
// Corrects `factors` by it.
double correct(const std::vector<double>& wanted, const std::vector<double>& found,
               std::vector<double>& factors) {
  if (wanted.empty() || mean_of(wanted) <= 0 || mean_of(found) <= 0) return 0;
  const double scale = mean_of(found) / mean_of(wanted);
  double distance = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (found[i] <= 0) continue;  // no value was made, or it has no spread
    distance =
        std::max(distance, std::abs(found[i] - wanted[i] * scale) / (kUnevenFits * found[i]));
    factors[i] = std::clamp(factors[i] * correction(wanted[i] * scale, found[i]), 1e-3, 1e3);
  }
  const double mean = mean_of(factors);
  for (double& factor : factors) factor /= mean;
  return distance;
}

// Returns a difference as a multiple of the tolerance.
double multiple(double difference, double close) {
  return difference == 0 ? 0 : std::abs(difference) / close;
}

// Returns whether the counts of an expert change from step to step.
bool changes(const CountsRequest& request) { return request.cv > request.lasting_cv.value_or(0); }

// Returns the least coefficient of variation of whole numbers with the mean of the request. They
// cannot all be equal if the mean is not whole.
double least_cv(const CountsRequest& request) {
  const double mean = static_cast<double>(request.tokens) / static_cast<double>(request.experts);
  const double part = mean - std::floor(mean);
  return std::sqrt(part * (1 - part)) / mean;
}

// Returns kBadInput if a measure is too far from the request. The error names the two requests that
// contradict each other. `series` is the noun of what is counted.
Expected<void> check(const Measures& found, const CountsRequest& request, std::string_view series) {
  const double rounding = request.cv <= kEvenCv ? (1 + kFits) * least_cv(request) : 0;
  const auto differs = [&](double a, double b) { return std::abs(a - b) > kFits * b + rounding; };
  if (differs(found.cv, request.cv)) {
    return make_error(ErrorCode::kBadInput,
                      "a coefficient of variation of {:.4g} contradicts {} {}: it reaches {:.4g}",
                      request.cv, request.experts, series, found.cv);
  }
  const double lasting_cv = request.lasting_cv.value_or(0);
  const bool more = request.drift_may_leave_more && found.lasting_cv > lasting_cv;
  if (request.lasting_cv && differs(found.lasting_cv, lasting_cv) && !more) {
    return make_error(ErrorCode::kBadInput,
                      "a lasting coefficient of variation of {:.4g} contradicts an "
                      "autocorrelation of {:.4g} over {} steps, which leaves {:.4g}",
                      lasting_cv, request.autocorrelation, request.steps, found.lasting_cv);
  }
  const double away = std::abs(found.autocorrelation - request.autocorrelation);
  if (changes(request) && away > kAutocorrelationFits) {
    return make_error(ErrorCode::kBadInput,
                      "an autocorrelation of {:.4g} contradicts {} steps, which give {:.4g}",
                      request.autocorrelation, request.steps, found.autocorrelation);
  }
  return {};
}

// Returns the first fit within the tolerance, or the best one if none improves it for a while.
Expected<Popularity> fit(const CountsRequest& request, const Draws& draws,
                         std::string_view series) {
  const double lasting_cv = request.lasting_cv.value_or(0);
  const auto inside = [](double cv, double lasting) {
    return std::sqrt(std::max(cv * cv - lasting * lasting, 0.0));
  };
  Popularity now{.lasting = std::sqrt(std::log1p(lasting_cv * lasting_cv)),
                 .drifting = changes(request) ? std::sqrt(std::log1p(request.cv * request.cv)) : 0,
                 .rho = request.autocorrelation,
                 .factors = {.steps = std::vector(request.uneven.steps.size(), 1.0),
                             .rows = std::vector(request.uneven.rows.size(), 1.0)}};
  std::optional<Popularity> best;  // best fit so far that is not refused
  double least = 0;                // its distance
  int since = 0;                   // corrections
  Expected<void> checked;
  for (int i = 0; i < kMaxCorrections && since < kPatience; ++i) {
    const Popularity before = now;
    const Measures found = measure(request, draws, now);
    checked = check(found, request, series);
    const double distance = std::max(
        {correct(request.uneven.steps, found.uneven.steps, now.factors.steps),
         correct(request.uneven.rows, found.uneven.rows, now.factors.rows),
         multiple(found.cv - request.cv, kClose * request.cv),
         changes(request) ? multiple(found.autocorrelation - request.autocorrelation, kClose) : 0,
         request.lasting_cv ? multiple(found.lasting_cv - lasting_cv, kClose * lasting_cv) : 0});
    if (distance <= 1) return before;
    since += best ? 1 : 0;
    if (checked && (!best || distance < kNearer * least)) {
      best = before;
      least = distance;
      since = 0;
    }
    const bool leaves_more =
        request.drift_may_leave_more && now.lasting < kNoLasting && found.lasting_cv > lasting_cv;
    if (!request.lasting_cv || leaves_more) {
      now.drifting *= correction(request.cv, found.cv);
    } else {
      now.drifting *=
          correction(inside(request.cv, lasting_cv), inside(found.cv, found.lasting_cv));
    }
    if (request.lasting_cv) now.lasting *= correction(lasting_cv, found.lasting_cv);
    const double away =
        (1 - now.rho) * correction(1 - request.autocorrelation, 1 - found.autocorrelation);
    now.rho = std::clamp(1 - away, kLeastRho, 1 - 1e-7);
  }
  if (best) return *best;
  return checked.error();
}

// Returns the means of groups of four parts.
std::vector<double> coarser(const std::vector<double>& parts) {
  PartMeans means(parts.size() / 4, std::ssize(parts));
  for (std::size_t i = 0; i < parts.size(); ++i) means.add(static_cast<std::int64_t>(i), parts[i]);
  return means.means();
}

}  // namespace

Rng series_of(const CountsRequest& request, std::int64_t block, std::int64_t expert) {
  return Rng(mix_key({request.seed, 0x7e5, static_cast<std::uint64_t>(block),
                      static_cast<std::uint64_t>(expert)}));
}

void apportion(std::vector<double>& weights, double total, double most) {
  const std::vector<double> logs = most < 1 ? weights : std::vector<double>();
  const double max = *std::ranges::max_element(weights);
  for (double& weight : weights) weight = std::exp(weight - max);
  if (most < 1) cut_down(weights, logs, most);
  double sum = 0;
  for (const double weight : weights) sum += weight;
  double exact = 0;
  double given = 0;
  for (double& weight : weights) {
    exact += weight / sum * total;
    weight = std::min(std::floor(exact + 0.5), total) - given;
    given += weight;
  }
  weights.back() += total - given;
}

// A profile in many parts of few counts follows chance, and corrections of it may never settle.
Expected<Popularity> fitted(const CountsRequest& request, std::string_view series) {
  DYNMO_ASSIGN(const Draws draws, draw_of(request, series));
  CountsRequest now = request;
  for (;;) {
    Expected<Popularity> found = fit(now, draws, series);
    if (found || (now.uneven.steps.empty() && now.uneven.rows.empty())) return found;
    now.uneven = {.steps = coarser(now.uneven.steps), .rows = coarser(now.uneven.rows)};
  }
}

}  // namespace dynmo::tensor
