// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/head_slice.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
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

bool is_head(const ParameterSpec& spec) {
  const auto part = parse_matrix_rows(spec.name);
  return spec.shape.size() == 2 && (part ? part->matrix : spec.name).ends_with("head.weight");
}

std::int64_t head_words(const Layer& layer) {
  for (const ParameterSpec& spec : layer.parameters()) {
    if (!is_head(spec)) continue;
    const auto part = parse_matrix_rows(spec.name);
    return part ? part->rows.end : spec.shape[0];
  }
  return 0;
}

std::vector<WholePlace> whole_places(const Model& model) {
  std::vector<WholePlace> places;
  WholePlace next;
  for (const auto& layer : model) {
    places.push_back(next);
    if (layer->floats_passed() > 0) {
      ++next.slice;
    } else {
      next = {.layer = next.layer + 1};
    }
  }
  return places;
}

int layers_up_to(const Model& model, int layers) {
  const std::vector<WholePlace> places = whole_places(model);
  const auto end = std::ranges::lower_bound(places, layers, {}, &WholePlace::layer);
  return static_cast<int>(end - places.begin());
}

int layers_with_whole_head(const Model& model) {
  return model.empty() ? 0 : whole_places(model).back().layer + 1;
}

int layers_with_whole_head(const Recipe& recipe) {
  Model layers;
  for (const Slot& slot : recipe.slots) layers.push_back(slot.layer);
  return layers_with_whole_head(layers);
}

}  // namespace dynmo::model
