// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/operator_kernels.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>

namespace dynmo::kernels {

bool has_kernel(const char* name, const at::Tensor& x) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  return op && op->hasKernelForDispatchKey(c10::legacyExtractDispatchKey(x.key_set()));
}

}  // namespace dynmo::kernels
