// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace dynmo::kernels {

// Tells whether the gradient of an operation's input will be used. The first layer behind a frozen
// prefix needs none.
enum class InputGradient { kWanted, kNotWanted };

}  // namespace dynmo::kernels
