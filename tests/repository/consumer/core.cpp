// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "dynmo/core/units.h"
#include "dynmo/plan/plan.h"

int main() { fmt::print("{}\n", dynmo::format_bytes(dynmo::Bytes{1024})); }
