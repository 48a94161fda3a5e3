// SPDX-License-Identifier: Apache-2.0
// Attention on the rows that a pattern chose (selected_attention.h). Section by section, the rows
// are copied into a buffer, processed there, and copied back. So intermediate results stay in the
// cache, and no temporary has the size of all rows.
#include "dynmo/kernels/selected_attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/kernels/attention_blocks_impl.h"
#include "dynmo/kernels/attention_impl.h"
#include "dynmo/kernels/generic_selection.h"
#include "dynmo/kernels/parallel_impl.h"

namespace dynmo::kernels {
namespace {

using at::Tensor;
using blocks::Head;
using blocks::Scratch;
using blocks::Section;
using blocks::Sizes;

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

// The rows of x_BTGK by their numbers in a selection, which count `heads` heads a token.
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

  // Copies rows of a section into `to`. put() copies them back.
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
  std::int64_t heads_;  // in the numbers of rows
  std::int64_t group_;  // heads that share a head of x
  std::int64_t width_;
};

template <typename Element>
std::unique_ptr<Element[]> room(std::int64_t rows, const Sizes& sizes) {
  return std::make_unique_for_overwrite<Element[]>(static_cast<std::size_t>(rows * sizes.head));
}

// Replaces queries by keys of norm 1, k = q / |q|. Returns 1 / |q| of each.
template <typename Element>
std::vector<loops::Wide<Element>> make_keys(Element* q, std::int64_t rows, const Sizes& sizes) {
  using Wide = loops::Wide<Element>;
  std::vector<Wide> inverse(static_cast<std::size_t>(rows));
  loops::row_products(q, sizes.head, q, sizes.head, rows, sizes.head, inverse.data());
  for (std::int64_t i = 0; i < rows; ++i) {
    Wide& of_row = inverse[static_cast<std::size_t>(i)];
    of_row = 1 / std::sqrt(of_row + static_cast<Wide>(kLeastSquare));
    for (Element* x = q + i * sizes.head; x < q + (i + 1) * sizes.head; ++x) {
      *x = static_cast<Element>(static_cast<Wide>(*x) * of_row);
    }
  }
  return inverse;
}

// Adds the gradient through the keys of make_keys() to that of q: d k / d q = (1 - k k^T) / |q|.
template <typename Element>
void add_through_keys(const Element* k, const Element* k_gradient,
                      const std::vector<loops::Wide<Element>>& inverse, const Sizes& sizes,
                      Element* q_gradient) {
  using Wide = loops::Wide<Element>;
  const auto rows = std::ssize(inverse);
  std::vector<Wide> along(inverse.size());
  loops::row_products(k, sizes.head, k_gradient, sizes.head, rows, sizes.head, along.data());
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

// Returns the sums as elements, each rounded once.
template <typename Element>
std::unique_ptr<Element[]> as_elements(std::unique_ptr<loops::Wide<Element>[]> sums,
                                       std::int64_t rows, const Sizes& sizes) {
  if constexpr (!Scratch<Element>::kNarrow) return sums;
  if constexpr (Scratch<Element>::kNarrow) {
    auto elements = room<Element>(rows, sizes);
    loops::rounded(sums.get(), rows, sizes.head, elements.get(), sizes.head);
    return elements;
  }
}

// Returns a tensor like x, in which rows that are not chosen are 0.
Tensor rows_like(const Tensor& x_BTHK, const Tensor& chosen) {
  const bool all = chosen.numel() * x_BTHK.size(3) == x_BTHK.numel();
  return all ? at::empty(x_BTHK.sizes(), x_BTHK.options())
             : at::zeros(x_BTHK.sizes(), x_BTHK.options());
}

struct Operands {
  Tensor q_BTHK, k_BTGK, v_BTGK;  // no k: shared keys
  const Selection& selection;
};

// The rows of a section, gathered.
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
  std::vector<loops::Wide<Element>> inverse;  // of shared keys
};

template <typename Element>
Attention forward_of(const Operands& x, const blocks::RaggedSections& ragged) {
  using Wide = loops::Wide<Element>;
  const Sizes sizes(x.q_BTHK.size(3), 1);
  Attention attention{.out_BTHK = rows_like(x.q_BTHK, x.selection.queries),
                      .log_sum_exp = at::empty(
                          {1, x.selection.queries.numel()},
                          x.q_BTHK.options().dtype(accumulation_type(x.q_BTHK.scalar_type())))};
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

// Returns the number of the section's sequence and query head, b H + h, or -1 if it has no rows.
std::int64_t head_of_section(const Operands& x, const Section& section) {
  if (section.queries == 0 && section.keys == 0) return -1;
  const std::int64_t row = section.queries > 0 ? numbers(x.selection.queries)[section.first_query]
                                               : numbers(x.selection.keys)[section.first_key];
  const std::int64_t heads = x.q_BTHK.size(2);
  return row / heads / x.q_BTHK.size(1) * heads + row % heads;
}

// Returns the first section of each run, and the end of the last run. One thread takes a run in
// order. Query heads of one key head add to the same rows, so they are one run, and sums have the
// order of dense attention.
std::vector<std::int64_t> runs_of(const Operands& x, const blocks::Sections& sections) {
  const std::int64_t group = x.q_BTHK.size(2) / x.v_BTGK.size(2);
  std::vector<std::int64_t> runs = {0};
  std::int64_t before = -1;
  for (std::int64_t s = 0; s < std::ssize(sections); ++s) {
    const std::int64_t head = head_of_section(x, sections[static_cast<std::size_t>(s)]);
    if (head < 0) continue;
    DYNMO_CHECK(head >= before, "sections by sequence, then by head");
    if (before >= 0 && (group == 1 || head / group != before / group)) runs.push_back(s);
    before = head;
  }
  runs.push_back(std::ssize(sections));
  return runs;
}

template <typename Element>
class Backward {
 public:
  using Wide = loops::Wide<Element>;

  Backward(const Tensor& gradient_BTHK, const Operands& x, const Attention& attention,
           const blocks::RaggedSections& ragged)
      : gradient_BTHK_(gradient_BTHK),
        x_(x),
        attention_(attention),
        ragged_(ragged),
        q_gradient_BTHK_(rows_like(x.q_BTHK, x.selection.queries)),
        v_sums_BTGK_(sums_like(x.v_BTGK)) {
    if (x.k_BTGK.defined()) k_sums_BTGK_ = sums_like(x.k_BTGK);
  }

  AttentionGradient gradient() {
    const blocks::Sections& sections = ragged_.sections();
    const std::int64_t most = blocks::max_scores(sections);
    const std::vector<std::int64_t> runs = runs_of(x_, sections);
    at::parallel_for(0, std::ssize(runs) - 1, 1, [&](std::int64_t begin, std::int64_t end) {
      Scratch<Element> scratch(sizes_, most);
      const auto first = static_cast<std::size_t>(runs[static_cast<std::size_t>(begin)]);
      const auto last = static_cast<std::size_t>(runs[static_cast<std::size_t>(end)]);
      for (std::size_t s = first; s < last; ++s) add(sections[s], scratch);
    });
    const at::ScalarType type = x_.q_BTHK.scalar_type();
    return {.q_BTHK = q_gradient_BTHK_,
            .k_BTHK = shares_keys() ? Tensor() : k_sums_BTGK_.to(type),
            .v_BTHK = v_sums_BTGK_.to(type)};
  }

 private:
  [[nodiscard]] bool shares_keys() const { return !x_.k_BTGK.defined(); }

  // Returns a tensor for sums over the query heads of a group. It is not zeroed if all rows are
  // chosen, because the first head of a group then sets all sums.
  [[nodiscard]] Tensor sums_like(const Tensor& x_BTGK) const {
    const auto options = x_BTGK.options().dtype(c10::CppTypeToScalarType<Wide>::value);
    const bool all = x_.selection.keys.numel() * x_BTGK.size(3) == x_.q_BTHK.numel();
    return all ? at::empty(x_BTGK.sizes(), options) : at::zeros(x_BTGK.sizes(), options);
  }

  void add(const Section& section, Scratch<Element>& scratch) {
    const std::int64_t heads = x_.q_BTHK.size(2);
    const Gathered<Element> rows(x_, section, sizes_);
    const auto slope = room<Element>(section.queries, sizes_);
    const auto out = room<Element>(section.queries, sizes_);
    const auto q_gradient = room<Element>(section.queries, sizes_);
    auto k_sums = room<Wide>(section.keys, sizes_);
    const auto v_sums = room<Wide>(section.keys, sizes_);
    Rows<Element>(gradient_BTHK_, heads).get(rows.queries, section.queries, slope.get());
    Rows<Element>(attention_.out_BTHK, heads).get(rows.queries, section.queries, out.get());
    const Rows<Wide> all_v(v_sums_BTGK_, heads);
    const bool first = head_of_section(x_, section) % (heads / x_.v_BTGK.size(2)) == 0;
    if (!first) {
      all_v.get(rows.keys, section.keys, v_sums.get());
      if (shares_keys()) {
        std::fill_n(k_sums.get(), section.keys * sizes_.head, Wide(0));
      } else {
        Rows<Wide>(k_sums_BTGK_, heads).get(rows.keys, section.keys, k_sums.get());
      }
    }
    blocks::backward<Element>(
        sizes_, section,
        {.out_gradient = {slope.get(), sizes_.head},
         .q = {rows.q.get(), sizes_.head},
         .k = {rows.k.get(), sizes_.head},
         .v = {rows.v.get(), sizes_.head},
         .out = {out.get(), sizes_.head},
         .log_sum_exp =
             attention_.log_sum_exp.template const_data_ptr<Wide>() + section.first_query,
         .q_gradient = {q_gradient.get(), sizes_.head},
         .k_gradient = {k_sums.get(), sizes_.head},
         .v_gradient = {v_sums.get(), sizes_.head},
         .first_of_group = first},
        scratch);
    if (shares_keys()) {
      const auto k_gradient = as_elements<Element>(std::move(k_sums), section.keys, sizes_);
      add_through_keys(rows.k.get(), k_gradient.get(), rows.inverse, sizes_, q_gradient.get());
    } else {
      Rows<Wide>(k_sums_BTGK_, heads).put(k_sums.get(), section.keys, rows.keys);
    }
    all_v.put(v_sums.get(), section.keys, rows.keys);
    Rows<Element>(q_gradient_BTHK_, heads).put(q_gradient.get(), section.queries, rows.queries);
  }

  const Tensor& gradient_BTHK_;
  const Operands& x_;
  const Attention& attention_;
  const blocks::RaggedSections& ragged_;
  Sizes sizes_{x_.q_BTHK.size(3), 1};
  Tensor q_gradient_BTHK_;
  Tensor k_sums_BTGK_;  // undefined: shared keys
  Tensor v_sums_BTGK_;
};

// Returns the operands in the type of the products.
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

std::int64_t pairs_of(const Tensor& q_BTHK, const Selection& selection) {
  if (selection.pairs.defined()) return selection.pairs.item<std::int64_t>();
  return pairs_of(ragged_of(q_BTHK, selection));
}

std::vector<Tensor> Selection::tensors() const {
  return {queries,        keys.is_same(queries) ? Tensor() : keys,
          rows_NLS,       places,
          packed_rows_2M, packed_places_2M,
          packed_offsets};
}

Attention selected_attention(const Tensor& q_BTHK, const Tensor& k_BTGK, const Tensor& v_BTGK,
                             const Selection& selection) {
  if (selection.padded() || selection.packed()) {
    DYNMO_CHECK(!k_BTGK.defined(), "keys that are queries, of sections on a device");
    return generic::selected_attention(q_BTHK, v_BTGK, selection);
  }
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
  if (selection.padded() || selection.packed()) {
    return generic::selected_attention_gradient(gradient_BTHK, q_BTHK, v_BTGK, attention,
                                                selection);
  }
  const Operands x = operands_of(q_BTHK, k_BTGK, v_BTGK, selection);
  DYNMO_CHECK(gradient_BTHK.stride(3) == 1, "the elements of a head together, got stride {}",
              gradient_BTHK.stride(3));
  const at::ScalarType type = x.q_BTHK.scalar_type();
  const blocks::RaggedSections ragged(ragged_of(q_BTHK, selection));
  const Tensor slope = gradient_BTHK.to(type);
  const Attention made{.out_BTHK = attention.out_BTHK.to(type),
                       .log_sum_exp = attention.log_sum_exp};
  AttentionGradient gradient = by_type(
      x.q_BTHK, [&] { return Backward<float>(slope, x, made, ragged).gradient(); },
      [&] { return Backward<double>(slope, x, made, ragged).gradient(); },
      [&] { return Backward<c10::BFloat16>(slope, x, made, ragged).gradient(); });
  gradient.q_BTHK = gradient.q_BTHK.to(q_BTHK.scalar_type());
  gradient.v_BTHK = gradient.v_BTHK.to(q_BTHK.scalar_type());
  if (k_BTGK.defined()) gradient.k_BTHK = gradient.k_BTHK.to(q_BTHK.scalar_type());
  return gradient;
}

}  // namespace dynmo::kernels
