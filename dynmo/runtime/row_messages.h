// SPDX-License-Identifier: Apache-2.0
#pragma once

// Messages between stages if rows have left (model::Hidden::rows). Only one end knows their number.
//
// The first message has a fixed size that both ends know. It has a header with the number of rows,
// and room for some rows. Rows beyond the room are in a second message, on its own tag. The sender
// posts both at once. The receiver posts the second receive when the header has told it the size.
// So the second message passes wherever the first does. A schedule that schedule/check.h has proved
// still completes.
//
// Gradients have their exact size, which both ends know from the forward pass. No gradient is sent
// for zero rows.
//
// A first message has the count (8 bytes), `room` row numbers (4 bytes each), and `room` rows of D
// elements. A second one has numbers and rows of the others.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "dynmo/core/units.h"
#include "dynmo/model/layer.h"

namespace dynmo::runtime {

// The format of a message at a boundary if no row has left.
struct RowFormat {
  std::vector<std::int64_t> shape;  // B, T, D
  at::ScalarType type = at::kFloat;

  [[nodiscard]] std::int64_t tokens() const { return shape[0] * shape[1]; }
  [[nodiscard]] std::int64_t width() const { return shape[2]; }
};

// Returns the room that always suffices for each layer's rows: B x T if it or an earlier layer
// drops rows, else 0. The last layer has 0. The result is empty if no layer drops rows.
[[nodiscard]] std::vector<std::int64_t> whole_room(const model::Model& model,
                                                   const std::vector<std::int64_t>& shape);

[[nodiscard]] Bytes first_bytes(const RowFormat& format, std::int64_t room);
[[nodiscard]] Bytes second_bytes(const RowFormat& format, std::int64_t room, std::int64_t rows);

// Makes the messages of a hidden value in host memory as bytes. The second is undefined if the
// first has room for all rows.
[[nodiscard]] at::Tensor first_message(const RowFormat& format, std::int64_t room,
                                       const model::Hidden& hidden);
[[nodiscard]] at::Tensor second_message(const RowFormat& format, std::int64_t room,
                                        const model::Hidden& hidden);
// Returns the number of rows that the sender of a first message had.
[[nodiscard]] std::int64_t count_in(const at::Tensor& first);
// Returns the hidden value. It has the shape [B, T, D] if no row has left.
[[nodiscard]] model::Hidden unpacked(const RowFormat& format, std::int64_t room,
                                     const at::Tensor& first, const at::Tensor& second);

// Returns the mean number of rows over the micro-batches, or 0 for none.
[[nodiscard]] double mean_rows(const std::vector<std::int64_t>& rows);
[[nodiscard]] Bytes mean_message_bytes(const RowFormat& format, std::int64_t room,
                                       const std::vector<std::int64_t>& rows);

}  // namespace dynmo::runtime
