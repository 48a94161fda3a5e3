// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>

#include "dynmo/c10d/relay_store_impl.h"

namespace dynmo::c10d {

std::shared_ptr<elastic::GroupWatch> RelayStore::watch() const {
  auto watch = watch_.lock();
  TORCH_CHECK(watch != nullptr, "the group is gone");
  return watch;
}

void RelayStore::set(const std::string& key, const std::vector<std::uint8_t>& value) {
  watch()->tell(key, std::string(value.begin(), value.end()));
}

std::vector<std::uint8_t> RelayStore::get(const std::string& key) {
  wait({key}, timeout_);
  const std::string value = watch()->told(key).value_or("");
  return {value.begin(), value.end()};
}

bool RelayStore::check(const std::vector<std::string>& keys) {
  const auto found = watch()->wait_for(keys, std::chrono::milliseconds(0));
  return found && *found;
}

void RelayStore::wait(const std::vector<std::string>& keys,
                      const std::chrono::milliseconds& timeout) {
  const auto found = watch()->wait_for(keys, timeout);
  TORCH_CHECK(found.has_value(), found.error().message);
  TORCH_CHECK(*found, "not all ranks have said where they are");
}

std::int64_t RelayStore::add(const std::string& key, std::int64_t value) {
  TORCH_CHECK(false, "nothing adds ", value, " to ", key, " while a group forms");
}

bool RelayStore::deleteKey(const std::string& key) {
  TORCH_CHECK(false, "nothing takes ", key, " back while a group forms");
}

std::int64_t RelayStore::getNumKeys() {
  TORCH_CHECK(false, "nothing counts the keys while a group forms");
}

}  // namespace dynmo::c10d
