// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/sparse_products.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/cost/product_fit.h"
#include "dynmo/kernels/parallel_impl.h"

namespace dynmo::kernels::sparse {
namespace {

static_assert(kBlock == cost::kSegment, "segments as costs count them");

std::int64_t parts(std::int64_t size, std::int64_t part) { return (size + part - 1) / part; }

// The kept places row by row, in the given order.
struct Places {
  std::int64_t rows;
  std::int64_t columns;
  std::vector<std::int32_t> starts;  // of each row's weights; rows + 1
  std::vector<std::int32_t> column;  // of each weight, ascending inside a row
  std::vector<std::int32_t> place;   // of each weight, among the values
};

// Returns the places of the transposed matrix.
Places transposed(const Places& from) {
  Places result{.rows = from.columns,
                .columns = from.rows,
                .starts = std::vector<std::int32_t>(static_cast<std::size_t>(from.columns) + 1),
                .column = std::vector<std::int32_t>(from.column.size()),
                .place = std::vector<std::int32_t>(from.column.size())};
  for (const std::int32_t column : from.column) ++result.starts[static_cast<std::size_t>(column)];
  // Converts counts to the ends of the rows. Filling backwards then leaves their starts.
  std::int32_t sum = 0;
  for (std::int32_t& start : result.starts) start = sum += start;
  for (std::int64_t row = from.rows; row-- > 0;) {
    const auto r = static_cast<std::size_t>(row);
    for (std::int32_t k = from.starts[r + 1]; k-- > from.starts[r];) {
      const auto column = static_cast<std::size_t>(from.column[static_cast<std::size_t>(k)]);
      const auto to = static_cast<std::size_t>(--result.starts[column]);
      result.column[to] = static_cast<std::int32_t>(row);
      result.place[to] = from.place[static_cast<std::size_t>(k)];
    }
  }
  return result;
}

// The weights of a row in a block of columns.
struct Run {
  Segment segment;
  std::int32_t begin;  // of its weights, in the order of Places
};

void append_cell(const Places& from, std::int64_t block, std::vector<Run>& runs, Index& index) {
  std::stable_sort(runs.begin(), runs.end(),
                   [](const Run& a, const Run& b) { return a.segment.count > b.segment.count; });
  for (const Run& run : runs) {
    index.segments.push_back(run.segment);
    for (std::int32_t i = run.begin; i < run.begin + run.segment.count; ++i) {
      const auto k = static_cast<std::size_t>(i);
      index.column.push_back(static_cast<std::uint8_t>(from.column[k] - block));
      index.place.push_back(from.place[k]);
    }
  }
}

Index make_index(const Places& from) {
  static_assert(kBlock <= 256 && kGroup <= 65536, "columns are bytes, rows two bytes");
  Index index{.rows = from.rows,
              .columns = from.columns,
              .cells = {},
              .segments = {},
              .column = {},
              .place = {}};
  index.column.reserve(from.column.size());
  index.place.reserve(from.place.size());
  const auto begin_cell = [&] {
    index.cells.push_back({.segment = static_cast<std::int32_t>(index.segments.size()),
                           .weight = static_cast<std::int32_t>(index.place.size())});
  };
  for (std::int64_t group = 0; group < from.rows; group += kGroup) {
    const auto rows = static_cast<std::size_t>(std::min(kGroup, from.rows - group));
    const std::int32_t* ends = from.starts.data() + group + 1;
    // For each row, the first weight that is not in an earlier block.
    std::vector<std::int32_t> begins(ends - 1, ends - 1 + rows);
    for (std::int64_t block = 0; block < from.columns; block += kBlock) {
      begin_cell();
      std::vector<Run> runs;
      for (std::size_t row = 0; row < rows; ++row) {
        std::int32_t end = begins[row];
        while (end < ends[row] && from.column[static_cast<std::size_t>(end)] < block + kBlock) {
          ++end;
        }
        const std::int32_t begin = std::exchange(begins[row], end);
        if (begin == end) continue;
        runs.push_back({.segment = {.row = static_cast<std::uint16_t>(row),
                                    .count = static_cast<std::uint16_t>(end - begin)},
                        .begin = begin});
      }
      append_cell(from, block, runs, index);
    }
  }
  begin_cell();
  return index;
}

std::span<const Segment> segments_of(const Index& index, std::size_t cell) {
  return {index.segments.data() + index.cells[cell].segment,
          index.segments.data() + index.cells[cell + 1].segment};
}

template <typename T>
std::int64_t bytes_of(const std::vector<T>& vector) {
  return static_cast<std::int64_t>(vector.size() * sizeof(T));
}
std::int64_t bytes_of(const Index& index) {
  return bytes_of(index.cells) + bytes_of(index.segments) + bytes_of(index.column) +
         bytes_of(index.place);
}

// Plain rows that lie `stride` apart.
template <typename E>
struct Rows {
  explicit Rows(const at::Tensor& x)
      : tensor(x.stride(1) == 1 || x.size(1) <= 1 ? x : x.contiguous()),
        data(tensor.const_data_ptr<E>()),
        stride(tensor.stride(0)),
        tokens(x.size(0)),
        width(x.size(1)) {}
  at::Tensor tensor;
  const E* data;
  std::int64_t stride;
  std::int64_t tokens;
  std::int64_t width;
};

template <typename E>
std::int64_t tokens_of(const Rows<E>& x, std::int64_t tile) {
  return std::min(kTile<E>, x.tokens - tile * kTile<E>);
}

struct Columns {
  std::int64_t begin;
  std::int64_t count;  // at most
};

template <typename E>
void load(const Kernels<E>& kernel, const Rows<E>& x, std::int64_t tile, Columns columns, E* to) {
  kernel.load_tile(x.data + tile * kTile<E> * x.stride + columns.begin, x.stride,
                   tokens_of(x, tile), std::min(columns.count, x.width - columns.begin), to);
}

constexpr std::int64_t kGrain = 1 << 13;  // minimum weights that a thread copies

// Returns the values in the order of the index.
template <typename E>
at::Tensor packed(const Index& index, const at::Tensor& values) {
  at::Tensor result = at::empty_like(values);
  const E* const from = values.const_data_ptr<E>();
  const std::int32_t* const place = index.place.data();
  E* const to = result.data_ptr<E>();
  at::parallel_for(0, values.numel(), kGrain, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) to[k] = from[place[k]];
  });
  return result;
}

enum class Store { kSet, kAdd };

// Computes y = x A^T or y += x A^T for the matrix A of the index. A thread handles one tile of
// tokens and one group of A's rows at a time. It loads a tile once for all its groups.
template <typename E>
void multiply(const Index& index, const at::Tensor& values, const at::Tensor& x_ND,
              at::Tensor& y_NR, Store store, InstructionSet set) {
  const Kernels<E>& kernel = kernels<E>(set);
  const Rows<E> x(x_ND);
  const at::Tensor packed_values = packed<E>(index, values);
  const E* const value = packed_values.const_data_ptr<E>();
  E* const y = y_NR.data_ptr<E>();
  const std::int64_t stride = y_NR.stride(0);
  const std::int64_t groups = parts(index.rows, kGroup);
  const std::int64_t blocks = parts(index.columns, kBlock);
  const auto put = store == Store::kSet ? kernel.store_tile : kernel.add_tile;
  at::parallel_for(
      0, parts(x.tokens, kTile<E>) * groups, 1, [&](std::int64_t begin, std::int64_t end) {
        const at::Tensor scratch =
            at::empty({(index.columns + std::min(kGroup, index.rows)) * kTile<E>}, x_ND.options());
        E* const x_tile = scratch.data_ptr<E>();
        E* const y_tile = x_tile + index.columns * kTile<E>;
        for (std::int64_t i = begin; i < end; ++i) {
          const std::int64_t tile = i / groups;
          const std::int64_t group = i % groups;
          const std::int64_t rows = std::min(kGroup, index.rows - group * kGroup);
          if (i == begin || group == 0) load(kernel, x, tile, {0, x.width}, x_tile);
          std::fill_n(y_tile, rows * kTile<E>, E(0));
          for (std::int64_t block = 0; block < blocks; ++block) {
            const auto cell = static_cast<std::size_t>(group * blocks + block);
            const std::int32_t weight = index.cells[cell].weight;
            kernel.add_times(segments_of(index, cell), index.column.data() + weight, value + weight,
                             x_tile + block * kBlock * kTile<E>, y_tile);
          }
          put(y_tile, tokens_of(x, tile), rows, y + tile * kTile<E> * stride + group * kGroup,
              stride);
        }
      });
}

// Adds sum_N(dy x) for each kept weight. A thread handles a row of cells, and the whole sums of
// their weights. It transposes the needed part of a tile itself just before use, so that the part
// is in its cache and no thread waits.
template <typename E>
void add_dots(const Index& index, at::Tensor& gradient, const at::Tensor& dy_NO,
              const at::Tensor& x_NI, InstructionSet set) {
  const Kernels<E>& kernel = kernels<E>(set);
  const Rows<E> dy(dy_NO);
  const Rows<E> x(x_NI);
  at::Tensor sums = at::empty_like(gradient);
  E* const sum = sums.data_ptr<E>();
  E* const to = gradient.data_ptr<E>();
  const std::int64_t blocks = parts(index.columns, kBlock);
  const std::int64_t tiles = parts(x.tokens, kTile<E>);
  const auto cells = static_cast<std::int64_t>(index.cells.size()) - 1;
  const auto first_weight = [&](std::int64_t cell) {
    return index.cells[static_cast<std::size_t>(cell)].weight;
  };
  at::parallel_for(0, cells, 1, [&](std::int64_t begin, std::int64_t end) {
    const at::Tensor scratch =
        at::empty({(index.columns + std::min(kGroup, index.rows)) * kTile<E>}, x_NI.options());
    E* const x_tile = scratch.data_ptr<E>();
    E* const dy_tile = x_tile + index.columns * kTile<E>;
    std::fill(sum + first_weight(begin), sum + first_weight(end), E(0));
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t row = i / blocks * kGroup;
        const std::int64_t column = i % blocks * kBlock;
        E* const x_block = x_tile + column * kTile<E>;
        if (i == begin || column == 0) load(kernel, dy, tile, {row, kGroup}, dy_tile);
        if (i - begin < blocks) load(kernel, x, tile, {column, kBlock}, x_block);
        const std::int32_t weight = first_weight(i);
        kernel.add_dots(segments_of(index, static_cast<std::size_t>(i)),
                        index.column.data() + weight, dy_tile, x_block, sum + weight);
      }
    }
    for (std::int32_t k = first_weight(begin); k < first_weight(end); ++k) {
      to[index.place[static_cast<std::size_t>(k)]] += sum[k];
    }
  });
}

// Calls the function with a float or a double, by the tensors' type.
template <typename Function>
void for_type(const at::Tensor& x, Function function) {
  DYNMO_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble,
              "activations of fp32 or fp64, got {}", at::toString(x.scalar_type()));
  if (x.scalar_type() == at::kFloat) {
    function(float());
  } else {
    function(double());
  }
}

void check_matrix(const at::Tensor& x, std::int64_t width) {
  DYNMO_CHECK(x.is_cpu() && x.dim() == 2 && x.size(1) == width, "[N, {}] on the CPU, got [{}]",
              width, fmt::join(x.sizes(), ", "));
}
void check_values(const Pattern& pattern, const at::Tensor& values, const at::Tensor& x) {
  DYNMO_CHECK(values.is_cpu() && values.is_contiguous() && values.numel() == pattern.kept() &&
                  values.scalar_type() == x.scalar_type(),
              "{} values of type {}, got {} of {}", pattern.kept(), at::toString(x.scalar_type()),
              values.numel(), at::toString(values.scalar_type()));
}

void multiply_transposed(const Pattern& pattern, const at::Tensor& values, const at::Tensor& y_NO,
                         at::Tensor& sum_NI, Store store, InstructionSet set) {
  check_matrix(y_NO, pattern.rows());
  check_values(pattern, values, y_NO);
  for_type(y_NO, [&]<typename E>(E) {
    multiply<E>(pattern.by_column, values, y_NO, sum_NI, store, set);
  });
}

}  // namespace

double Pattern::density() const {
  const auto all = static_cast<double>(rows() * columns());
  return all > 0 ? static_cast<double>(kept()) / all : 1;
}

std::vector<std::int64_t> Pattern::offsets() const {
  std::vector<std::int64_t> result(by_row.place.size());
  const std::int64_t blocks = parts(columns(), kBlock);
  std::size_t k = 0;
  for (std::size_t cell = 0; cell + 1 < by_row.cells.size(); ++cell) {
    const auto i = static_cast<std::int64_t>(cell);
    for (const Segment& segment : segments_of(by_row, cell)) {
      const std::int64_t row = i / blocks * kGroup + segment.row;
      for (const std::size_t end = k + segment.count; k < end; ++k) {
        result[static_cast<std::size_t>(by_row.place[k])] =
            row * columns() + i % blocks * kBlock + by_row.column[k];
      }
    }
  }
  return result;
}

Bytes Pattern::bytes() const { return Bytes{bytes_of(by_row) + bytes_of(by_column)}; }

std::shared_ptr<const Pattern> make_pattern(std::int64_t rows, std::int64_t columns,
                                            std::span<const std::int32_t> offsets) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  DYNMO_CHECK(rows >= 0 && columns >= 0 && rows < kMost && columns < kMost &&
                  std::cmp_less(offsets.size(), kMost),
              "sizes below 2^31, got {} x {}, {} kept", rows, columns, offsets.size());
  Places places{.rows = rows, .columns = columns, .starts = {}, .column = {}, .place = {}};
  places.starts.assign(static_cast<std::size_t>(rows) + 1, 0);
  places.column.reserve(offsets.size());
  std::int64_t before = -1;
  for (const std::int64_t offset : offsets) {
    DYNMO_CHECK(offset > before && offset < rows * columns,
                "ascending offsets below {}, got {} after {}", rows * columns, offset, before);
    before = offset;
    ++places.starts[static_cast<std::size_t>(offset / columns) + 1];
    places.column.push_back(static_cast<std::int32_t>(offset % columns));
  }
  std::partial_sum(places.starts.begin(), places.starts.end(), places.starts.begin());
  places.place.resize(offsets.size());
  std::iota(places.place.begin(), places.place.end(), 0);
  return std::make_shared<const Pattern>(
      Pattern{.by_row = make_index(places), .by_column = make_index(transposed(places))});
}

std::shared_ptr<const Pattern> make_pattern(const at::Tensor& mask_OI) {
  DYNMO_CHECK(mask_OI.dim() == 2, "a mask [O, I], got {} dimensions", mask_OI.dim());
  const at::Tensor offsets = at::flatten(mask_OI).nonzero().flatten().to(at::kCPU, at::kInt);
  return make_pattern(mask_OI.size(0), mask_OI.size(1),
                      {offsets.const_data_ptr<std::int32_t>(), std::size_t(offsets.numel())});
}

at::Tensor times(const Pattern& pattern, const at::Tensor& values, const at::Tensor& x_NI,
                 InstructionSet set) {
  check_matrix(x_NI, pattern.columns());
  check_values(pattern, values, x_NI);
  at::Tensor y_NO = at::empty({x_NI.size(0), pattern.rows()}, x_NI.options());
  for_type(x_NI, [&]<typename E>(E) {
    multiply<E>(pattern.by_row, values, x_NI, y_NO, Store::kSet, set);
  });
  return y_NO;
}

at::Tensor times_transposed(const Pattern& pattern, const at::Tensor& values,
                            const at::Tensor& y_NO, InstructionSet set) {
  at::Tensor result = at::empty({y_NO.size(0), pattern.columns()}, y_NO.options());
  multiply_transposed(pattern, values, y_NO, result, Store::kSet, set);
  return result;
}

void add_times_transposed(at::Tensor& sum_NI, const Pattern& pattern, const at::Tensor& values,
                          const at::Tensor& y_NO, InstructionSet set) {
  check_matrix(sum_NI, pattern.columns());
  DYNMO_CHECK(sum_NI.size(0) == y_NO.size(0) && sum_NI.scalar_type() == y_NO.scalar_type() &&
                  (sum_NI.stride(1) == 1 || sum_NI.size(1) <= 1),
              "a sum of {} contiguous rows, got {}", y_NO.size(0), sum_NI.size(0));
  multiply_transposed(pattern, values, y_NO, sum_NI, Store::kAdd, set);
}

void add_product(const Pattern& pattern, at::Tensor& gradient, const at::Tensor& dy_NO,
                 const at::Tensor& x_NI, InstructionSet set) {
  check_matrix(dy_NO, pattern.rows());
  check_matrix(x_NI, pattern.columns());
  check_values(pattern, gradient, x_NI);
  DYNMO_CHECK(dy_NO.size(0) == x_NI.size(0) && dy_NO.scalar_type() == x_NI.scalar_type(),
              "{} tokens and one type, got {} tokens", x_NI.size(0), dy_NO.size(0));
  for_type(x_NI, [&]<typename E>(E) { add_dots<E>(pattern.by_row, gradient, dy_NO, x_NI, set); });
}

}  // namespace dynmo::kernels::sparse
