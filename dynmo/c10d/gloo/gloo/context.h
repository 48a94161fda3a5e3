// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stands in for Gloo's own header, see gloo/algorithm.h. Objects of this class are made and used
// inside libtorch only; the declaration says nothing of their layout.

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
  std::chrono::milliseconds getTimeout() const;
};

}  // namespace gloo
