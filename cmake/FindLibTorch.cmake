# SPDX-License-Identifier: Apache-2.0
# Finds libtorch in an installed PyTorch wheel: LibTorch::LibTorch, LibTorch_VERSION ("2.11.0"), LibTorch_SERIES ("2.11").
#
# Not find_package(Torch) of the wheel itself: that asks for a CUDA toolkit and adds its flags. Looked for, in this order:
# DYNMO_TORCH_DIR (the folder `torch` of a wheel, cache or environment variable), the torch that `python3` has, the
# private environment that scripts/setup makes. Only the first that exists is looked at where the user named one.
# A library takes no other series than its own, which dynmoConfig.cmake sets.
include("${CMAKE_CURRENT_LIST_DIR}/TorchVersions.cmake")
if(NOT DEFINED DYNMO_TORCH_VERSION)
  set(DYNMO_TORCH_VERSION "" CACHE STRING "Only this series of PyTorch, such as 2.11; all of TorchVersions.cmake if empty")
  mark_as_advanced(DYNMO_TORCH_VERSION)
endif()
set(_libtorch_only "${DYNMO_TORCH_VERSION}")
if(_libtorch_only STREQUAL "")
  set(_libtorch_only "$ENV{DYNMO_TORCH_VERSION}")  # as scripts/setup takes it
endif()
set(_libtorch_wanted "${_libtorch_only}")
if(_libtorch_wanted STREQUAL "")
  set(_libtorch_wanted "${DYNMO_TORCH_OLDEST} to ${DYNMO_TORCH_NEWEST}")
endif()
set(DYNMO_TORCH_DIR "" CACHE PATH "Folder of an installed torch, such as .../site-packages/torch")

function(_libtorch_version directory output)
  set(${output} "" PARENT_SCOPE)
  if(EXISTS "${directory}/version.py")
    file(STRINGS "${directory}/version.py" line REGEX "^__version__ *=")
    if(line MATCHES "'([0-9]+\\.[0-9]+\\.[0-9]+)")
      set(${output} "${CMAKE_MATCH_1}" PARENT_SCOPE)
    endif()
  endif()
endfunction()

# Sets `output` to the series, such as 2.11, of a version that is accepted, else to "".
function(_libtorch_accepted version output)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" series "${version}")
  set(${output} "" PARENT_SCOPE)
  if(series STREQUAL "")
    return()
  elseif(_libtorch_only)
    if(series VERSION_EQUAL _libtorch_only)
      set(${output} "${series}" PARENT_SCOPE)
    endif()
  elseif(series VERSION_GREATER_EQUAL DYNMO_TORCH_OLDEST AND series VERSION_LESS_EQUAL DYNMO_TORCH_NEWEST)
    set(${output} "${series}" PARENT_SCOPE)
  endif()
endfunction()

set(_libtorch_candidates "")
if(DYNMO_TORCH_DIR)
  set(_libtorch_candidates "${DYNMO_TORCH_DIR}")
elseif(NOT "$ENV{DYNMO_TORCH_DIR}" STREQUAL "")  # read anew each time: a value in the cache would outlive it
  set(_libtorch_candidates "$ENV{DYNMO_TORCH_DIR}")
else()
  execute_process(COMMAND python3 -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s and s.submodule_search_locations else '')"
    OUTPUT_VARIABLE _libtorch_python OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT "$ENV{DYNMO_CACHE}" STREQUAL "")
    set(_libtorch_cache "$ENV{DYNMO_CACHE}")
  elseif(NOT "$ENV{XDG_CACHE_HOME}" STREQUAL "")
    set(_libtorch_cache "$ENV{XDG_CACHE_HOME}/dynmo")
  else()
    set(_libtorch_cache "$ENV{HOME}/.cache/dynmo")
  endif()
  file(GLOB _libtorch_private "${_libtorch_cache}/torch-[0-9]*/lib/python3*/site-packages/torch")
  set(_libtorch_candidates ${_libtorch_python} ${_libtorch_private})
endif()

set(_libtorch_seen "")
set(LibTorch_DIR_FOUND "")
set(LibTorch_VERSION "")
set(LibTorch_SERIES "")
foreach(_libtorch_directory IN LISTS _libtorch_candidates)
  _libtorch_version("${_libtorch_directory}" _libtorch_found)
  _libtorch_accepted("${_libtorch_found}" _libtorch_series)
  if(_libtorch_found STREQUAL "")
    list(APPEND _libtorch_seen "${_libtorch_directory} (no version.py of PyTorch)")
  elseif(NOT EXISTS "${_libtorch_directory}/lib/libtorch_cpu.so")
    list(APPEND _libtorch_seen "${_libtorch_directory} (${_libtorch_found} without lib/libtorch_cpu.so)")
  elseif(_libtorch_series STREQUAL "")
    list(APPEND _libtorch_seen "${_libtorch_directory} (${_libtorch_found})")
  else()
    set(LibTorch_DIR_FOUND "${_libtorch_directory}")
    set(LibTorch_VERSION "${_libtorch_found}")
    set(LibTorch_SERIES "${_libtorch_series}")
    break()
  endif()
endforeach()
list(JOIN _libtorch_seen ", " _libtorch_seen)
if(_libtorch_seen STREQUAL "")
  set(_libtorch_seen "no PyTorch at all")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch REQUIRED_VARS LibTorch_DIR_FOUND VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "wanted PyTorch ${_libtorch_wanted}, found ${_libtorch_seen}: run `make setup`, or give -DDYNMO_TORCH_DIR=.../site-packages/torch")

if(LibTorch_FOUND AND NOT LibTorch_SERIES IN_LIST DYNMO_TORCH_TESTED)
  list(JOIN DYNMO_TORCH_TESTED ", " _libtorch_tested)
  message(STATUS "LibTorch: PyTorch ${LibTorch_SERIES} is not tested, take one of ${_libtorch_tested} if it fails")
endif()
if(LibTorch_FOUND AND NOT TARGET LibTorch::LibTorch)
  add_library(LibTorch::c10 SHARED IMPORTED)
  set_target_properties(LibTorch::c10 PROPERTIES IMPORTED_LOCATION "${LibTorch_DIR_FOUND}/lib/libc10.so")
  add_library(LibTorch::LibTorch SHARED IMPORTED)
  set_target_properties(LibTorch::LibTorch PROPERTIES
    IMPORTED_LOCATION "${LibTorch_DIR_FOUND}/lib/libtorch_cpu.so"
    INTERFACE_LINK_LIBRARIES LibTorch::c10)
  # -idirafter: the wheel's folder carries its own fmt and others, which must not win over the system's.
  set_property(TARGET LibTorch::LibTorch PROPERTY INTERFACE_COMPILE_OPTIONS
    "SHELL:-idirafter \"${LibTorch_DIR_FOUND}/include\"" "SHELL:-idirafter \"${LibTorch_DIR_FOUND}/include/torch/csrc/api/include\"")
  set_property(TARGET LibTorch::LibTorch PROPERTY INTERFACE_COMPILE_DEFINITIONS USE_DISTRIBUTED USE_C10D_GLOO)
endif()

# libtorch's headers take seconds an include, and half a minute to precompile: once, for dynmo_runtime and all who use it. Each
# user instantiates the templates again that these headers name: 4 seconds, and 7 with those of autograd, which few include.
function(dynmo_precompile_torch target)
  target_precompile_headers(${target} PRIVATE <ATen/ATen.h> <fmt/format.h> <nlohmann/json.hpp> <string> <vector> <memory>)
endfunction()
