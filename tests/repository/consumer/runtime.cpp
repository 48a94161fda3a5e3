// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "dynmo/core/units.h"
#include "dynmo/model/layer.h"

int main() {
  dynmo::model::LayerState layer;
  dynmo::model::freeze(layer);
  fmt::print("{} {}\n", layer.frozen ? "frozen" : "free", dynmo::format_bytes(dynmo::Bytes{1024}));
}
