// SPDX-License-Identifier: Apache-2.0
// Attention on the rows that a pattern chose (attention_pattern.h). The rows of a section are
// brought together in memory of their own, worked on there and put back, a section after the other:
// what is made on the way stays in the cache, and no tensor of the size of all rows is made.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/model/attention_blocks_impl.h"
#include "dynmo/model/attention_impl.h"
#include "dynmo/model/attention_pattern.h"

namespace dynmo::model {
namespace {

using at::Tensor;
using blocks::Head;
using blocks::Scratch;
using blocks::Section;
using blocks::Sizes;

// Of the squares of a query whose key is x / |x|: keeps 0 at 0.
constexpr double kLeast = 1e-12;

const std::int64_t* numbers(const Tensor& x) { return x.const_data_ptr<std::int64_t>(); }

RaggedRows ragged_rows(const Tensor& q_BTHK, const Tensor& chosen, const Tensor& offsets) {
  const std::int64_t tokens = q_BTHK.size(1);
  const std::int64_t heads = q_BTHK.size(2);
  RaggedRows rows{.offsets = {numbers(offsets), numbers(offsets) + offsets.numel()},
                  .positions = {}};
  rows.positions.reserve(static_cast<std::size_t>(chosen.numel()));
  for (std::int64_t i = 0; i < chosen.numel(); ++i) {
    rows.positions.push_back(static_cast<std::int32_t>(numbers(chosen)[i] / heads % tokens));
  }
  return rows;
}

Ragged ragged_of(const Tensor& q_BTHK, const Selection& selection) {
  Ragged ragged{.queries = ragged_rows(q_BTHK, selection.queries, selection.query_offsets),
                .keys = {},
                .mask = selection.mask};
  ragged.keys = selection.keys.is_same(selection.queries)
                    ? ragged.queries
                    : ragged_rows(q_BTHK, selection.keys, selection.key_offsets);
  return ragged;
}

// Rows of x_BTGK by the numbers that a selection has for them, which count `heads` heads.
template <typename Element>
class Rows {
 public:
  Rows(const Tensor& x_BTGK, std::int64_t heads)
      : data_(const_cast<Element*>(x_BTGK.const_data_ptr<Element>())),  // NOLINT: put() of our own
        by_sequence_(x_BTGK.stride(0)),
        by_token_(x_BTGK.stride(1)),
        by_head_(x_BTGK.stride(2)),
        tokens_(x_BTGK.size(1)),
        heads_(heads),
        group_(heads / x_BTGK.size(2)),
        width_(x_BTGK.size(3)) {}

  // `rows`: of a section.
  void get(const std::int64_t* rows, std::int64_t count, Element* to) const {
    for (std::int64_t i = 0; i < count; ++i) std::copy_n(at(rows[i]), width_, to + i * width_);
  }
  void put(const Element* from, std::int64_t count, const std::int64_t* rows) const {
    for (std::int64_t i = 0; i < count; ++i) std::copy_n(from + i * width_, width_, at(rows[i]));
  }

 private:
  [[nodiscard]] Element* at(std::int64_t row) const {
    const std::int64_t token = row / heads_;
    return data_ + token / tokens_ * by_sequence_ + token % tokens_ * by_token_ +
           row % heads_ / group_ * by_head_;
  }

  Element* data_;
  std::int64_t by_sequence_;
  std::int64_t by_token_;
  std::int64_t by_head_;
  std::int64_t tokens_;
  std::int64_t heads_;  // that rows count
  std::int64_t group_;  // of them share a head of x
  std::int64_t width_;
};

template <typename Element>
std::unique_ptr<Element[]> room(std::int64_t rows, const Sizes& sizes) {
  return std::make_unique_for_overwrite<Element[]>(static_cast<std::size_t>(rows * sizes.head));
}

// Keys of norm 1 made of queries, k = q / |q|, in place; 1 / |q| of each.
template <typename Element>
std::vector<kernels::Wide<Element>> make_keys(Element* q, std::int64_t rows, const Sizes& sizes) {
  using Wide = kernels::Wide<Element>;
  std::vector<Wide> inverse(static_cast<std::size_t>(rows));
  kernels::row_products(q, sizes.head, q, sizes.head, rows, sizes.head, inverse.data());
  for (std::int64_t i = 0; i < rows; ++i) {
    Wide& of_row = inverse[static_cast<std::size_t>(i)];
    of_row = 1 / std::sqrt(of_row + static_cast<Wide>(kLeast));
    for (Element* x = q + i * sizes.head; x < q + (i + 1) * sizes.head; ++x) {
      *x = static_cast<Element>(static_cast<Wide>(*x) * of_row);
    }
  }
  return inverse;
}

// Adds what comes through such keys: d k / d q = (1 - k k^T) / |q|.
template <typename Element>
void add_through_keys(const Element* k, const Element* k_gradient,
                      const std::vector<kernels::Wide<Element>>& inverse, const Sizes& sizes,
                      Element* q_gradient) {
  using Wide = kernels::Wide<Element>;
  const auto rows = std::ssize(inverse);
  std::vector<Wide> along(inverse.size());
  kernels::row_products(k, sizes.head, k_gradient, sizes.head, rows, sizes.head, along.data());
  for (std::int64_t i = 0; i < rows; ++i) {
    const Wide of_row = inverse[static_cast<std::size_t>(i)];
    const Wide both = along[static_cast<std::size_t>(i)];
    for (std::int64_t j = i * sizes.head; j < (i + 1) * sizes.head; ++j) {
      const Wide added =
          (static_cast<Wide>(k_gradient[j]) - static_cast<Wide>(k[j]) * both) * of_row;
      q_gradient[j] = static_cast<Element>(static_cast<Wide>(q_gradient[j]) + added);
    }
  }
}

// Rows that are not chosen are 0.
Tensor rows_like(const Tensor& x_BTHK, const Tensor& chosen) {
  const bool all = chosen.numel() * x_BTHK.size(3) == x_BTHK.numel();
  return all ? at::empty(x_BTHK.sizes(), x_BTHK.options())
             : at::zeros(x_BTHK.sizes(), x_BTHK.options());
}

// From a gradient by query heads to one by the heads of x.
Tensor summed(const Tensor& gradient_BTHK, const Tensor& x_BTGK) {
  if (gradient_BTHK.size(2) == x_BTGK.size(2)) return gradient_BTHK;
  return gradient_BTHK.view({x_BTGK.size(0), x_BTGK.size(1), x_BTGK.size(2), -1, x_BTGK.size(3)})
      .sum(3);
}

struct Operands {
  Tensor q_BTHK, k_BTGK, v_BTGK;  // no k: shared keys
  const Selection& selection;
};

// What a section's rows are, gathered.
template <typename Element>
struct Gathered {
  Gathered(const Operands& x, const Section& section, const Sizes& sizes)
      : queries(numbers(x.selection.queries) + section.first_query),
        keys(numbers(x.selection.keys) + section.first_key),
        q(room<Element>(section.queries, sizes)),
        k(room<Element>(section.keys, sizes)),
        v(room<Element>(section.keys, sizes)) {
    const std::int64_t heads = x.q_BTHK.size(2);
    Rows<Element>(x.q_BTHK, heads).get(queries, section.queries, q.get());
    Rows<Element>(x.v_BTGK, heads).get(keys, section.keys, v.get());
    if (x.k_BTGK.defined()) {
      Rows<Element>(x.k_BTGK, heads).get(keys, section.keys, k.get());
    } else {
      std::copy_n(q.get(), section.keys * sizes.head, k.get());
      inverse = make_keys(k.get(), section.keys, sizes);
    }
  }
  const std::int64_t* queries;  // rows
  const std::int64_t* keys;
  std::unique_ptr<Element[]> q, k, v;
  std::vector<kernels::Wide<Element>> inverse;  // of shared keys
};

template <typename Element>
Attention forward_of(const Operands& x, const blocks::RaggedSections& ragged) {
  using Wide = kernels::Wide<Element>;
  const Sizes sizes(x.q_BTHK.size(3), 1);
  Attention attention{
      .out_BTHK = rows_like(x.q_BTHK, x.selection.queries),
      .log_sum_exp = at::empty({1, x.selection.queries.numel()},
                               x.q_BTHK.options().dtype(statistics_type(x.q_BTHK.scalar_type())))};
  const Rows<Element> out(attention.out_BTHK, x.q_BTHK.size(2));
  auto* log_sum_exp = attention.log_sum_exp.template mutable_data_ptr<Wide>();
  blocks::for_each_group<Element>(
      ragged.sections(), 1, sizes,
      [&](const Section& section, std::int64_t, Scratch<Element>& scratch) {
        const Gathered<Element> rows(x, section, sizes);
        const auto made = room<Element>(section.queries, sizes);
        blocks::forward<Element>(sizes, section, {rows.q.get(), sizes.head},
                                 {rows.k.get(), sizes.head}, {rows.v.get(), sizes.head},
                                 {made.get(), sizes.head}, log_sum_exp + section.first_query,
                                 scratch);
        out.put(made.get(), section.queries, rows.queries);
      });
  return attention;
}

// Sums of keys in the type that they are added up in, and then in the elements'.
template <typename Element>
struct KeySums {
  using Wide = kernels::Wide<Element>;
  KeySums(const Section& section, const Sizes& sizes) : made(room<Element>(section.keys, sizes)) {
    if constexpr (Scratch<Element>::kNarrow) wide = room<Wide>(section.keys, sizes);
  }
  [[nodiscard]] Wide* sums() {
    if constexpr (Scratch<Element>::kNarrow) return wide.get();
    if constexpr (!Scratch<Element>::kNarrow) return made.get();
  }
  const Element* rounded(const Section& section, const Sizes& sizes) {
    if constexpr (Scratch<Element>::kNarrow) {
      kernels::rounded(wide.get(), section.keys, sizes.head, made.get(), sizes.head);
    }
    return made.get();
  }
  std::unique_ptr<Element[]> made;
  std::unique_ptr<Wide[]> wide;
};

template <typename Element>
AttentionGradient backward_of(const Tensor& gradient_BTHK, const Operands& x,
                              const Attention& attention, const blocks::RaggedSections& ragged) {
  using Wide = kernels::Wide<Element>;
  const std::int64_t heads = x.q_BTHK.size(2);
  const bool shared = !x.k_BTGK.defined();
  const Sizes sizes(x.q_BTHK.size(3), 1);
  AttentionGradient gradient{.q_BTHK = rows_like(x.q_BTHK, x.selection.queries),
                             .k_BTHK = shared ? Tensor() : rows_like(x.q_BTHK, x.selection.keys),
                             .v_BTHK = rows_like(x.q_BTHK, x.selection.keys)};
  const auto* log_sum_exp = attention.log_sum_exp.template const_data_ptr<Wide>();
  blocks::for_each_group<Element>(
      ragged.sections(), 1, sizes,
      [&](const Section& section, std::int64_t, Scratch<Element>& scratch) {
        const Gathered<Element> rows(x, section, sizes);
        const auto slope = room<Element>(section.queries, sizes);
        const auto out = room<Element>(section.queries, sizes);
        const auto q_gradient = room<Element>(section.queries, sizes);
        Rows<Element>(gradient_BTHK, heads).get(rows.queries, section.queries, slope.get());
        Rows<Element>(attention.out_BTHK, heads).get(rows.queries, section.queries, out.get());
        KeySums<Element> k_sums(section, sizes);
        KeySums<Element> v_sums(section, sizes);
        blocks::backward<Element>(sizes, section,
                                  {.out_gradient = {slope.get(), sizes.head},
                                   .q = {rows.q.get(), sizes.head},
                                   .k = {rows.k.get(), sizes.head},
                                   .v = {rows.v.get(), sizes.head},
                                   .out = {out.get(), sizes.head},
                                   .log_sum_exp = log_sum_exp + section.first_query,
                                   .q_gradient = {q_gradient.get(), sizes.head},
                                   .k_gradient = {k_sums.sums(), sizes.head},
                                   .v_gradient = {v_sums.sums(), sizes.head},
                                   .first_of_group = true},
                                  scratch);
        const Element* k_gradient = k_sums.rounded(section, sizes);
        if (shared) {
          add_through_keys(rows.k.get(), k_gradient, rows.inverse, sizes, q_gradient.get());
        } else {
          Rows<Element>(gradient.k_BTHK, heads).put(k_gradient, section.keys, rows.keys);
        }
        Rows<Element>(gradient.q_BTHK, heads).put(q_gradient.get(), section.queries, rows.queries);
        Rows<Element>(gradient.v_BTHK, heads)
            .put(v_sums.rounded(section, sizes), section.keys, rows.keys);
      });
  return gradient;
}

// In the type that the products are of.
Operands operands_of(const Tensor& q_BTHK, const Tensor& k_BTGK, const Tensor& v_BTGK,
                     const Selection& selection) {
  DYNMO_CHECK(q_BTHK.is_cpu() && q_BTHK.stride(3) == 1 && v_BTGK.stride(3) == 1 &&
                  q_BTHK.size(2) % v_BTGK.size(2) == 0,
              "q and v of {} on the CPU, elements of a head together, heads of q a multiple of v's",
              fmt::join(q_BTHK.sizes(), "x"));
  DYNMO_CHECK(k_BTGK.defined() || selection.keys.is_same(selection.queries),
              "keys of their own where queries are chosen apart from them");
  const at::ScalarType type = product_type(q_BTHK.scalar_type());
  return {.q_BTHK = q_BTHK.to(type),
          .k_BTGK = k_BTGK.defined() ? k_BTGK.to(type) : Tensor(),
          .v_BTGK = v_BTGK.to(type),
          .selection = selection};
}

template <typename Float, typename Double, typename Narrow>
auto by_type(const Tensor& x, Float of_float, Double of_double, Narrow of_narrow) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return of_float();
    case at::kDouble:
      return of_double();
    default:
      return of_narrow();
  }
}

}  // namespace

std::vector<double> pattern_figures_of(const Tensor& q_BTHK, const Selection& selection) {
  const std::int64_t tokens = q_BTHK.size(1);
  return {static_cast<double>(pairs_of(ragged_of(q_BTHK, selection))),
          static_cast<double>(q_BTHK.size(0) * q_BTHK.size(2) * (tokens * (tokens + 1) / 2))};
}

Attention selected_attention(const Tensor& q_BTHK, const Tensor& k_BTGK, const Tensor& v_BTGK,
                             const Selection& selection) {
  const Operands x = operands_of(q_BTHK, k_BTGK, v_BTGK, selection);
  const blocks::RaggedSections ragged(ragged_of(q_BTHK, selection));
  Attention attention = by_type(
      x.q_BTHK, [&] { return forward_of<float>(x, ragged); },
      [&] { return forward_of<double>(x, ragged); },
      [&] { return forward_of<c10::BFloat16>(x, ragged); });
  attention.out_BTHK = attention.out_BTHK.to(q_BTHK.scalar_type());
  return attention;
}

AttentionGradient selected_attention_gradient(const Tensor& gradient_BTHK, const Tensor& q_BTHK,
                                              const Tensor& k_BTGK, const Tensor& v_BTGK,
                                              const Attention& attention,
                                              const Selection& selection) {
  const Operands x = operands_of(q_BTHK, k_BTGK, v_BTGK, selection);
  DYNMO_CHECK(gradient_BTHK.stride(3) == 1, "the elements of a head together, got stride {}",
              gradient_BTHK.stride(3));
  const at::ScalarType type = x.q_BTHK.scalar_type();
  const blocks::RaggedSections ragged(ragged_of(q_BTHK, selection));
  const Tensor slope = gradient_BTHK.to(type);
  const Attention made{.out_BTHK = attention.out_BTHK.to(type),
                       .log_sum_exp = attention.log_sum_exp};
  AttentionGradient gradient = by_type(
      x.q_BTHK, [&] { return backward_of<float>(slope, x, made, ragged); },
      [&] { return backward_of<double>(slope, x, made, ragged); },
      [&] { return backward_of<c10::BFloat16>(slope, x, made, ragged); });
  gradient.q_BTHK = gradient.q_BTHK.to(q_BTHK.scalar_type());
  gradient.v_BTHK = summed(gradient.v_BTHK, v_BTGK).to(q_BTHK.scalar_type());
  if (k_BTGK.defined()) {
    gradient.k_BTHK = summed(gradient.k_BTHK, k_BTGK).to(q_BTHK.scalar_type());
  }
  return gradient;
}

}  // namespace dynmo::model
