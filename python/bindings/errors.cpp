// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/errors.h"

#include <nanobind/nanobind.h>

namespace dynmo::python {
namespace nb = nanobind;

void raise(const Error& error) {
  const char* name = "DynmoError";
  if (error.code == ErrorCode::kBadInput) name = "BadInputError";
  if (error.code == ErrorCode::kInfeasible) name = "InfeasibleError";
  const nb::object type = nb::module_::import_("dynmo.errors").attr(name);
  PyErr_SetString(type.ptr(), error.message.c_str());
  throw nb::python_error();
}

}  // namespace dynmo::python
