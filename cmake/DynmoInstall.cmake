# SPDX-License-Identifier: Apache-2.0
# The install tree: the command line, headers, libraries and the package that find_package(dynmo) finds.
include(CMakePackageConfigHelpers)

set(dynmo_package_directory "${CMAKE_INSTALL_LIBDIR}/cmake/dynmo")
set(dynmo_package_targets dynmo_core)
set(dynmo_package_files "${CMAKE_CURRENT_BINARY_DIR}/dynmoConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/dynmoConfigVersion.cmake"
  "${CMAKE_CURRENT_SOURCE_DIR}/cmake/FindSentencePiece.cmake")
if(DYNMO_RUNTIME)
  list(APPEND dynmo_package_targets dynmo_runtime)
  list(APPEND dynmo_package_files "${CMAKE_CURRENT_SOURCE_DIR}/cmake/FindLibTorch.cmake"
    "${CMAKE_CURRENT_SOURCE_DIR}/cmake/TorchVersions.cmake")
endif()

# What Debian's packages divide: the commands, and what others build with.
set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME commands)
install(TARGETS dynmo)
# Hooks for elastic.release_command.
install(PROGRAMS "${CMAKE_CURRENT_SOURCE_DIR}/scripts/release/slurm" "${CMAKE_CURRENT_SOURCE_DIR}/scripts/release/kubernetes"
  DESTINATION "${CMAKE_INSTALL_DATADIR}/dynmo/release")
if(DYNMO_RUNTIME)
  # Where libtorch lies is known at link time only.
  set_target_properties(dynmo_runtime_program PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
  install(TARGETS dynmo_runtime_program RUNTIME DESTINATION "${dynmo_runtime_program_directory}")
endif()
set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME development)
install(TARGETS ${dynmo_package_targets} EXPORT dynmo FILE_SET HEADERS)
# A list that headers include.
install(FILES "${CMAKE_CURRENT_SOURCE_DIR}/dynmo/dynamism/sources.def" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/dynmo/dynamism")
if(DYNMO_RUNTIME)
  install(TARGETS dynmo_gloo_loop EXPORT dynmo OBJECTS DESTINATION "${CMAKE_INSTALL_LIBDIR}/dynmo")
endif()
install(EXPORT dynmo NAMESPACE dynmo:: DESTINATION "${dynmo_package_directory}" FILE dynmoTargets.cmake)

configure_package_config_file("${CMAKE_CURRENT_SOURCE_DIR}/cmake/dynmoConfig.cmake.in" "${CMAKE_CURRENT_BINARY_DIR}/dynmoConfig.cmake"
  INSTALL_DESTINATION "${dynmo_package_directory}")
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/dynmoConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES ${dynmo_package_files} DESTINATION "${dynmo_package_directory}")

# The same for pkg-config, with paths relative to the file.
file(RELATIVE_PATH dynmo_pc_to_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
string(REGEX REPLACE "/$" "" dynmo_pc_to_prefix "${dynmo_pc_to_prefix}")
# Not by SentencePiece's own file, as in FindSentencePiece.cmake.
set(dynmo_pc_sentencepiece "-lsentencepiece -lsentencepiece_train")
cmake_path(GET SentencePiece_LIBRARY PARENT_PATH dynmo_pc_folder)
if(NOT dynmo_pc_folder IN_LIST CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES)
  string(PREPEND dynmo_pc_sentencepiece "-L${dynmo_pc_folder} ")
endif()
configure_file("${CMAKE_CURRENT_SOURCE_DIR}/cmake/dynmo-core.pc.in" "${CMAKE_CURRENT_BINARY_DIR}/dynmo-core.pc" @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/dynmo-core.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")

install(FILES "${CMAKE_CURRENT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT commands)

# A program that leaves this machine has the notices of what headers put into it. Not in share/doc, which small images leave out.
if(DYNMO_RELOCATABLE)
  set(notices "")
  foreach(package libcli11-dev libfmt-dev libprotozero-dev libtomlplusplus-dev nlohmann-json3-dev)
    list(APPEND notices "${package}=/usr/share/doc/${package}/copyright")
  endforeach()
  if(DYNMO_RUNTIME)
    cmake_path(GET LibTorch_DIR_FOUND PARENT_PATH wheels)
    file(GLOB torch_notice "${wheels}/torch-${LibTorch_VERSION}*.dist-info/licenses/LICENSE")
    list(APPEND notices "pytorch=${torch_notice}")
  endif()
  foreach(notice IN LISTS notices)
    string(REGEX MATCH "^([^=]+)=(.*)$" matched "${notice}")
    if(NOT EXISTS "${CMAKE_MATCH_2}")
      message(FATAL_ERROR "DYNMO_RELOCATABLE wants the notice of ${CMAKE_MATCH_1}, '${CMAKE_MATCH_2}', which is not there: install it with its documentation")
    endif()
    install(FILES "${CMAKE_MATCH_2}" DESTINATION "${CMAKE_INSTALL_DATADIR}/dynmo/licences" RENAME "${CMAKE_MATCH_1}" COMPONENT commands)
  endforeach()
endif()

# `cpack`: dynmo-VERSION-linux-x86_64.tar.gz, which may be unpacked anywhere.
string(TOLOWER "${PROJECT_NAME}-${PROJECT_VERSION}-${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR}" CPACK_PACKAGE_FILE_NAME)
set(CPACK_GENERATOR TGZ)
set(CPACK_PACKAGE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/packages")
set(CPACK_RESOURCE_FILE_LICENSE "${CMAKE_CURRENT_SOURCE_DIR}/LICENSE")
set(CPACK_STRIP_FILES ON)
if(DYNMO_RUNTIME)
  # An archive names no folder of this machine: `dynmo` finds libtorch where it is unpacked.
  set(CPACK_PRE_BUILD_SCRIPTS "${CMAKE_CURRENT_BINARY_DIR}/remove_rpath.cmake")
  file(CONFIGURE OUTPUT "${CPACK_PRE_BUILD_SCRIPTS}" @ONLY CONTENT [[
file(GLOB_RECURSE programs "${CPACK_TEMPORARY_DIRECTORY}/dynmo-runtime")
foreach(program IN LISTS programs)
  file(RPATH_REMOVE FILE "${program}")
endforeach()
]])
endif()
include(DynmoDebian)
include(CPack)
