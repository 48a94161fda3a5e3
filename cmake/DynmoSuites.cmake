# SPDX-License-Identifier: Apache-2.0
# cmake -D PROGRAM=PATH -D NAME=NAME -D EACH=suite|test -D OUT=FILE -D PROPERTIES=LIST -P DynmoSuites.cmake
#
# Writes for ctest a test for each suite of the GoogleTest program PROGRAM, named NAME.SUITE, or for each of its tests, named
# NAME.SUITE.TEST. Each is a process.
cmake_minimum_required(VERSION 3.25)
execute_process(COMMAND "${PROGRAM}" --gtest_list_tests OUTPUT_VARIABLE listed ERROR_VARIABLE said RESULT_VARIABLE code TIMEOUT 60)
if(NOT code STREQUAL "0")
  message(FATAL_ERROR "${PROGRAM} --gtest_list_tests ended with ${code}:\n${listed}${said}")
endif()
string(REGEX REPLACE " +#[^\n]*" "" listed "${listed}")  # types and values of parameters
string(REGEX MATCHALL "[^\n]+" lines "${listed}")
# All that ran was skipped. (CMake's `$` is the end of the output, so nothing has failed.)
set(skipped "  PASSED  . 0 tests[.]\n.  SKIPPED . [0-9]+ tests?, listed below:\n([^\n]+\n)+$")
set(tests "")
macro(add name filter)
  string(APPEND tests "add_test([=[${NAME}.${name}]=] [=[${PROGRAM}]=] [=[--gtest_filter=${filter}]=])\n"
    "set_tests_properties([=[${NAME}.${name}]=] PROPERTIES SKIP_REGULAR_EXPRESSION [=[${skipped}]=] ${PROPERTIES})\n")
endmacro()
foreach(line IN LISTS lines)
  if(line MATCHES "^([^ ]+)[.]$")
    set(suite "${CMAKE_MATCH_1}")
    if(EACH STREQUAL "suite")
      add("${suite}" "${suite}.*")
    endif()
  elseif(EACH STREQUAL "test" AND line MATCHES "^  ([^ ]+)$")
    add("${suite}.${CMAKE_MATCH_1}" "${suite}.${CMAKE_MATCH_1}")
  endif()
endforeach()
if(NOT tests)
  message(FATAL_ERROR "${PROGRAM} has no tests:\n${listed}")
endif()
file(WRITE "${OUT}" "${tests}")
