// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace dynmo::kernels {

// Whether anybody will use the gradient of an operation's input: nobody does in the first layer
// behind a frozen prefix.
enum class InputGradient { kWanted, kNotWanted };

}  // namespace dynmo::kernels
