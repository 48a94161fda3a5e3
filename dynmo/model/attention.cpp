// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/model/attention_impl.h"
#include "dynmo/model/kernels_impl.h"
#include "dynmo/model/parallel_impl.h"
#include "dynmo/model/products_impl.h"

namespace dynmo::model {
namespace {

// Rows of a block: enough for a product to run at its rate, few enough that the keys a block works
// on in vain (half a block) and its scores (rows x T) stay few.
constexpr std::int64_t kRows = 64;

struct Sizes {
  Sizes(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK)
      : tokens(q_BTHK.size(1)),
        seen(k_BTHK.size(1) - tokens),
        head(q_BTHK.size(3)),
        group(q_BTHK.size(2) / k_BTHK.size(2)),
        scale(1 / std::sqrt(static_cast<double>(head))) {}
  std::int64_t tokens;  // of q
  std::int64_t seen;    // keys before those of the first token
  std::int64_t head;    // elements of a head
  std::int64_t group;   // query heads to a key head
  double scale;
};

// One head of one sequence: T rows of K elements that lie `stride` apart.
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
Head<const Element> head_of(const at::Tensor& x_BTHK, std::int64_t b, std::int64_t h) {
  return {x_BTHK.const_data_ptr<Element>() + b * x_BTHK.stride(0) + h * x_BTHK.stride(2),
          x_BTHK.stride(1)};
}
template <typename Element>
Head<Element> mutable_head_of(at::Tensor& x_BTHK, std::int64_t b, std::int64_t h) {
  return {x_BTHK.mutable_data_ptr<Element>() + b * x_BTHK.stride(0) + h * x_BTHK.stride(2),
          x_BTHK.stride(1)};
}

// Memory for what a thread makes of one head. Where an element is narrower than its sums, products
// go to the wide buffers and are rounded once; otherwise to where they belong.
template <typename Element>
class Scratch {
 public:
  using Wide = kernels::Wide<Element>;
  static constexpr bool kNarrow = !std::is_same_v<Element, Wide>;

  explicit Scratch(const Sizes& sizes)
      : scores(size(rows_of(sizes) * (sizes.seen + sizes.tokens))),
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

  std::vector<Wide> scores;    // kRows x T, and then, if they are wide, the probabilities
  std::vector<Wide> gradient;  // kRows x T, of the probabilities, and then of the scores
  std::vector<Wide> correction;
  std::vector<Wide> rows;  // kRows x K

 private:
  static std::int64_t rows_of(const Sizes& sizes) { return std::min(kRows, sizes.tokens); }
  static std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }
  std::vector<Element> narrow_;
};

// a b, times `factor`, into rows of Element.
template <typename Element>
void multiply_into(Scratch<Element>& scratch, const ProductShape& shape, double factor,
                   const MatrixView<Element>& a, const MatrixView<Element>& b, Element* to,
                   std::int64_t stride) {
  using Wide = kernels::Wide<Element>;
  if constexpr (!Scratch<Element>::kNarrow) {
    multiply(shape, static_cast<Wide>(factor), a, b, Wide(0), to, stride);
  } else {
    multiply(shape, static_cast<Wide>(factor), a, b, Wide(0), scratch.rows.data(), shape.columns);
    kernels::rounded(scratch.rows.data(), shape.rows, shape.columns, to, stride);
  }
}

template <typename Element>
void forward(const Sizes& sizes, const Head<const Element>& q, const Head<const Element>& k,
             const Head<const Element>& v, const Head<Element>& out,
             kernels::Wide<Element>* log_sum_exp, Scratch<Element>& scratch) {
  using Wide = kernels::Wide<Element>;
  for (std::int64_t first = 0; first < sizes.tokens; first += kRows) {
    const std::int64_t rows = std::min(kRows, sizes.tokens - first);
    const std::int64_t keys = sizes.seen + first + rows;
    multiply({rows, keys, sizes.head}, static_cast<Wide>(sizes.scale), q.from(first),
             k.from(0, true), Wide(0), scratch.scores.data(), keys);
    kernels::causal_softmax(scratch.scores.data(), rows, sizes.seen + first, keys,
                            scratch.probabilities(), log_sum_exp + first);
    multiply_into(scratch, {rows, sizes.head, keys}, 1, {scratch.probabilities(), keys}, v.from(0),
                  out.row(first), out.stride);
  }
}

template <typename Element>
struct HeadGradient {
  Head<const Element> out_gradient;
  Head<const Element> q, k, v, out;
  const kernels::Wide<Element>* log_sum_exp;
  Head<Element> q_gradient;
  Head<kernels::Wide<Element>> k_gradient, v_gradient;  // sums over the query heads of a group
  bool first_of_group;
};

// The last block comes first: it reaches all keys, so that it sets what the others add to.
template <typename Element>
void backward(const Sizes& sizes, const HeadGradient<Element>& head, Scratch<Element>& scratch) {
  using Wide = kernels::Wide<Element>;
  const auto scale = static_cast<Wide>(sizes.scale);
  for (std::int64_t first = (sizes.tokens - 1) / kRows * kRows; first >= 0; first -= kRows) {
    const std::int64_t rows = std::min(kRows, sizes.tokens - first);
    const std::int64_t keys = first + rows;
    const Wide kept = head.first_of_group && keys == sizes.tokens ? Wide(0) : Wide(1);
    kernels::row_products(head.out_gradient.row(first), head.out_gradient.stride,
                          head.out.row(first), head.out.stride, rows, sizes.head,
                          scratch.correction.data());
    multiply({rows, keys, sizes.head}, scale, head.q.from(first), head.k.from(0, true), Wide(0),
             scratch.scores.data(), keys);
    multiply({rows, keys, sizes.head}, Wide(1), head.out_gradient.from(first), head.v.from(0, true),
             Wide(0), scratch.gradient.data(), keys);
    kernels::causal_softmax_gradient(scratch.scores.data(), scratch.gradient.data(),
                                     head.log_sum_exp + first, scratch.correction.data(), rows,
                                     first, keys, scratch.probabilities(),
                                     scratch.score_gradient());
    multiply({keys, sizes.head, rows}, Wide(1), {scratch.probabilities(), keys, true},
             head.out_gradient.from(first), kept, head.v_gradient.data, head.v_gradient.stride);
    multiply({keys, sizes.head, rows}, scale, {scratch.score_gradient(), keys, true},
             head.q.from(first), kept, head.k_gradient.data, head.k_gradient.stride);
    multiply_into(scratch, {rows, sizes.head, keys}, sizes.scale, {scratch.score_gradient(), keys},
                  head.k.from(0), head.q_gradient.row(first), head.q_gradient.stride);
  }
}

// Calls function(b, key head, scratch) for all, each once, on libtorch's threads.
template <typename Element, typename Function>
void for_each_group(const at::Tensor& k_BTHK, const Sizes& sizes, Function function) {
  const std::int64_t heads = k_BTHK.size(2);
  at::parallel_for(0, k_BTHK.size(0) * heads, 1, [&](std::int64_t begin, std::int64_t end) {
    Scratch<Element> scratch(sizes);
    for (std::int64_t i = begin; i < end; ++i) function(i / heads, i % heads, scratch);
  });
}

template <typename Element>
Attention attention_of(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                       const at::Tensor& v_BTHK) {
  using Wide = kernels::Wide<Element>;
  const Sizes sizes(q_BTHK, k_BTHK);
  Attention attention{
      .out_BTHK = at::empty(q_BTHK.sizes(), q_BTHK.options()),
      .log_sum_exp = at::empty({q_BTHK.size(0), q_BTHK.size(2), sizes.tokens},
                               q_BTHK.options().dtype(statistics_type(q_BTHK.scalar_type())))};
  auto* log_sum_exp = attention.log_sum_exp.template mutable_data_ptr<Wide>();
  for_each_group<Element>(
      k_BTHK, sizes, [&](std::int64_t b, std::int64_t g, Scratch<Element>& scratch) {
        for (std::int64_t h = g * sizes.group; h < (g + 1) * sizes.group; ++h) {
          forward(sizes, head_of<Element>(q_BTHK, b, h), head_of<Element>(k_BTHK, b, g),
                  head_of<Element>(v_BTHK, b, g),
                  mutable_head_of<Element>(attention.out_BTHK, b, h),
                  log_sum_exp + (b * q_BTHK.size(2) + h) * sizes.tokens, scratch);
        }
      });
  return attention;
}

template <typename Element>
AttentionGradient gradient_of(const at::Tensor& gradient_BTHK, const at::Tensor& q_BTHK,
                              const at::Tensor& k_BTHK, const at::Tensor& v_BTHK,
                              const Attention& attention) {
  using Wide = kernels::Wide<Element>;
  const Sizes sizes(q_BTHK, k_BTHK);
  AttentionGradient gradient{.q_BTHK = at::empty(q_BTHK.sizes(), q_BTHK.options()),
                             .k_BTHK = at::empty(k_BTHK.sizes(), k_BTHK.options()),
                             .v_BTHK = at::empty(v_BTHK.sizes(), v_BTHK.options())};
  const auto* log_sum_exp = attention.log_sum_exp.template const_data_ptr<Wide>();
  for_each_group<Element>(
      k_BTHK, sizes, [&](std::int64_t b, std::int64_t g, Scratch<Element>& scratch) {
        const Head<Element> k_gradient = mutable_head_of<Element>(gradient.k_BTHK, b, g);
        const Head<Element> v_gradient = mutable_head_of<Element>(gradient.v_BTHK, b, g);
        std::vector<Wide> sums;
        Head<Wide> k_sums, v_sums;
        if constexpr (Scratch<Element>::kNarrow) {
          sums.resize(static_cast<std::size_t>(2 * sizes.tokens * sizes.head));
          k_sums = {sums.data(), sizes.head};
          v_sums = {sums.data() + sizes.tokens * sizes.head, sizes.head};
        } else {
          k_sums = k_gradient;
          v_sums = v_gradient;
        }
        for (std::int64_t h = g * sizes.group; h < (g + 1) * sizes.group; ++h) {
          backward<Element>(sizes,
                            {.out_gradient = head_of<Element>(gradient_BTHK, b, h),
                             .q = head_of<Element>(q_BTHK, b, h),
                             .k = head_of<Element>(k_BTHK, b, g),
                             .v = head_of<Element>(v_BTHK, b, g),
                             .out = head_of<Element>(attention.out_BTHK, b, h),
                             .log_sum_exp = log_sum_exp + (b * q_BTHK.size(2) + h) * sizes.tokens,
                             .q_gradient = mutable_head_of<Element>(gradient.q_BTHK, b, h),
                             .k_gradient = k_sums,
                             .v_gradient = v_sums,
                             .first_of_group = h == g * sizes.group},
                            scratch);
        }
        if constexpr (Scratch<Element>::kNarrow) {
          kernels::rounded(k_sums.data, sizes.tokens, sizes.head, k_gradient.data,
                           k_gradient.stride);
          kernels::rounded(v_sums.data, sizes.tokens, sizes.head, v_gradient.data,
                           v_gradient.stride);
        }
      });
  return gradient;
}

// `tokens`: of x.
void check(const at::Tensor& x_BTHK, const at::Tensor& q_BTHK, std::int64_t tokens) {
  DYNMO_CHECK(x_BTHK.is_cpu() && x_BTHK.dim() == 4 && x_BTHK.stride(3) == 1 &&
                  x_BTHK.scalar_type() == q_BTHK.scalar_type() && x_BTHK.size(1) == tokens &&
                  x_BTHK.size(3) == q_BTHK.size(3) && q_BTHK.size(2) % x_BTHK.size(2) == 0,
              "x_BTHK on the CPU, heads apart, tokens and head size of q, got {} for {}",
              fmt::join(x_BTHK.sizes(), "x"), fmt::join(q_BTHK.sizes(), "x"));
}

}  // namespace

bool has_blocked_attention(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return has_products<float>();
    case at::kDouble:
      return has_products<double>();
    case at::kBFloat16:
      return has_products<c10::BFloat16>();
    default:
      return false;
  }
}

Attention blocked_attention(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                            const at::Tensor& v_BTHK) {
  check(q_BTHK, q_BTHK, q_BTHK.size(1));
  for (const at::Tensor* x : {&k_BTHK, &v_BTHK}) {
    check(*x, q_BTHK, std::max(q_BTHK.size(1), k_BTHK.size(1)));
  }
  switch (q_BTHK.scalar_type()) {
    case at::kFloat:
      return attention_of<float>(q_BTHK, k_BTHK, v_BTHK);
    case at::kDouble:
      return attention_of<double>(q_BTHK, k_BTHK, v_BTHK);
    default:
      return attention_of<c10::BFloat16>(q_BTHK, k_BTHK, v_BTHK);
  }
}

AttentionGradient blocked_attention_gradient(const at::Tensor& gradient_BTHK,
                                             const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                                             const at::Tensor& v_BTHK, const Attention& attention) {
  for (const at::Tensor* x : {&gradient_BTHK, &q_BTHK, &k_BTHK, &v_BTHK}) {
    check(*x, q_BTHK, q_BTHK.size(1));
  }
  switch (q_BTHK.scalar_type()) {
    case at::kFloat:
      return gradient_of<float>(gradient_BTHK, q_BTHK, k_BTHK, v_BTHK, attention);
    case at::kDouble:
      return gradient_of<double>(gradient_BTHK, q_BTHK, k_BTHK, v_BTHK, attention);
    default:
      return gradient_of<c10::BFloat16>(gradient_BTHK, q_BTHK, k_BTHK, v_BTHK, attention);
  }
}

}  // namespace dynmo::model
