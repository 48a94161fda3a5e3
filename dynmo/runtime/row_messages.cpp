// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/row_messages.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <numeric>

#include "dynmo/core/check.h"

namespace dynmo::runtime {
namespace {

constexpr std::int64_t kHeader = sizeof(std::int64_t);

std::int64_t value_bytes(const RowFormat& format) {
  return format.width() * static_cast<std::int64_t>(c10::elementSize(format.type));
}

std::int64_t row_bytes(const RowFormat& format) {
  return static_cast<std::int64_t>(sizeof(std::int32_t)) + value_bytes(format);
}

std::byte* bytes_at(const at::Tensor& tensor, std::int64_t offset) {
  return static_cast<std::byte*>(tensor.data_ptr()) + offset;
}

void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

at::Tensor byte_tensor(std::int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
}

struct Rows {
  at::Tensor numbers;
  at::Tensor values;
};

Rows rows_of(const RowFormat& format, const model::Hidden& hidden) {
  Rows rows{.numbers = hidden.rows, .values = hidden.x.contiguous()};
  if (!rows.numbers.defined()) rows.numbers = at::arange(format.tokens(), at::kInt);
  const std::int64_t count = rows.numbers.numel();
  DYNMO_CHECK(rows.values.is_cpu() && rows.values.scalar_type() == format.type &&
                  rows.values.numel() == count * format.width(),
              "{} rows of {} elements, got {} elements", count, format.width(),
              rows.values.numel());
  return rows;
}

// Writes rows `first` to `first` + `count`, with their numbers, in the format of a message with
// `room` rows.
void put(const RowFormat& format, const Rows& rows, std::int64_t first, std::int64_t count,
         std::int64_t room, std::byte* to) {
  constexpr std::int64_t kNumber = sizeof(std::int32_t);
  copy_bytes(to, bytes_at(rows.numbers, first * kNumber), count * kNumber);
  copy_bytes(to + room * kNumber, bytes_at(rows.values, first * value_bytes(format)),
             count * value_bytes(format));
}

void get(const RowFormat& format, const std::byte* from, std::int64_t room, std::int64_t first,
         std::int64_t count, const Rows& rows) {
  constexpr std::int64_t kNumber = sizeof(std::int32_t);
  copy_bytes(bytes_at(rows.numbers, first * kNumber), from, count * kNumber);
  copy_bytes(bytes_at(rows.values, first * value_bytes(format)), from + room * kNumber,
             count * value_bytes(format));
}

}  // namespace

std::vector<std::int64_t> whole_room(const model::Model& model,
                                     const std::vector<std::int64_t>& shape) {
  if (!model::drops_rows(model)) return {};
  DYNMO_CHECK(shape.size() == 3, "boundaries of B x T x D, got {} dimensions", shape.size());
  std::vector<std::int64_t> room(model.size(), 0);
  bool drops = false;
  for (std::size_t i = 0; i + 1 < model.size(); ++i) {
    drops = drops || model[i]->needs().drops_rows;
    if (drops) room[i] = shape[0] * shape[1];
  }
  return room;
}

Bytes first_bytes(const RowFormat& format, std::int64_t room) {
  return Bytes{kHeader + room * row_bytes(format)};
}

Bytes second_bytes(const RowFormat& format, std::int64_t room, std::int64_t rows) {
  return Bytes{std::max<std::int64_t>(0, rows - room) * row_bytes(format)};
}

at::Tensor first_message(const RowFormat& format, std::int64_t room, const model::Hidden& hidden) {
  const Rows rows = rows_of(format, hidden);
  const std::int64_t count = rows.numbers.numel();
  const at::Tensor message = byte_tensor(first_bytes(format, room).value);
  message.zero_();
  std::memcpy(bytes_at(message, 0), &count, sizeof count);
  put(format, rows, 0, std::min(count, room), room, bytes_at(message, kHeader));
  return message;
}

at::Tensor second_message(const RowFormat& format, std::int64_t room, const model::Hidden& hidden) {
  const std::int64_t count = hidden.rows.defined() ? hidden.rows.numel() : format.tokens();
  if (count <= room) return {};
  const at::Tensor message = byte_tensor(second_bytes(format, room, count).value);
  put(format, rows_of(format, hidden), room, count - room, count - room, bytes_at(message, 0));
  return message;
}

std::int64_t count_in(const at::Tensor& first) {
  std::int64_t count = 0;
  std::memcpy(&count, bytes_at(first, 0), sizeof count);
  return count;
}

model::Hidden unpacked(const RowFormat& format, std::int64_t room, const at::Tensor& first,
                       const at::Tensor& second) {
  const std::int64_t count = count_in(first);
  const std::int64_t in_first = std::min(count, room);
  const Rows rows{.numbers = at::empty({count}, at::kInt),
                  .values = at::empty({count, format.width()}, format.type)};
  get(format, bytes_at(first, kHeader), room, 0, in_first, rows);
  if (count > in_first) {
    get(format, bytes_at(second, 0), count - in_first, in_first, count - in_first, rows);
  }
  if (count == format.tokens()) return rows.values.view(format.shape);
  return {rows.values, rows.numbers};
}

double mean_rows(const std::vector<std::int64_t>& rows) {
  if (rows.empty()) return 0;
  const auto sum = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  return static_cast<double>(sum) / static_cast<double>(rows.size());
}

Bytes mean_message_bytes(const RowFormat& format, std::int64_t room,
                         const std::vector<std::int64_t>& rows) {
  if (rows.empty()) return {};
  double sum = 0;
  for (const std::int64_t count : rows) {
    sum +=
        static_cast<double>((first_bytes(format, room) + second_bytes(format, room, count)).value);
  }
  return Bytes{std::llround(sum / static_cast<double>(rows.size()))};
}

}  // namespace dynmo::runtime
