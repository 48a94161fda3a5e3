// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/tensor/generate.h"
#include "dynmo/tensor/popularity_impl.h"

namespace dynmo::tensor {
namespace {

constexpr std::size_t kTextPiece = std::size_t{1} << 20;    // of text
constexpr std::int64_t kMaxSeries = std::int64_t{1} << 24;  // one for each expert of each block
constexpr std::uint64_t kTicks = std::uint64_t{1}
                                 << 40;  // that the time of a step is shared out in

// Draws the counts of all blocks in turn, step by step.
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
  std::vector<Series> series_;  // by block, then expert
  std::size_t next_ = 0;        // of the next block
  bool is_first_ = true;        // step
  std::int64_t steps_;
  std::int64_t blocks_;
  std::int64_t step_ = 0;
};

// Writes the text if it has at least `enough` bytes.
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
  if (request.blocks * request.experts > kMaxSeries) {
    return make_error(ErrorCode::kBadInput,
                      "{} blocks of {} experts have {} series of counts, wanted at most 2^24",
                      request.blocks, request.experts, request.blocks * request.experts);
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
  DYNMO_ASSIGN(const Popularity popularity, fitted(request, "experts"));
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
                            .drift_may_leave_more = request.drift_may_leave_more,
                            .autocorrelation = request.autocorrelation,
                            .seed = request.seed};
  if (request.layers < 2 || request.layers > 1 << 16) {
    return make_error(ErrorCode::kBadInput, "the number of layers is {}, wanted 2 to 65536",
                      request.layers);
  }
  DYNMO_TRY(check_counts(ticks));
  DYNMO_ASSIGN(const Popularity popularity, fitted(ticks, "layers"));
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
