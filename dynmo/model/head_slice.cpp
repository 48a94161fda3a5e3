// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/head_slice.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <vector>

namespace dynmo::model {

std::string name_of(const MatrixRows& rows) {
  return fmt::format("{}[{}:{}]", rows.matrix, rows.rows.begin, rows.rows.end);
}

std::optional<MatrixRows> parse_matrix_rows(std::string_view name) {
  const std::size_t open = name.find('[');
  if (open == std::string_view::npos) return {};
  MatrixRows found{.matrix = std::string(name.substr(0, open)), .rows = {}};
  const char* const end = name.data() + name.size();
  const auto first = std::from_chars(name.data() + open + 1, end, found.rows.begin);
  if (first.ec != std::errc() || first.ptr == end || *first.ptr != ':') return {};
  const auto last = std::from_chars(first.ptr + 1, end, found.rows.end);
  const bool closed = last.ec == std::errc() && last.ptr + 1 == end && *last.ptr == ']';
  if (!closed || found.rows.begin < 0 || found.rows.end <= found.rows.begin) return {};
  return found;
}

std::int64_t head_words(const Model& model) {
  const std::vector<ParameterSpec> specs = model.back()->parameters();
  if (specs.empty() || specs.back().shape.size() != 2) return 0;
  const auto part = parse_matrix_rows(specs.back().name);
  return part ? part->rows.end : specs.back().shape[0];
}

int layers_with_whole_head(const Model& model) {
  const auto passing =
      std::ranges::count_if(model, [](const auto& layer) { return layer->floats_passed() > 0; });
  return static_cast<int>(std::ssize(model) - passing);
}

int layers_with_whole_head(const Recipe& recipe) {
  Model layers;
  for (const Slot& slot : recipe.slots) layers.push_back(slot.layer);
  return layers_with_whole_head(layers);
}

}  // namespace dynmo::model
