# SPDX-License-Identifier: Apache-2.0
# The Python module, dynmo._core, where nanobind and a Python's headers are: in the environment that scripts/setup makes, in
# the Python that builds a wheel, or where DYNMO_PYTHON_EXECUTABLE says.
set(DYNMO_PYTHON "AUTO" CACHE STRING "Build the Python module: ON, OFF, or AUTO where nanobind is")
set(DYNMO_PYTHON_EXECUTABLE "" CACHE FILEPATH "A Python that has nanobind")

if(NOT "$ENV{DYNMO_CACHE}" STREQUAL "")
  set(_dynmo_cache "$ENV{DYNMO_CACHE}")
elseif(NOT "$ENV{XDG_CACHE_HOME}" STREQUAL "")
  set(_dynmo_cache "$ENV{XDG_CACHE_HOME}/dynmo")
else()
  set(_dynmo_cache "$ENV{HOME}/.cache/dynmo")
endif()

# The Python of the tests of dynmo.torch, and its stand-ins for CUDA's libraries; empty where scripts/setup made none.
set(DYNMO_PYTHON_TORCH "")
set(DYNMO_PYTHON_TORCH_LIBRARIES "${_dynmo_cache}/python-torch/stand-ins")
if(EXISTS "${_dynmo_cache}/python-torch/complete")
  set(DYNMO_PYTHON_TORCH "${_dynmo_cache}/python-torch/bin/python")
endif()

set(DYNMO_PYTHON_FOUND OFF)
if(NOT DYNMO_PYTHON)
  return()
endif()
if(DYNMO_PYTHON_EXECUTABLE)
  set(_dynmo_python "${DYNMO_PYTHON_EXECUTABLE}")
elseif(SKBUILD)
  set(_dynmo_python "${Python_EXECUTABLE}")
else()
  set(_dynmo_python "${_dynmo_cache}/python/bin/python")
endif()
execute_process(COMMAND "${_dynmo_python}" -m nanobind --cmake_dir
  OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _dynmo_nanobind)
if(_dynmo_nanobind EQUAL 0)
  set(Python_EXECUTABLE "${_dynmo_python}")
  # The wheel says of which Python the stable interface is; nanobind takes it if this component is found.
  find_package(Python 3.10 COMPONENTS Interpreter Development.Module ${SKBUILD_SABI_COMPONENT})
endif()
if(_dynmo_nanobind EQUAL 0 AND Python_Development.Module_FOUND)
  find_package(nanobind CONFIG REQUIRED)
  set(DYNMO_PYTHON_FOUND ON)
  message(STATUS "Python module: for ${Python_EXECUTABLE} (${Python_VERSION})")
elseif(DYNMO_PYTHON STREQUAL "AUTO")
  message(STATUS "Python module: not built, no nanobind or no headers of Python for '${_dynmo_python}' (scripts/setup installs them)")
else()
  message(FATAL_ERROR "Python module: '${_dynmo_python}' has no nanobind or no headers; run scripts/setup, or set DYNMO_PYTHON_EXECUTABLE")
endif()
