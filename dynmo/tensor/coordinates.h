// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads coordinate files (.tns, as FROSTT distributes them). Each entry has a line with its indices
// from 1 and its value, separated by blanks. Lines that begin with # are comments.
//
// The sizes of the modes may come first, alone or after a line with their number. Without them a
// mode is as large as its largest index.

#include <filesystem>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::tensor {

enum class Values { kDropped, kKept };

// Parses any bytes.
//
// Fails with kBadInput, which names `origin`, the line and the fault. Faults of numbers are a
// different count than in earlier lines, a value above 1e100 or NaN, and more than kMaxOrder modes.
// Faults of an index are 0, a number beyond its declared size, and one above kMaxSize. A text
// without entries is a fault, too.
[[nodiscard]] Expected<SparseTensor> parse_coordinates(std::string_view text,
                                                       std::string_view origin,
                                                       Values values = Values::kDropped);
// Reads a file in pieces, so memory holds only the entries.
[[nodiscard]] Expected<SparseTensor> read_coordinates(const std::filesystem::path& path,
                                                      Values values = Values::kDropped);

}  // namespace dynmo::tensor
