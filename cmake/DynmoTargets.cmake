# SPDX-License-Identifier: Apache-2.0
# How every target of DynMo is made: warnings, sanitizers, headers, tests.
include(GNUInstallDirs)

add_library(dynmo_options INTERFACE)
target_compile_options(dynmo_options INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
  $<$<BOOL:${DYNMO_WERROR}>:-Werror>)
if(DYNMO_SANITIZE)
  target_compile_options(dynmo_options INTERFACE -fsanitize=${DYNMO_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(dynmo_options INTERFACE -fsanitize=${DYNMO_SANITIZE})
endif()

# dynmo_library(NAME FOLDER...): target dynmo_NAME, alias dynmo::NAME, of the sources and headers in dynmo/FOLDER. Headers
# ending in _impl.h are private.
function(dynmo_library name)
  set(sources "")
  set(headers "")
  foreach(folder IN LISTS ARGN)
    file(GLOB found CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/dynmo/${folder}/*.cpp")
    list(APPEND sources ${found})
    file(GLOB found CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/dynmo/${folder}/*.h")
    list(FILTER found EXCLUDE REGEX "_impl\\.h$")
    list(APPEND headers ${found})
  endforeach()
  add_library(dynmo_${name} STATIC ${sources})
  add_library(dynmo::${name} ALIAS dynmo_${name})
  set_target_properties(dynmo_${name} PROPERTIES EXPORT_NAME ${name})
  target_sources(dynmo_${name} PUBLIC FILE_SET HEADERS BASE_DIRS "${CMAKE_SOURCE_DIR}" FILES ${headers})
  target_compile_features(dynmo_${name} PUBLIC cxx_std_20)
  target_link_libraries(dynmo_${name} PRIVATE $<BUILD_INTERFACE:dynmo_options>)
endfunction()

# dynmo_test(NAME LABELS... SOURCES... [LINK...]): a GoogleTest program; each of its tests is one of ctest's.
function(dynmo_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "LABELS;SOURCES;LINK")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE dynmo_options ${arg_LINK} GTest::gtest GTest::gtest_main)
  include(GoogleTest)
  gtest_discover_tests(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT} DISCOVERY_TIMEOUT 60)
endfunction()
