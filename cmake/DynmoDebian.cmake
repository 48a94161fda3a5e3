# SPDX-License-Identifier: Apache-2.0
# `cpack -G DEB`: dynmo_VERSION_amd64.deb has the commands, libdynmo-dev_VERSION_amd64.deb what others build with.
set(CPACK_COMPONENTS_ALL commands development)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
# A tagged release wants an address that a person reads (scripts/package).
set(CPACK_PACKAGE_CONTACT "The DynMo developers <dynmo@packages.invalid>")
set(CPACK_DEBIAN_COMMANDS_PACKAGE_NAME dynmo)
set(CPACK_DEBIAN_COMMANDS_PACKAGE_SECTION science)
set(CPACK_DEBIAN_COMMANDS_PACKAGE_SHLIBDEPS ON)
if(DYNMO_RUNTIME)
  # It finds libtorch as `dynmo` does; no package of Debian has that version.
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${LibTorch_DIR_FOUND}/lib")
  set(dynmo_debian_training "Training also needs PyTorch ${LibTorch_SERIES}: pip install torch==${LibTorch_SERIES}.*")
else()
  set(dynmo_debian_training "Training needs a DynMo that was built with PyTorch's C++ library.")
endif()
set(CPACK_COMPONENT_COMMANDS_DESCRIPTION "Balanced pipelines for dynamic language models
Plans, simulates and reports pipelines of ranks without GPU or PyTorch.
${dynmo_debian_training}")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libdynmo-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
string(CONCAT CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "libfmt-dev, libpcre2-dev, libsentencepiece-dev, libtomlplusplus-dev, "
  "libutf8proc-dev, libxxhash-dev, libzstd-dev, nlohmann-json3-dev, zlib1g-dev")
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION "Headers and libraries of DynMo
Static libraries, headers, CMake package and pkg-config file of the planner
and simulator, and of trainings where PyTorch is installed.")

# Debian's policy wants these of every package, in the folder of its name.
find_program(GZIP gzip REQUIRED)
set(dynmo_debian "${CMAKE_CURRENT_BINARY_DIR}/debian")
file(CONFIGURE OUTPUT "${dynmo_debian}/copyright" @ONLY CONTENT [[
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: DynMo

Files: *
Copyright: The DynMo developers
License: Apache-2.0
 On Debian systems, the text of the license is in
 /usr/share/common-licenses/Apache-2.0.
]])
string(TIMESTAMP dynmo_debian_date "%a, %d %b %Y %H:%M:%S +0000" UTC)  # SOURCE_DATE_EPOCH, if it is set
file(CONFIGURE OUTPUT "${dynmo_debian}/changelog" @ONLY CONTENT [[
dynmo (@PROJECT_VERSION@) unstable; urgency=medium

  * CHANGELOG.md of the source archive says what is new.

 -- @CPACK_PACKAGE_CONTACT@  @dynmo_debian_date@
]])
execute_process(COMMAND "${GZIP}" -9nkf "${dynmo_debian}/changelog" COMMAND_ERROR_IS_FATAL ANY)
foreach(component IN LISTS CPACK_COMPONENTS_ALL)
  string(TOUPPER "${component}" upper)
  install(FILES "${dynmo_debian}/copyright" "${dynmo_debian}/changelog.gz"
    DESTINATION "${CMAKE_INSTALL_DATADIR}/doc/${CPACK_DEBIAN_${upper}_PACKAGE_NAME}" COMPONENT ${component} EXCLUDE_FROM_ALL)
endforeach()
