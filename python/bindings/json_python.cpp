// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/json_python.h"

#include <nanobind/stl/string.h>

#include <string>

namespace dynmo::python {
namespace nb = nanobind;
namespace {

constexpr int kMaxLevels = 64;  // the limit of parse_json

Json convert(nb::handle value, int levels);

Json convert_dict(nb::handle value, int levels) {
  Json json = Json::object();
  for (const auto& [key, element] : nb::borrow<nb::dict>(value)) {
    if (!nb::isinstance<nb::str>(key)) {
      throw nb::type_error("a key of a dict is no string, wanted the keys of docs/formats.md");
    }
    json[nb::cast<std::string>(key)] = convert(element, levels - 1);
  }
  return json;
}

Json convert_number(nb::handle value) {
  // numpy's integers have __index__, its floats __float__ alone.
  if (PyObject* index = PyNumber_Index(value.ptr()); index != nullptr) {
    const nb::object whole = nb::steal(index);
    const long long number = PyLong_AsLongLong(whole.ptr());
    if (number == -1 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      throw nb::value_error("an integer is beyond 64 bits");
    }
    return Json(static_cast<std::int64_t>(number));
  }
  PyErr_Clear();
  const double number = PyFloat_AsDouble(value.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    const std::string type =
        nb::cast<std::string>(nb::str(nb::handle(value.type()).attr("__name__")));
    throw nb::type_error(
        ("a value is of type " + type + ", wanted dict, list, str, number, bool or None").c_str());
  }
  return Json(number);
}

Json convert(nb::handle value, int levels) {
  if (levels == 0) throw nb::value_error("a value nests more than 64 levels");
  if (value.is_none()) return Json(nullptr);
  if (nb::isinstance<nb::bool_>(value)) return Json(nb::cast<bool>(value));
  if (nb::isinstance<nb::str>(value)) return Json(nb::cast<std::string>(value));
  if (nb::isinstance<nb::dict>(value)) return convert_dict(value, levels);
  if (nb::isinstance<nb::list>(value) || nb::isinstance<nb::tuple>(value)) {
    Json json = Json::array();
    for (const nb::handle element : nb::borrow<nb::object>(value)) {
      json.push_back(convert(element, levels - 1));
    }
    return json;
  }
  // numpy.bool_ is no int, and no float either.
  const std::string type =
      nb::cast<std::string>(nb::str(nb::handle(value.type()).attr("__name__")));
  if (type == "bool" || type == "bool_")
    return Json(nb::cast<bool>(nb::handle(value).attr("__bool__")()));
  return convert_number(value);
}

}  // namespace

Json to_json(nb::handle value) { return convert(value, kMaxLevels); }

nb::object to_python(const Json& json) {
  switch (json.type()) {
    case Json::value_t::object: {
      nb::dict dict;
      for (const auto& [key, element] : json.items()) dict[key.c_str()] = to_python(element);
      return dict;
    }
    case Json::value_t::array: {
      nb::list list;
      for (const Json& element : json) list.append(to_python(element));
      return list;
    }
    case Json::value_t::string:
      return nb::cast(json.get_ref<const std::string&>());
    case Json::value_t::boolean:
      return nb::cast(json.get<bool>());
    case Json::value_t::number_integer:
      return nb::cast(json.get<std::int64_t>());
    case Json::value_t::number_unsigned:
      return nb::cast(json.get<std::uint64_t>());
    case Json::value_t::number_float:
      return nb::cast(json.get<double>());
    default:
      return nb::none();
  }
}

}  // namespace dynmo::python
