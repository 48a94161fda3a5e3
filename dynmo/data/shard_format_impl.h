// SPDX-License-Identifier: Apache-2.0
#pragma once

// The fixed part of a token index. The arrays follow: int32 sizes[sequences], int64
// pointers[sequences], int64 boundaries[documents].

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace dynmo::data {

inline constexpr std::string_view kIndexMagic{"MMIDIDX\0\0", 9};
inline constexpr std::uint64_t kIndexVersion = 1;
inline constexpr std::size_t kVersionOffset = 9;
inline constexpr std::size_t kTypeOffset = 17;
inline constexpr std::size_t kSequencesOffset = 18;
inline constexpr std::size_t kDocumentsOffset = 26;  // entries of boundaries[]: documents + 1
inline constexpr std::size_t kIndexHeaderBytes = 34;

}  // namespace dynmo::data
