// SPDX-License-Identifier: Apache-2.0
#pragma once

// The loop over blocks of queries for all attention on the CPU (attention_impl.h explains it). It
// serves whole sequences, ragged rows (attention.cpp), and chosen rows (selected_attention.cpp).

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "dynmo/kernels/loops.h"
#include "dynmo/kernels/parallel_impl.h"
#include "dynmo/kernels/products.h"
#include "dynmo/kernels/ragged_attention.h"

namespace dynmo::kernels::blocks {

// Number of rows in a block. Products of this size run at their full rate. More rows would mean
// more scores (rows x T), and more hidden keys to compute (half a block).
inline constexpr std::int64_t kRows = 64;

struct Sizes {
  Sizes(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK)
      : Sizes(q_BTHK.size(3), q_BTHK.size(2) / k_BTHK.size(2)) {}
  Sizes(std::int64_t elements, std::int64_t heads_of_a_group)
      : head(elements),
        group(heads_of_a_group),
        scale(1 / std::sqrt(static_cast<double>(elements))) {}
  std::int64_t head;   // elements of a head
  std::int64_t group;  // query heads for each key head
  double scale;
};

// Queries and keys that belong together: rows of tensors BTHK.
struct Section {
  std::int64_t b = 0;
  std::int64_t first_query = 0;
  std::int64_t queries = 0;
  std::int64_t first_key = 0;
  std::int64_t keys = 0;
  // For each query, the number of first keys that it sees. The numbers never fall.
  const std::int64_t* seen = nullptr;
};
using Sections = std::vector<Section>;

// One head of one sequence: T rows of K elements whose starts are `stride` apart.
template <typename Element>
struct Head {
  Element* data;
  std::int64_t stride;

  Element* row(std::int64_t t) const { return data + t * stride; }
  MatrixView<std::remove_const_t<Element>> from(std::int64_t t, bool transposed = false) const {
    return {row(t), stride, transposed};
  }
};

template <typename Element>
Head<const Element> head_of(const at::Tensor& x_BTHK, std::int64_t b, std::int64_t h,
                            std::int64_t first) {
  return {x_BTHK.const_data_ptr<Element>() + b * x_BTHK.stride(0) + h * x_BTHK.stride(2) +
              first * x_BTHK.stride(1),
          x_BTHK.stride(1)};
}
template <typename Element>
Head<Element> mutable_head_of(at::Tensor& x_BTHK, std::int64_t b, std::int64_t h,
                              std::int64_t first) {
  return {x_BTHK.mutable_data_ptr<Element>() + b * x_BTHK.stride(0) + h * x_BTHK.stride(2) +
              first * x_BTHK.stride(1),
          x_BTHK.stride(1)};
}

// A thread's memory for one head. If an element is narrower than its sums, products go to the wide
// buffers and are rounded once. Otherwise they go to their final place.
template <typename Element>
class Scratch {
 public:
  using Wide = loops::Wide<Element>;
  static constexpr bool kNarrow = !std::is_same_v<Element, Wide>;

  // Makes buffers. `most_scores` is max_scores() of the sections.
  Scratch(const Sizes& sizes, std::int64_t most_scores)
      : scores(size(most_scores)),
        gradient(scores.size()),
        correction(size(kRows)),
        rows(size(kNarrow ? kRows * sizes.head : 0)),
        narrow_(kNarrow ? 2 * scores.size() : 0) {}

  Element* probabilities() {
    if constexpr (kNarrow) return narrow_.data();
    if constexpr (!kNarrow) return scores.data();
  }
  Element* score_gradient() {
    if constexpr (kNarrow) return narrow_.data() + narrow_.size() / 2;
    if constexpr (!kNarrow) return gradient.data();
  }

  std::vector<Wide> scores;    // kRows x T; then the probabilities, if they are wide
  std::vector<Wide> gradient;  // kRows x T; of the probabilities, then of the scores
  std::vector<Wide> correction;
  std::vector<Wide> rows;  // kRows x K

 private:
  static std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }
  std::vector<Element> narrow_;
};

// Sets the rows of `to`, `stride` apart, to factor * a b, rounded to Element.
template <typename Element>
void multiply_into(Scratch<Element>& scratch, const ProductShape& shape, double factor,
                   const MatrixView<Element>& a, const MatrixView<Element>& b, Element* to,
                   std::int64_t stride) {
  using Wide = loops::Wide<Element>;
  if constexpr (!Scratch<Element>::kNarrow) {
    multiply(shape, static_cast<Wide>(factor), a, b, Wide(0), to, stride);
  } else {
    multiply(shape, static_cast<Wide>(factor), a, b, Wide(0), scratch.rows.data(), shape.columns);
    loops::rounded(scratch.rows.data(), shape.rows, shape.columns, to, stride);
  }
}

template <typename Element>
void forward(const Sizes& sizes, const Section& section, const Head<const Element>& q,
             const Head<const Element>& k, const Head<const Element>& v, const Head<Element>& out,
             loops::Wide<Element>* log_sum_exp, Scratch<Element>& scratch) {
  using Wide = loops::Wide<Element>;
  for (std::int64_t first = 0; first < section.queries; first += kRows) {
    const std::int64_t rows = std::min(kRows, section.queries - first);
    const std::int64_t keys = section.seen[first + rows - 1];
    if (keys == 0) {
      for (std::int64_t t = 0; t < rows; ++t) {
        std::fill_n(out.row(first + t), sizes.head, Element(0));
        log_sum_exp[first + t] = -std::numeric_limits<Wide>::infinity();
      }
      continue;
    }
    multiply({rows, keys, sizes.head}, static_cast<Wide>(sizes.scale), q.from(first),
             k.from(0, true), Wide(0), scratch.scores.data(), keys);
    loops::causal_softmax(scratch.scores.data(), rows, section.seen + first, keys,
                          scratch.probabilities(), log_sum_exp + first);
    multiply_into(scratch, {rows, sizes.head, keys}, 1, {scratch.probabilities(), keys}, v.from(0),
                  out.row(first), out.stride);
  }
}

template <typename Element>
struct HeadGradient {
  Head<const Element> out_gradient;
  Head<const Element> q, k, v, out;
  const loops::Wide<Element>* log_sum_exp;
  Head<Element> q_gradient;
  Head<loops::Wide<Element>> k_gradient, v_gradient;  // sums over the query heads of a group
  bool first_of_group;
};

template <typename Element>
void zero_rows(const Head<Element>& x, std::int64_t first, std::int64_t end, std::int64_t width) {
  for (std::int64_t t = first; t < end; ++t) std::fill_n(x.row(t), width, Element(0));
}

// Computes the gradients of one head. The last block comes first, because it reaches every visible
// key. So it sets the sums to which the other blocks add.
template <typename Element>
void backward(const Sizes& sizes, const Section& section, const HeadGradient<Element>& head,
              Scratch<Element>& scratch) {
  using Wide = loops::Wide<Element>;
  const auto scale = static_cast<Wide>(sizes.scale);
  const std::int64_t reached = section.queries == 0 ? 0 : section.seen[section.queries - 1];
  if (head.first_of_group) {
    zero_rows(head.k_gradient, reached, section.keys, sizes.head);
    zero_rows(head.v_gradient, reached, section.keys, sizes.head);
  }
  const std::int64_t last = section.queries == 0 ? -kRows : (section.queries - 1) / kRows * kRows;
  for (std::int64_t first = last; first >= 0; first -= kRows) {
    const std::int64_t rows = std::min(kRows, section.queries - first);
    const std::int64_t keys = section.seen[first + rows - 1];
    if (keys == 0) {
      zero_rows(head.q_gradient, first, first + rows, sizes.head);
      continue;
    }
    const Wide kept = head.first_of_group && first == last ? Wide(0) : Wide(1);
    loops::row_products(head.out_gradient.row(first), head.out_gradient.stride, head.out.row(first),
                        head.out.stride, rows, sizes.head, scratch.correction.data());
    multiply({rows, keys, sizes.head}, scale, head.q.from(first), head.k.from(0, true), Wide(0),
             scratch.scores.data(), keys);
    multiply({rows, keys, sizes.head}, Wide(1), head.out_gradient.from(first), head.v.from(0, true),
             Wide(0), scratch.gradient.data(), keys);
    loops::causal_softmax_gradient(scratch.scores.data(), scratch.gradient.data(),
                                   head.log_sum_exp + first, scratch.correction.data(), rows,
                                   section.seen + first, keys, scratch.probabilities(),
                                   scratch.score_gradient());
    multiply({keys, sizes.head, rows}, Wide(1), {scratch.probabilities(), keys, true},
             head.out_gradient.from(first), kept, head.v_gradient.data, head.v_gradient.stride);
    multiply({keys, sizes.head, rows}, scale, {scratch.score_gradient(), keys, true},
             head.q.from(first), kept, head.k_gradient.data, head.k_gradient.stride);
    multiply_into(scratch, {rows, sizes.head, keys}, sizes.scale, {scratch.score_gradient(), keys},
                  head.k.from(0), head.q_gradient.row(first), head.q_gradient.stride);
  }
}

// Returns the number of elements of the largest block of scores, for the size of a Scratch.
inline std::int64_t max_scores(const Sections& sections) {
  std::int64_t most = 0;
  for (const Section& section : sections) {
    const std::int64_t seen = section.queries == 0 ? 0 : section.seen[section.queries - 1];
    most = std::max(most, std::min(kRows, section.queries) * seen);
  }
  return most;
}

// Calls function(section, key head, scratch) once for each pair, on libtorch's threads.
template <typename Element, typename Function>
void for_each_group(const Sections& sections, std::int64_t heads, const Sizes& sizes,
                    Function function) {
  const std::int64_t most = max_scores(sections);
  at::parallel_for(0, std::ssize(sections) * heads, 1, [&](std::int64_t begin, std::int64_t end) {
    Scratch<Element> scratch(sizes, most);
    for (std::int64_t i = begin; i < end; ++i) {
      function(sections[static_cast<std::size_t>(i / heads)], i % heads, scratch);
    }
  });
}

// The sections of `ragged`, as rows of tensors 1NHK.
class RaggedSections {
 public:
  explicit RaggedSections(const Ragged& ragged) : seen_(ragged.queries.positions.size()) {
    for (std::size_t s = 0; s + 1 < ragged.queries.offsets.size(); ++s) {
      const Section section{.first_query = ragged.queries.offsets[s],
                            .queries = ragged.queries.offsets[s + 1] - ragged.queries.offsets[s],
                            .first_key = ragged.keys.offsets[s],
                            .keys = ragged.keys.offsets[s + 1] - ragged.keys.offsets[s],
                            .seen = seen_.data() + ragged.queries.offsets[s]};
      std::int64_t seen = 0;
      for (std::int64_t t = section.first_query; t < section.first_query + section.queries; ++t) {
        while (seen < section.keys && sees(ragged, t, section.first_key + seen)) ++seen;
        seen_[static_cast<std::size_t>(t)] = seen;
      }
      sections_.push_back(section);
    }
  }
  RaggedSections(const RaggedSections&) = delete;
  RaggedSections& operator=(const RaggedSections&) = delete;
  [[nodiscard]] const Sections& sections() const { return sections_; }
  [[nodiscard]] std::int64_t pairs() const {
    return std::accumulate(seen_.begin(), seen_.end(), std::int64_t{0});
  }

 private:
  static bool sees(const Ragged& ragged, std::int64_t query, std::int64_t key) {
    const std::int32_t at = ragged.queries.positions[static_cast<std::size_t>(query)];
    const std::int32_t of = ragged.keys.positions[static_cast<std::size_t>(key)];
    return ragged.mask == Mask::kStrict ? of < at : of <= at;
  }

  std::vector<std::int64_t> seen_;
  Sections sections_;
};

}  // namespace dynmo::kernels::blocks
