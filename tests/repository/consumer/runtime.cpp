// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <fmt/format.h>

#include "dynmo/core/units.h"
#include "dynmo/model/layer.h"

int main() {
  const at::Tensor ones = at::ones({256});
  const auto bytes = static_cast<std::int64_t>(ones.nbytes());
  fmt::print("{} in a tensor\n", dynmo::format_bytes(dynmo::Bytes{bytes}));
}
