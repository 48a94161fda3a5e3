// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <filesystem>
#include <new>
#include <stdexcept>

#include "dynmo/core/expected.h"

namespace dynmo {
namespace {

TEST(ErrorOf, MissingMemoryIsTheUsersToChange) {
  const std::runtime_error libtorch(
      "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
      "you tried to allocate 33554432 bytes. Error code 12 (Cannot allocate memory)\nframe #0: "
      "...");
  const std::bad_alloc no_memory;
  const std::length_error too_long("vector::reserve");
  for (const std::exception* fault :
       std::initializer_list<const std::exception*>{&no_memory, &too_long, &libtorch}) {
    const Error error = error_of(*fault);
    EXPECT_EQ(error.code, ErrorCode::kBadInput);
    EXPECT_TRUE(error.message.starts_with("out of memory")) << error.message;
    EXPECT_NE(error.message.find("ulimit -v"), std::string::npos) << error.message;
    EXPECT_EQ(error.message.find("frame #0"), std::string::npos) << error.message;
  }
  EXPECT_NE(error_of(libtorch).message.find("33554432 bytes"), std::string::npos);
}

TEST(ErrorOf, ARefusedPathIsBadInput) {
  const std::filesystem::filesystem_error fault(
      "cannot resolve", "loop", std::make_error_code(std::errc::too_many_symbolic_link_levels));
  EXPECT_EQ(error_of(fault).code, ErrorCode::kBadInput);
}

TEST(ErrorOf, AThreadThatCannotStartNamesTheLimits) {
  const std::system_error fault(std::make_error_code(std::errc::resource_unavailable_try_again));
  EXPECT_EQ(error_of(fault).code, ErrorCode::kBadInput);
  EXPECT_NE(error_of(fault).message.find("ulimit -u"), std::string::npos);
}

TEST(ErrorOf, AnythingElseIsInternal) {
  EXPECT_EQ(error_of(std::runtime_error("odd\nline 2")), (Error{ErrorCode::kInternal, "odd"}));
}

}  // namespace
}  // namespace dynmo
