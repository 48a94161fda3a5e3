// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/tensor/generate.h"

// The popularity of an expert is exp(f(t) g(b) (lasting u + drifting y(t))): u is drawn once, and y
// is a series of first order, y(t) = rho y(t - 1) + sqrt(1 - rho^2) e(t). The counts of a block b
// in a step t are its tokens times the shares of these. What the three parameters and the factors f
// and g are is found by making a part of the counts, measuring them, and correcting.
namespace dynmo::tensor {
namespace {

constexpr std::size_t kMaxSample = std::size_t{1} << 21;  // counts that the fit looks at
constexpr int kMaxCorrections = 60;
constexpr double kClose = 2e-3;  // relative
constexpr double kFits = 2e-2;
constexpr double kUnevenFits = 1e-2;
constexpr double kLeastRho = -0.999;
constexpr std::size_t kTextPiece = std::size_t{1} << 20;  // of text
constexpr std::uint64_t kTicks = std::uint64_t{1}
                                 << 40;  // that the time of a step is shared out in

struct Popularity {
  double lasting = 0;
  double drifting = 0;
  double rho = 0;
  Unevenness factors = {};  // of parts of the steps and of the blocks; means of 1

  [[nodiscard]] double of_step(std::int64_t step, std::int64_t steps) const {
    return value_at(factors.steps, step, steps);
  }
  [[nodiscard]] double of_block(std::int64_t block, std::int64_t blocks) const {
    return value_at(factors.rows, block, blocks);
  }
  // The value at `index` of `count`, where parts have theirs in their middles; 1 without parts.
  static double value_at(const std::vector<double>& parts, std::int64_t index, std::int64_t count) {
    if (parts.empty()) return 1;
    const auto n = static_cast<double>(parts.size());
    const double place = std::clamp(
        (static_cast<double>(index) + 0.5) / static_cast<double>(count) * n - 0.5, 0.0, n - 1);
    const auto before = static_cast<std::size_t>(place);
    const std::size_t behind = std::min(before + 1, parts.size() - 1);
    const double share = place - static_cast<double>(before);
    return (1 - share) * parts[before] + share * parts[behind];
  }
};

struct Measures {
  double cv = 0;
  double lasting_cv = 0;
  double autocorrelation = 0;
  Unevenness uneven = {};  // in parts as requested; of the blocks those that were made
};

Rng series_of(const CountsRequest& request, std::int64_t block, std::int64_t expert) {
  return Rng(mix_key({request.seed, 0x7e5, static_cast<std::uint64_t>(block),
                      static_cast<std::uint64_t>(expert)}));
}

// Cuts shares down to `most` times their sum; the others get what is left in proportion.
void cut_down(std::vector<double>& shares, double most) {
  double total = 0;
  for (const double share : shares) total += share;
  std::vector<char> is_cut(shares.size(), 0);
  double rest = total;  // for those that are not cut
  double sum = total;   // of their shares
  for (bool again = true; again;) {
    again = false;
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

// Whole numbers with the sum `total` and shares in proportion to exp of what they replace, none
// above `most` but for rounding.
void apportion(std::vector<double>& weights, double total, double most) {
  const double max = *std::ranges::max_element(weights);
  for (double& weight : weights) weight = std::exp(weight - max);
  if (most < 1) cut_down(weights, most);
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

// The draws of some blocks, made once: for each series u, then e(0), e(1), ...
struct Draws {
  std::int64_t blocks = 0;
  std::vector<float> normals;

  // Which of all blocks, evenly spread over them.
  [[nodiscard]] std::int64_t block_of(std::int64_t draw, std::int64_t all) const {
    return draw * all / blocks;
  }
};

Draws draw_of(const CountsRequest& request) {
  const std::int64_t cells = request.steps * request.experts;
  const auto max = static_cast<std::int64_t>(kMaxSample);
  Draws draws{.blocks = std::clamp<std::int64_t>(max / cells, 1, request.blocks), .normals = {}};
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

// Sums that the measures follow from.
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

// Means by part, where `count` values are in as many parts.
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
  // 0 of a part without values.
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

// The factor by which a parameter changes, bounded so that corrections do not swing.
double correction(double wanted, double measured) {
  if (wanted <= 0) return 0;
  return std::clamp(wanted / std::max(measured, 1e-9), 0.5, 2.0);
}

double mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

// Corrects factors by how far the shape of what was found is from the one that is wanted. Whether
// it was close.
bool correct(const std::vector<double>& wanted, const std::vector<double>& found,
             std::vector<double>& factors) {
  if (wanted.empty() || mean_of(wanted) <= 0 || mean_of(found) <= 0) return true;
  const double scale = mean_of(found) / mean_of(wanted);
  bool close = true;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (found[i] <= 0) continue;  // none was made there, or it has no spread at all
    close = close && std::abs(found[i] - wanted[i] * scale) <= kUnevenFits * found[i];
    factors[i] = std::clamp(factors[i] * correction(wanted[i] * scale, found[i]), 1e-3, 1e3);
  }
  const double mean = mean_of(factors);
  for (double& factor : factors) factor /= mean;
  return close;
}

// `series`: the noun for what the counts are of.
Expected<Popularity> fit(const CountsRequest& request, std::string_view series) {
  const Draws draws = draw_of(request);
  const double lasting_cv = request.lasting_cv.value_or(0);
  const auto inside = [](double cv, double lasting) {
    return std::sqrt(std::max(cv * cv - lasting * lasting, 0.0));
  };
  Popularity popularity{.lasting = std::sqrt(std::log1p(lasting_cv * lasting_cv)),
                        .drifting = std::sqrt(std::log1p(request.cv * request.cv)),
                        .rho = request.autocorrelation,
                        .factors = {.steps = std::vector(request.uneven.steps.size(), 1.0),
                                    .rows = std::vector(request.uneven.rows.size(), 1.0)}};
  Measures found;
  for (int i = 0; i < kMaxCorrections; ++i) {
    found = measure(request, draws, popularity);
    const Unevenness before = popularity.factors;
    const bool steps_fit =
        correct(request.uneven.steps, found.uneven.steps, popularity.factors.steps);
    const bool blocks_fit =
        correct(request.uneven.rows, found.uneven.rows, popularity.factors.rows);
    const bool close =
        steps_fit && blocks_fit && std::abs(found.cv - request.cv) <= kClose * request.cv &&
        std::abs(found.autocorrelation - request.autocorrelation) <= kClose &&
        (!request.lasting_cv || std::abs(found.lasting_cv - lasting_cv) <= kClose * lasting_cv);
    if (close) {
      popularity.factors = before;
      return popularity;
    }
    if (request.lasting_cv) {
      popularity.lasting *= correction(lasting_cv, found.lasting_cv);
      popularity.drifting *=
          correction(inside(request.cv, lasting_cv), inside(found.cv, found.lasting_cv));
    } else {
      popularity.drifting *= correction(request.cv, found.cv);
    }
    const double away =
        (1 - popularity.rho) * correction(1 - request.autocorrelation, 1 - found.autocorrelation);
    popularity.rho = std::clamp(1 - away, kLeastRho, 1 - 1e-7);
  }
  const auto differs = [](double a, double b) { return std::abs(a - b) > kFits * b; };
  if (differs(found.cv, request.cv)) {
    return make_error(ErrorCode::kBadInput,
                      "a coefficient of variation of {:.4g} contradicts {} {}: it reaches {:.4g}",
                      request.cv, request.experts, series, found.cv);
  }
  const bool more = request.drift_may_leave_more && found.lasting_cv > lasting_cv;
  if (request.lasting_cv && differs(found.lasting_cv, lasting_cv) && !more) {
    return make_error(ErrorCode::kBadInput,
                      "a lasting coefficient of variation of {:.4g} contradicts an "
                      "autocorrelation of {:.4g} over {} steps, which leaves {:.4g}",
                      lasting_cv, request.autocorrelation, request.steps, found.lasting_cv);
  }
  if (std::abs(found.autocorrelation - request.autocorrelation) > 0.03) {
    return make_error(ErrorCode::kBadInput,
                      "an autocorrelation of {:.4g} contradicts {} steps, which give {:.4g}",
                      request.autocorrelation, request.steps, found.autocorrelation);
  }
  return popularity;
}

// The counts of one block in one step after the other.
class Drifting {
 public:
  Drifting(const CountsRequest& request, const Popularity& popularity)
      : tokens_(static_cast<double>(request.tokens)),
        max_share_(request.max_share),
        popularity_(popularity),
        fresh_(std::sqrt(1 - popularity.rho * popularity.rho)),
        row_(static_cast<std::size_t>(request.experts)),
        steps_(request.steps),
        blocks_(request.blocks) {
    for (std::int64_t block = 0; block < request.blocks; ++block) {
      for (std::int64_t expert = 0; expert < request.experts; ++expert) {
        Rng rng = series_of(request, block, expert);
        const double lasting = rng.normal();
        series_.push_back({.rng = rng, .lasting = lasting});
      }
    }
  }

  const std::vector<double>& next() {
    const auto block = static_cast<std::int64_t>(next_ / row_.size());
    const double factor = popularity_.of_block(block, blocks_) * popularity_.of_step(step_, steps_);
    for (double& count : row_) {
      Series& own = series_[next_++];
      const double draw = own.rng.normal();
      own.drifting = is_first_ ? draw : popularity_.rho * own.drifting + fresh_ * draw;
      count = factor * (popularity_.lasting * own.lasting + popularity_.drifting * own.drifting);
    }
    if (next_ == series_.size()) {
      next_ = 0;
      is_first_ = false;
      ++step_;
    }
    apportion(row_, tokens_, max_share_);
    return row_;
  }

 private:
  struct Series {
    Rng rng;
    double lasting;
    double drifting = 0;
  };
  double tokens_;
  double max_share_;
  Popularity popularity_;
  double fresh_;
  std::vector<double> row_;
  std::vector<Series> series_;  // block by block
  std::size_t next_ = 0;        // of the next block
  bool is_first_ = true;        // step
  std::int64_t steps_;
  std::int64_t blocks_;
  std::int64_t step_ = 0;
};

// Writes what has gathered, once it is enough.
Expected<void> flush(std::string& text, std::size_t enough, const Writer& write) {
  if (text.size() < enough) return {};
  DYNMO_TRY(write(text));
  text.clear();
  return {};
}

Expected<void> check_counts(const CountsRequest& request) {
  const auto bad = [](std::string_view what, double value, std::string_view wanted) {
    return make_error(ErrorCode::kBadInput, "{} is {}, wanted {}", what, value, wanted);
  };
  if (request.steps < 1 || request.steps > std::int64_t{1} << 31) {
    return bad("the number of steps", static_cast<double>(request.steps), "1 to 2^31");
  }
  if (request.blocks < 1 || request.blocks > 1 << 16) {
    return bad("the number of blocks", static_cast<double>(request.blocks), "1 to 65536");
  }
  if (request.experts < 2 || request.experts > 1 << 16) {
    return bad("the number of experts", static_cast<double>(request.experts), "2 to 65536");
  }
  if (request.tokens < 1 || request.tokens > std::uint64_t{1} << 49) {
    return bad("the number of tokens", static_cast<double>(request.tokens), "1 to 2^49");
  }
  if (!(request.cv >= 0 && std::isfinite(request.cv))) {
    return bad("the coefficient of variation", request.cv, "at least 0");
  }
  if (!(request.autocorrelation > -1 && request.autocorrelation < 1)) {
    return bad("the autocorrelation", request.autocorrelation, "above -1 and below 1");
  }
  const double equal = 1 / static_cast<double>(request.experts);
  if (!(request.max_share > equal && request.max_share <= 1)) {
    return bad("the largest share of an expert", request.max_share,
               fmt::format("above {:.4g}, at most 1", equal));
  }
  if (request.lasting_cv && !(*request.lasting_cv >= 0 && *request.lasting_cv <= request.cv)) {
    return bad("the lasting coefficient of variation", *request.lasting_cv,
               fmt::format("0 to that of all counts, {}", request.cv));
  }
  return {};
}

}  // namespace

Expected<void> generate_counts(const CountsRequest& request, const Writer& write) {
  DYNMO_TRY(check_counts(request));
  DYNMO_ASSIGN(const Popularity popularity, fit(request, "experts"));
  Drifting drifting(request, popularity);
  std::string text;
  for (std::int64_t t = 0; t < request.steps; ++t) {
    text += fmt::format(R"({{"step": {}, "sources": {{"moe": {{"counts": [)", t);
    for (std::int64_t block = 0; block < request.blocks; ++block) {
      text += fmt::format("{}[{:.0f}]", block == 0 ? "" : ", ", fmt::join(drifting.next(), ", "));
    }
    text += "]}}}\n";
    DYNMO_TRY(flush(text, kTextPiece, write));
  }
  return write(text);
}

Expected<void> generate_costs(const CostsRequest& request, const Writer& write) {
  if (!(request.step_s > 0 && request.step_s <= 1e6)) {
    return make_error(ErrorCode::kBadInput, "the seconds of a step are {}, wanted above 0 to 1e6",
                      request.step_s);
  }
  const CountsRequest ticks{.steps = request.steps,
                            .blocks = 1,
                            .experts = request.layers,
                            .tokens = kTicks,
                            .cv = request.cv,
                            .lasting_cv = request.lasting_cv,
                            .autocorrelation = request.autocorrelation,
                            .seed = request.seed};
  if (request.layers < 2 || request.layers > 1 << 16) {
    return make_error(ErrorCode::kBadInput, "the number of layers is {}, wanted 2 to 65536",
                      request.layers);
  }
  DYNMO_TRY(check_counts(ticks));
  DYNMO_ASSIGN(const Popularity popularity, fit(ticks, "layers"));
  Drifting drifting(ticks, popularity);
  std::string text = R"({"format": "dynmo-load-trace-1", "layers": [)";
  for (std::int64_t layer = 0; layer < request.layers; ++layer) {
    text += fmt::format(
        R"({}{{"name": "layer{}", "forward_s": 0, "backward_input_s": 0, "backward_weight_s": 0}})",
        layer == 0 ? "" : ", ", layer);
  }
  text += "]}\n";
  for (std::int64_t t = 0; t < request.steps; ++t) {
    std::vector<double> row = drifting.next();
    for (double& value : row) value *= request.step_s / static_cast<double>(kTicks) / 3;
    const std::string third = fmt::format("[{:.9g}]", fmt::join(row, ", "));
    text += fmt::format(
        R"({{"step": {}, "forward_s": {}, "backward_input_s": {}, "backward_weight_s": {}}})", t,
        third, third, third);
    text += '\n';
    DYNMO_TRY(flush(text, kTextPiece, write));
  }
  return write(text);
}

}  // namespace dynmo::tensor
