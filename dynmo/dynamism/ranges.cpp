// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/ranges_impl.h"

namespace dynmo::dynamism {

Expected<void> check_ranges(std::string_view source, std::initializer_list<FieldRange> fields) {
  for (const FieldRange& range : fields) {
    if (range.value >= range.least && range.value <= range.most) continue;
    if (range.most == std::numeric_limits<double>::max()) {
      return make_error(ErrorCode::kBadInput, "{}: {} is {}, wanted at least {}", source,
                        range.field, range.value, range.least);
    }
    return make_error(ErrorCode::kBadInput, "{}: {} is {}, wanted {} to {}", source, range.field,
                      range.value, range.least, range.most);
  }
  return {};
}

}  // namespace dynmo::dynamism
