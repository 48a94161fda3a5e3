// SPDX-License-Identifier: Apache-2.0
#pragma once

// Implements Store (c10d_transport.h), for the files that know c10d.

#include <c10/util/intrusive_ptr.h>

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace dynmo::c10d {

class Store {
 public:
  c10::intrusive_ptr<::c10d::Store> keys;
  std::string address;  // address at which other ranks reach this one
};

}  // namespace dynmo::c10d
