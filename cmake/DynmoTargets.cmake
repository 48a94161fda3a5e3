# SPDX-License-Identifier: Apache-2.0
# How every target of DynMo is made: warnings, sanitizers, headers, tests.
include(GNUInstallDirs)

add_library(dynmo_options INTERFACE)
target_compile_options(dynmo_options INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
  $<$<BOOL:${DYNMO_WERROR}>:-Werror>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # What these say of plain use of std::string and std::vector under -O3 (a `"x" + to_string(n)` that copies 2^63 bytes, a
  # reference that dangles) is false too often in g++ 12 to 14; ASan finds what is true.
  target_compile_options(dynmo_options INTERFACE -Wno-array-bounds -Wno-restrict -Wno-stringop-overflow -Wno-stringop-overread
    -Wno-dangling-reference)
  if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    # It takes the destructor of an empty std::optional for one of its value; g++ 12 finds what is true.
    target_compile_options(dynmo_options INTERFACE -Wno-maybe-uninitialized)
  endif()
endif()
# Programs name their sources as the repository does, wherever it lies: what one checkout has compiled is good for another. Debug
# information keeps the whole path, but under sanitizers, as debuggers find the sources by it.
set(prefix_map macro)
if(DYNMO_SANITIZE)
  set(prefix_map file)
endif()
target_compile_options(dynmo_options INTERFACE "-f${prefix_map}-prefix-map=${PROJECT_SOURCE_DIR}/=")
if(DYNMO_SANITIZE)
  target_compile_options(dynmo_options INTERFACE -fsanitize=${DYNMO_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(dynmo_options INTERFACE -fsanitize=${DYNMO_SANITIZE})
  # g++ says this of code that its sanitizers have rewritten, not of ours; the other builds say it where it is true.
  target_compile_options(dynmo_options INTERFACE -Wno-maybe-uninitialized)
endif()
if(DYNMO_FUZZ)
  target_compile_options(dynmo_options INTERFACE -fsanitize=fuzzer-no-link)
endif()

# A unity build compiles at most `at_once` sources of a folder as one, so that a change does not cost much, nor much memory.
# So names local to a file are the only ones of their kind in its folder.
function(dynmo_group folder at_once)
  string(REPLACE "/" "_" name "${folder}")
  set(count 0)
  foreach(source IN LISTS ARGN)
    math(EXPR group "${count} / ${at_once}")
    math(EXPR count "${count} + 1")
    set_source_files_properties("${source}" PROPERTIES UNITY_GROUP "${name}_${group}")
  endforeach()
endfunction()

# Sets `variable` to the files ENDING of a folder of the map. A source of dynamism has a folder, dynmo/dynamism/S; what it does in a
# training, with libtorch, is in dynmo/dynamism/S/training. The map calls all of those dynamism/training. Other inner folders
# (dynmo/train/setup, dynmo/transport/testing) have their own place in the map.
function(dynmo_files variable folder ending)
  set(root "${CMAKE_SOURCE_DIR}/dynmo")
  if(folder STREQUAL "dynamism")
    file(GLOB found CONFIGURE_DEPENDS "${root}/dynamism/*.${ending}" "${root}/dynamism/*/*.${ending}")
    list(FILTER found EXCLUDE REGEX "/dynamism/training/")
  elseif(folder STREQUAL "dynamism/training")
    file(GLOB found CONFIGURE_DEPENDS "${root}/dynamism/training/*.${ending}" "${root}/dynamism/*/training/*.${ending}")
  else()
    file(GLOB found CONFIGURE_DEPENDS "${root}/${folder}/*.${ending}")
  endif()
  set(${variable} ${found} PARENT_SCOPE)
endfunction()

# dynmo_library(NAME FOLDER...): target dynmo_NAME, alias dynmo::NAME, of the sources and headers in dynmo/FOLDER.
function(dynmo_library name)
  add_library(dynmo_${name} STATIC)
  add_library(dynmo::${name} ALIAS dynmo_${name})
  # The second makes the target all_verify_interface_header_sets, which compiles each public header alone.
  # Position-independent, for the Python module and for shared libraries of others (dynmo::runtime is for programs).
  if(name STREQUAL "core")
    set_target_properties(dynmo_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    target_compile_options(dynmo_${name} PRIVATE $<BUILD_INTERFACE:$<$<CXX_COMPILER_ID:GNU>:-fno-semantic-interposition>>)
  endif()
  set_target_properties(dynmo_${name} PROPERTIES EXPORT_NAME ${name} VERIFY_INTERFACE_HEADER_SETS ON
    UNITY_BUILD_MODE GROUP)
  target_compile_features(dynmo_${name} PUBLIC cxx_std_20)
  target_link_libraries(dynmo_${name} PRIVATE $<BUILD_INTERFACE:dynmo_options>)
  dynmo_add_folders(${name} ${ARGN})
endfunction()

# dynmo_add_folders(NAME FOLDER...): more folders for target dynmo_NAME. Headers ending in _impl.h are private.
function(dynmo_add_folders name)
  # Most of the time goes to headers and templates that all sources share. Six sources with libtorch take 18 seconds, twelve take 24.
  # Twelve without it take a fifth less than two times six.
  set(at_once 12)
  foreach(folder IN LISTS ARGN)
    dynmo_files(found ${folder} cpp)
    target_sources(dynmo_${name} PRIVATE ${found})
    dynmo_group(${folder} ${at_once} ${found})
    dynmo_files(found ${folder} h)
    list(FILTER found EXCLUDE REGEX "_impl\\.h$")
    target_sources(dynmo_${name} PUBLIC FILE_SET HEADERS BASE_DIRS "${CMAKE_SOURCE_DIR}" FILES ${found})
  endforeach()
endfunction()

# dynmo_embed(TARGET FILE NAMESPACE VARIABLE): puts a text file into the library, as a std::string_view that the source which
# uses it declares extern. A change of the file configures again.
function(dynmo_embed target file namespace variable)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/${file}")
  file(READ "${CMAKE_SOURCE_DIR}/${file}" text)
  set(source "${CMAKE_BINARY_DIR}/embedded/${file}.cpp")
  file(CONFIGURE OUTPUT "${source}" @ONLY CONTENT [[
// SPDX-License-Identifier: Apache-2.0
#include <string_view>
namespace @namespace@ {
extern const std::string_view @variable@;
const std::string_view @variable@ = R"embedded(@text@)embedded";
}
]])
  target_sources(${target} PRIVATE "${source}")
  set_source_files_properties("${source}" PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON SKIP_PRECOMPILE_HEADERS ON)
endfunction()

# dynmo_add_version(TARGET): puts dynmo::kVersion into a program, the version and the commit of the checkout. It is written at
# each build, so that a commit compiles one small file. The source that uses it declares it extern.
function(dynmo_add_version target)
  set(source "${CMAKE_BINARY_DIR}/version/version.cpp")
  if(NOT TARGET dynmo_version_source)
    add_custom_target(dynmo_version_source BYPRODUCTS "${source}" VERBATIM
      COMMAND "${CMAKE_COMMAND}" -DSOURCE=${CMAKE_SOURCE_DIR} -DVERSION=${PROJECT_VERSION} -DOUT=${source}
              -P "${CMAKE_SOURCE_DIR}/cmake/write_version.cmake"
      COMMENT "Looking for the commit")
  endif()
  add_dependencies(${target} dynmo_version_source)
  target_sources(${target} PRIVATE "${source}")
  set_source_files_properties("${source}" PROPERTIES GENERATED ON SKIP_UNITY_BUILD_INCLUSION ON SKIP_PRECOMPILE_HEADERS ON)
endfunction()

# What nearly every source of dynmo::core includes takes longer to parse than the rest. The tidy preset and the headers' own
# test do without, so that each file still includes what it uses.
function(dynmo_precompile_core target)
  target_precompile_headers(${target} PRIVATE <fmt/format.h> <nlohmann/json.hpp> <string> <vector>)
endfunction()

# dynmo_test(NAME LABELS... SOURCES... [LINK...] [TIMEOUT SECONDS] [PRECOMPILED TARGET]): a GoogleTest program. Each of its tests
# is one of ctest's, NAME.SUITE.TEST, and with libtorch, which takes 0.3 s to load, each of its suites, NAME.SUITE. It counts as
# one processor: ranks mostly wait for each other. COST is the TIMEOUT here and elsewhere: what may take long begins first, so
# that no processor is idle at the end.
# PRECOMPILED: whose precompiled header it uses; it links all that this one links.
function(dynmo_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT;PRECOMPILED" "LABELS;SOURCES;LINK")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 900)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE dynmo_options ${arg_LINK} GTest::gtest GTest::gtest_main)
  target_compile_options(${name} PRIVATE ${dynmo_quick_to_compile})
  if(arg_PRECOMPILED)
    target_precompile_headers(${name} REUSE_FROM ${arg_PRECOMPILED})
  endif()
  set(each test)
  if("dynmo::runtime" IN_LIST arg_LINK)
    set(each suite)
  endif()
  set(suites "${CMAKE_CURRENT_BINARY_DIR}/${name}_suites.cmake")
  set(suites_script "${CMAKE_SOURCE_DIR}/cmake/DynmoSuites.cmake")
  set_property(TARGET ${name} APPEND PROPERTY LINK_DEPENDS "${suites_script}")
  add_custom_command(TARGET ${name} POST_BUILD BYPRODUCTS "${suites}" VERBATIM COMMAND "${CMAKE_COMMAND}" -D "PROGRAM=$<TARGET_FILE:${name}>"
    -D NAME=${name} -D EACH=${each} -D "OUT=${suites}" -D "PROPERTIES=TIMEOUT ${arg_TIMEOUT} COST ${arg_TIMEOUT} LABELS [=[${arg_LABELS}]=]" -P "${suites_script}")
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/${name}_tests.cmake"
    "if(EXISTS \"${suites}\")\n  include(\"${suites}\")\nelse()\n  add_test(${name}_NOT_BUILT ${name}_NOT_BUILT)\nendif()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${CMAKE_CURRENT_BINARY_DIR}/${name}_tests.cmake")
endfunction()

# Tests are compiled more often than they are waited for. Their precompiled headers are those of -O3, with which g++ 13 and 14 for
# x86 have options that they then miss.
set(dynmo_quick_to_compile $<$<CONFIG:Release,RelWithDebInfo>:-O1>)
if(DYNMO_SANITIZE)
  # Optimizing what the sanitizers put into a test takes a third of its compilation; the library under test keeps its -O1.
  set(dynmo_quick_to_compile -O0)
endif()
include(CheckCXXCompilerFlag)
check_cxx_compiler_flag(-munroll-only-small-loops DYNMO_HAVE_UNROLL_ONLY_SMALL_LOOPS)
if(DYNMO_HAVE_UNROLL_ONLY_SMALL_LOOPS)
  list(APPEND dynmo_quick_to_compile $<$<CONFIG:Release,RelWithDebInfo>:-munroll-only-small-loops>)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  check_cxx_compiler_flag(-mvzeroupper DYNMO_HAVE_VZEROUPPER)
  if(DYNMO_HAVE_VZEROUPPER)
    list(APPEND dynmo_quick_to_compile $<$<CONFIG:Release,RelWithDebInfo>:-mvzeroupper>)
  endif()
endif()

# dynmo_test_precompiled, for tests of dynmo::core.
function(dynmo_add_test_precompiled)
  file(GENERATE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/test_precompiled.cpp" CONTENT "")
  add_library(dynmo_test_precompiled OBJECT "${CMAKE_CURRENT_BINARY_DIR}/test_precompiled.cpp")
  target_link_libraries(dynmo_test_precompiled PRIVATE dynmo_options dynmo::core GTest::gtest)
  target_compile_options(dynmo_test_precompiled PRIVATE ${dynmo_quick_to_compile})
  dynmo_precompile_core(dynmo_test_precompiled)
  target_precompile_headers(dynmo_test_precompiled PRIVATE <gtest/gtest.h>)
endfunction()
