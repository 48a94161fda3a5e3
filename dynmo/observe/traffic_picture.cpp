// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/traffic_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "dynmo/core/units.h"

namespace dynmo::observe {
namespace {

using Matrix = std::vector<std::vector<Bytes>>;

// Holds both matrices, with the ranks of a node together.
class Drawn {
 public:
  explicit Drawn(const TrafficInterval& traffic) : order_(traffic.ranks.size()) {
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::stable_sort(order_.begin(), order_.end(), [&](std::size_t a, std::size_t b) {
      return std::pair(traffic.nodes[a], traffic.ranks[a]) <
             std::pair(traffic.nodes[b], traffic.ranks[b]);
    });
    for (const std::size_t r : order_) {
      place_[traffic.ranks[r]] = ranks.size();
      ranks.push_back(traffic.ranks[r]);
      nodes.push_back(traffic.nodes[r]);
    }
    measured = matrix_of(traffic.measured);
    predicted = matrix_of(traffic.predicted);
    for (const Matrix* matrix : {&measured, &predicted}) {
      for (const auto& row : *matrix) {
        for (const Bytes bytes : row) {
          if (bytes == Bytes{0}) continue;
          least = least == Bytes{0} ? bytes : std::min(least, bytes);
          most = std::max(most, bytes);
        }
      }
    }
  }

  // Returns 0 for no bytes, else a share from just above 0 (fewest bytes) to 1 (most).
  [[nodiscard]] double share(Bytes bytes) const {
    if (bytes == Bytes{0}) return 0;
    if (least == most) return 1;
    const auto log = [](Bytes value) { return std::log(static_cast<double>(value.value)); };
    return 0.1 + 0.9 * (log(bytes) - log(least)) / (log(most) - log(least));
  }
  [[nodiscard]] bool ends_node(std::size_t i) const {
    return i + 1 < nodes.size() && nodes[i] != nodes[i + 1];
  }

  std::vector<int> ranks;
  std::vector<int> nodes;
  Matrix measured;
  Matrix predicted;
  Bytes least;
  Bytes most;

 private:
  [[nodiscard]] Matrix matrix_of(const TrafficRows& rows) const {
    Matrix matrix(ranks.size(), std::vector<Bytes>(ranks.size()));
    for (const TrafficRow& row : rows) {
      const auto from = place_.find(row.from.value);
      const auto to = place_.find(row.to.value);
      if (row.purpose == Purpose::kControl || from == place_.end() || to == place_.end()) continue;
      matrix[from->second][to->second] += row.count.bytes;
    }
    return matrix;
  }

  std::vector<std::size_t> order_;
  std::map<int, std::size_t> place_;
};

// Returns text such as "activation 1.0 MiB (predicted 1.0 MiB), ...".
std::string purposes_text(const TrafficInterval& traffic) {
  std::string text;
  for (const Purpose purpose : kPurposes) {
    const auto sum = [&](const TrafficRows& rows) {
      Bytes bytes;
      for (const TrafficRow& row : rows) {
        if (row.purpose == purpose) bytes += row.count.bytes;
      }
      return bytes;
    };
    const Bytes measured = sum(traffic.measured);
    const Bytes predicted = sum(traffic.predicted);
    if (measured == Bytes{0} && predicted == Bytes{0}) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name(purpose), format_bytes(measured));
    if (purpose == Purpose::kControl) continue;
    text += measured == predicted ? " as predicted"
                                  : fmt::format(" (predicted {})", format_bytes(predicted));
  }
  return text;
}

std::string cells_text(const Drawn& drawn, const Matrix& matrix, std::size_t row,
                       const std::array<std::string_view, 5>& shades) {
  std::string text;
  for (std::size_t column = 0; column < matrix.size(); ++column) {
    const double share = drawn.share(matrix[row][column]);
    const auto shade = share == 0 ? 0
                                  : std::clamp(static_cast<std::size_t>(std::ceil(share * 4)),
                                               std::size_t{1}, std::size_t{4});
    text += shades[shade];
    text += shades[shade];
    if (drawn.ends_node(column)) text += '|';
  }
  return text;
}

std::string frame_text(const Drawn& drawn) {
  std::string text;
  for (std::size_t column = 0; column < drawn.ranks.size(); ++column) {
    text += "--";
    if (drawn.ends_node(column)) text += '+';
  }
  return text;
}

// Returns a colour from white over blue to black.
std::string colour(double share) {
  const auto part = [&](double low, double high) {
    return static_cast<int>(std::lround(255 * (high + (low - high) * share)));
  };
  return share == 0 ? "#ffffff"
                    : fmt::format("#{:02x}{:02x}{:02x}", part(0.03, 0.87), part(0.19, 0.92),
                                  part(0.42, 0.97));
}

constexpr int kCell = 24;
constexpr int kMargin = 48;

void draw(std::string& svg, const Drawn& drawn, const Matrix& matrix, std::string_view title,
          int left) {
  const auto size = static_cast<int>(drawn.ranks.size());
  svg += fmt::format("<text x=\"{}\" y=\"16\" font-weight=\"bold\">{}</text>\n", left, title);
  for (int row = 0; row < size; ++row) {
    const auto r = static_cast<std::size_t>(row);
    const int y = kMargin + row * kCell;
    svg += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n", left - 4, y + 16,
                       drawn.ranks[r]);
    svg += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
                       left + row * kCell + kCell / 2, kMargin - 4, drawn.ranks[r]);
    for (int column = 0; column < size; ++column) {
      const auto c = static_cast<std::size_t>(column);
      svg += fmt::format(
          "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\" stroke=\"#dddddd\">"
          "<title>{} to {}: {} bytes</title></rect>\n",
          left + column * kCell, y, kCell, kCell, colour(drawn.share(matrix[r][c])), drawn.ranks[r],
          drawn.ranks[c], matrix[r][c].value);
    }
  }
  for (int first = 0; first < size;) {  // a frame around each node's own messages
    int end = first + 1;
    while (end < size && !drawn.ends_node(static_cast<std::size_t>(end - 1))) ++end;
    svg += fmt::format(
        "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"none\" stroke=\"#c00000\" "
        "stroke-width=\"2\"/>\n",
        left + first * kCell, kMargin + first * kCell, (end - first) * kCell,
        (end - first) * kCell);
    first = end;
  }
}

}  // namespace

std::string traffic_text(const TrafficInterval& traffic, const TrafficTextOptions& options) {
  const std::string purposes = purposes_text(traffic);
  if (purposes.empty()) return "";
  std::string text = purposes + '\n';
  if (traffic.ranks.size() > kMaxDrawnRanks) return text;
  const Drawn drawn(traffic);
  if (drawn.most == Bytes{0}) return text;
  constexpr std::array<std::string_view, 5> kShades = {" ", "░", "▒", "▓", "█"};
  constexpr std::array<std::string_view, 5> kAscii = {" ", ".", ":", "*", "#"};
  const auto& shades = options.ascii ? kAscii : kShades;
  const std::size_t width = frame_text(drawn).size();
  text += fmt::format("{:>9} {:<{}}   {}\n", "from", "to: measured", width, "to: predicted");
  for (std::size_t row = 0; row < drawn.ranks.size(); ++row) {
    text += fmt::format("{:>8} |{}| |{}|\n", drawn.ranks[row],
                        cells_text(drawn, drawn.measured, row, shades),
                        cells_text(drawn, drawn.predicted, row, shades));
    if (!drawn.ends_node(row)) continue;
    text += fmt::format("{:>8} +{}+ +{}+\n", "", frame_text(drawn), frame_text(drawn));
  }
  return text + fmt::format("{:>8}  {} {} .. {} {}, logarithmic; lines between nodes\n", "",
                            shades[1], format_bytes(drawn.least), shades[4],
                            format_bytes(drawn.most));
}

std::string traffic_svg(const TrafficInterval& traffic) {
  const Drawn drawn(traffic);
  const auto size = static_cast<int>(drawn.ranks.size());
  const int side = size * kCell;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
      2 * side + 3 * kMargin, side + 2 * kMargin + 20);
  draw(svg, drawn, drawn.measured, "measured", kMargin);
  draw(svg, drawn, drawn.predicted, "predicted", side + 2 * kMargin);
  svg += fmt::format(
      "<text x=\"{}\" y=\"{}\">from (row) to (column), {} to {}, logarithmic; frames are "
      "nodes</text>\n"
      "<text x=\"{}\" y=\"{}\">{}</text>\n</svg>\n",
      kMargin, side + kMargin + 24, format_bytes(drawn.least), format_bytes(drawn.most), kMargin,
      side + kMargin + 44, purposes_text(traffic));
  return svg;
}

std::string traffic_csv(std::span<const TrafficInterval> intervals) {
  std::string csv =
      "generation,first_step,steps,from,to,purpose,measured_messages,measured_bytes,"
      "predicted_messages,predicted_bytes\n";
  for (const TrafficInterval& one : intervals) {
    std::map<std::tuple<WorldRank, WorldRank, Purpose>, std::pair<MessageCount, MessageCount>> rows;
    for (const TrafficRow& row : one.measured) {
      rows[{row.from, row.to, row.purpose}].first = row.count;
    }
    for (const TrafficRow& row : one.predicted) {
      rows[{row.from, row.to, row.purpose}].second = row.count;
    }
    for (const auto& [key, counts] : rows) {
      const auto& [from, to, purpose] = key;
      csv +=
          fmt::format("{},{},{},{},{},{},{},{},{},{}\n", one.generation, one.first_step, one.steps,
                      from, to, name(purpose), counts.first.messages, counts.first.bytes.value,
                      counts.second.messages, counts.second.bytes.value);
    }
  }
  return csv;
}

tensor::SparseTensor tensor_of(const std::vector<TrafficInterval>& intervals) {
  std::int32_t last = 0;
  for (const TrafficInterval& one : intervals) {
    for (const int rank : one.ranks) last = std::max(last, rank);
  }
  const auto size = static_cast<std::uint64_t>(last) + 1;
  tensor::SparseTensor tensor{.sizes = {intervals.size(), size, size},
                              .names = {"interval", "from", "to"},
                              .indices = {{}, {}, {}}};
  for (std::size_t i = 0; i < intervals.size(); ++i) {
    std::map<std::pair<WorldRank, WorldRank>, Bytes> pairs;
    for (const TrafficRow& row : intervals[i].measured) {
      if (row.purpose != Purpose::kControl) pairs[{row.from, row.to}] += row.count.bytes;
    }
    for (const auto& [pair, bytes] : pairs) {
      tensor.indices[0].push_back(static_cast<std::uint32_t>(i));
      tensor.indices[1].push_back(static_cast<std::uint32_t>(pair.first.value));
      tensor.indices[2].push_back(static_cast<std::uint32_t>(pair.second.value));
      tensor.values.push_back(static_cast<double>(bytes.value));
    }
  }
  return tensor;
}

}  // namespace dynmo::observe
