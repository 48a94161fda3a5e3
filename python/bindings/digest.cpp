// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/digest.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <span>
#include <string>

#include "dynmo/plan/plan.h"
#include "python/bindings/errors.h"
#include "python/bindings/json_python.h"
#include "python/bindings/parts.h"

namespace dynmo::python {
namespace nb = nanobind;
namespace {

// An object that exposes its memory: bytes, arrays, tensors of a CPU.
using Buffer = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

std::string digest(const Buffer& buffer) {
  const std::span bytes(static_cast<const std::byte*>(buffer.data()), buffer.nbytes());
  const nb::gil_scoped_release release;
  return digest_of(bytes).hex();
}

std::string digest_of_bytes(const nb::bytes& bytes) {
  return digest_of(std::span(static_cast<const std::byte*>(bytes.data()), bytes.size())).hex();
}

std::string digest_of_plan(const nb::dict& plan) {
  return plan::digest(value_or_raise(plan::parse_plan(to_json(plan), "plan"))).hex();
}

}  // namespace

void bind_digest(nb::module_& module) {
  module.def("digest", digest_of_bytes, nb::arg("buffer"),
             nb::sig("def digest(buffer: bytes) -> str"));
  module.def("digest", digest, nb::arg("buffer"), nb::sig("def digest(buffer: typing.Any) -> str"),
             "XXH3 of 128 bits, of bytes, an array of numpy or a tensor on the CPU.");
  module.def("digest_of_plan", digest_of_plan, nb::arg("plan"),
             nb::sig("def digest_of_plan(plan: dict[str, typing.Any]) -> str"));
}

}  // namespace dynmo::python
