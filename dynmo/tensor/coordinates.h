// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads coordinate files (.tns, as FROSTT distributes them): a line for each entry, its indices
// from 1 and its value, between blanks. Lines that begin with # are comments. The sizes of the
// modes may stand in front, alone or after a line with their number; without them a mode is as
// large as its largest index.

#include <filesystem>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::tensor {

enum class Values { kDropped, kKept };

// Takes any bytes. kBadInput names `origin`, the line and the fault: not as many numbers as in the
// lines before, an index that is 0, beyond its declared size or above kMaxSize, a value above 1e100
// or NaN, more than kMaxOrder modes, no entry at all.
[[nodiscard]] Expected<SparseTensor> parse_coordinates(std::string_view text,
                                                       std::string_view origin,
                                                       Values values = Values::kDropped);
// Reads the file in pieces, so that memory holds the entries only.
[[nodiscard]] Expected<SparseTensor> read_coordinates(const std::filesystem::path& path,
                                                      Values values = Values::kDropped);

}  // namespace dynmo::tensor
