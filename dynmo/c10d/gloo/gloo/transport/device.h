// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stands in for Gloo's own header, see gloo/algorithm.h. Devices and buffers are handed around by
// pointer; libtorch makes and destroys them.

namespace gloo::transport {

class Device;

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = default;
};

}  // namespace gloo::transport
