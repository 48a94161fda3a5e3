// SPDX-License-Identifier: Apache-2.0
#pragma once

// A c10d store with which one group and its channels form. A value that a rank sets goes to all
// ranks over the control plane's connections. A rank that waits for a key gets an error when a rank
// is lost, and need not wait until its timeout. The store needs no server and leaves nothing
// behind.

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "dynmo/elastic/control_plane.h"

namespace dynmo::c10d {

// A store of c10d whose values are in the control plane of `watch`. Implements the operations that
// Gloo's constructor needs. All other operations throw, and so does every call after the end of
// `watch`. Does not own `watch`. Any thread may call.
class RelayStore final : public ::c10d::Store {
 public:
  explicit RelayStore(std::weak_ptr<elastic::GroupWatch> watch, std::chrono::milliseconds timeout)
      : Store(timeout), watch_(std::move(watch)) {}

  c10::intrusive_ptr<::c10d::Store> clone() override {
    return c10::make_intrusive<RelayStore>(watch_, timeout_);
  }
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;
  // Throws. No rank needs it, and one rank would have to compute the sum.
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  std::int64_t getNumKeys() override;

 private:
  [[nodiscard]] std::shared_ptr<elastic::GroupWatch> watch() const;

  std::weak_ptr<elastic::GroupWatch> watch_;
};

}  // namespace dynmo::c10d
