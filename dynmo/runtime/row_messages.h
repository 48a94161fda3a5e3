// SPDX-License-Identifier: Apache-2.0
#pragma once

// Messages between stages where rows have left (model::Hidden::rows), so that how many there are is
// known at one end alone.
//
// The first message has a fixed size that both ends know beforehand: a header with the number of
// rows, and room for so many of them. Rows that it has no room for are in a second one, on a tag of
// its own. The sender posts both at once; the receiver posts the second receive when the header has
// told it the size. So wherever the first message passes the second one does, and a schedule that
// schedule/check.h has proved still runs to its end. Gradients go back at exact size: both ends
// know it from the pass forward. No gradient is sent for zero rows.
//
// A first message: the count (8 bytes), `room` row numbers (4 bytes each), `room` rows of D
// elements. A second one: numbers and rows of the others.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "dynmo/core/units.h"
#include "dynmo/model/layer.h"

namespace dynmo::runtime {

// The format of a message at a boundary where no row has left.
struct RowFormat {
  std::vector<std::int64_t> shape;  // B, T, D
  at::ScalarType type = at::kFloat;

  [[nodiscard]] std::int64_t tokens() const { return shape[0] * shape[1]; }
  [[nodiscard]] std::int64_t width() const { return shape[2]; }
};

// For each layer: the whole B x T behind layers that have one before them, or are one, which drops
// rows; 0 behind the others and the last one. Empty where no layer of the model drops rows.
[[nodiscard]] std::vector<std::int64_t> whole_room(const model::Model& model,
                                                   const std::vector<std::int64_t>& shape);

[[nodiscard]] Bytes first_bytes(const RowFormat& format, std::int64_t room);
[[nodiscard]] Bytes second_bytes(const RowFormat& format, std::int64_t room, std::int64_t rows);

// The two messages of a hidden value in host memory, as bytes. The second is undefined where the
// first has room for all.
[[nodiscard]] at::Tensor first_message(const RowFormat& format, std::int64_t room,
                                       const model::Hidden& hidden);
[[nodiscard]] at::Tensor second_message(const RowFormat& format, std::int64_t room,
                                        const model::Hidden& hidden);
// How many rows the sender of a first message had.
[[nodiscard]] std::int64_t count_in(const at::Tensor& first);
// The hidden value again; whole, [B, T, D], where all rows are there.
[[nodiscard]] model::Hidden unpacked(const RowFormat& format, std::int64_t room,
                                     const at::Tensor& first, const at::Tensor& second);

// Returns the mean rows of several micro-batches.
[[nodiscard]] double mean_rows(const std::vector<std::int64_t>& rows);
[[nodiscard]] Bytes mean_message_bytes(const RowFormat& format, std::int64_t room,
                                       const std::vector<std::int64_t>& rows);

}  // namespace dynmo::runtime
