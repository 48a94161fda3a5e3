// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <type_traits>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/kernels/attention_blocks_impl.h"
#include "dynmo/kernels/attention_impl.h"
#include "dynmo/kernels/ragged_attention.h"

namespace dynmo::kernels {
namespace {

using namespace blocks;  // NOLINT: the halves of one file

template <typename Element>
Attention attention_of(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK, const at::Tensor& v_BTHK,
                       const Sections& sections) {
  using Wide = loops::Wide<Element>;
  const Sizes sizes(q_BTHK, k_BTHK);
  const std::int64_t tokens = q_BTHK.size(1);
  Attention attention{
      .out_BTHK = at::empty(q_BTHK.sizes(), q_BTHK.options()),
      .log_sum_exp = at::empty({q_BTHK.size(0), q_BTHK.size(2), tokens},
                               q_BTHK.options().dtype(accumulation_type(q_BTHK.scalar_type())))};
  auto* log_sum_exp = attention.log_sum_exp.template mutable_data_ptr<Wide>();
  for_each_group<Element>(
      sections, k_BTHK.size(2), sizes,
      [&](const Section& section, std::int64_t g, Scratch<Element>& scratch) {
        for (std::int64_t h = g * sizes.group; h < (g + 1) * sizes.group; ++h) {
          forward(sizes, section, head_of<Element>(q_BTHK, section.b, h, section.first_query),
                  head_of<Element>(k_BTHK, section.b, g, section.first_key),
                  head_of<Element>(v_BTHK, section.b, g, section.first_key),
                  mutable_head_of<Element>(attention.out_BTHK, section.b, h, section.first_query),
                  log_sum_exp + (section.b * q_BTHK.size(2) + h) * tokens + section.first_query,
                  scratch);
        }
      });
  return attention;
}

template <typename Element>
AttentionGradient gradient_of(const at::Tensor& gradient_BTHK, const at::Tensor& q_BTHK,
                              const at::Tensor& k_BTHK, const at::Tensor& v_BTHK,
                              const Attention& attention, const Sections& sections) {
  using Wide = loops::Wide<Element>;
  const Sizes sizes(q_BTHK, k_BTHK);
  const std::int64_t tokens = q_BTHK.size(1);
  AttentionGradient gradient{.q_BTHK = at::empty(q_BTHK.sizes(), q_BTHK.options()),
                             .k_BTHK = at::empty(k_BTHK.sizes(), k_BTHK.options()),
                             .v_BTHK = at::empty(v_BTHK.sizes(), v_BTHK.options())};
  const auto* log_sum_exp = attention.log_sum_exp.template const_data_ptr<Wide>();
  for_each_group<Element>(
      sections, k_BTHK.size(2), sizes,
      [&](const Section& section, std::int64_t g, Scratch<Element>& scratch) {
        const auto query_head = [&](const at::Tensor& x, std::int64_t h) {
          return head_of<Element>(x, section.b, h, section.first_query);
        };
        const Head<Element> k_gradient =
            mutable_head_of<Element>(gradient.k_BTHK, section.b, g, section.first_key);
        const Head<Element> v_gradient =
            mutable_head_of<Element>(gradient.v_BTHK, section.b, g, section.first_key);
        std::vector<Wide> sums;
        Head<Wide> k_sums, v_sums;
        if constexpr (Scratch<Element>::kNarrow) {
          sums.resize(static_cast<std::size_t>(2 * section.keys * sizes.head));
          k_sums = {sums.data(), sizes.head};
          v_sums = {sums.data() + section.keys * sizes.head, sizes.head};
        } else {
          k_sums = k_gradient;
          v_sums = v_gradient;
        }
        for (std::int64_t h = g * sizes.group; h < (g + 1) * sizes.group; ++h) {
          backward<Element>(
              sizes, section,
              {.out_gradient = query_head(gradient_BTHK, h),
               .q = query_head(q_BTHK, h),
               .k = head_of<Element>(k_BTHK, section.b, g, section.first_key),
               .v = head_of<Element>(v_BTHK, section.b, g, section.first_key),
               .out = query_head(attention.out_BTHK, h),
               .log_sum_exp =
                   log_sum_exp + (section.b * q_BTHK.size(2) + h) * tokens + section.first_query,
               .q_gradient =
                   mutable_head_of<Element>(gradient.q_BTHK, section.b, h, section.first_query),
               .k_gradient = k_sums,
               .v_gradient = v_sums,
               .first_of_group = h == g * sizes.group},
              scratch);
        }
        if constexpr (Scratch<Element>::kNarrow) {
          loops::rounded(k_sums.data, section.keys, sizes.head, k_gradient.data, k_gradient.stride);
          loops::rounded(v_sums.data, section.keys, sizes.head, v_gradient.data, v_gradient.stride);
        }
      });
  return gradient;
}

// Whole sequences as sections. Queries belong to the last keys, and each sees the keys up to its
// own.
class WholeSequences {
 public:
  WholeSequences(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK)
      : seen_(static_cast<std::size_t>(q_BTHK.size(1))) {
    const std::int64_t keys = k_BTHK.size(1);
    std::iota(seen_.begin(), seen_.end(), keys - q_BTHK.size(1) + 1);
    for (std::int64_t b = 0; b < q_BTHK.size(0); ++b) {
      sections_.push_back({.b = b, .queries = q_BTHK.size(1), .keys = keys, .seen = seen_.data()});
    }
  }
  WholeSequences(const WholeSequences&) = delete;
  WholeSequences& operator=(const WholeSequences&) = delete;
  [[nodiscard]] const Sections& sections() const { return sections_; }

 private:
  std::vector<std::int64_t> seen_;
  Sections sections_;
};

// Checks x, which must have `tokens` tokens, against q.
void check(const at::Tensor& x_BTHK, const at::Tensor& q_BTHK, std::int64_t tokens) {
  DYNMO_CHECK(x_BTHK.is_cpu() && x_BTHK.dim() == 4 && x_BTHK.stride(3) == 1 &&
                  x_BTHK.scalar_type() == q_BTHK.scalar_type() && x_BTHK.size(1) == tokens &&
                  x_BTHK.size(3) == q_BTHK.size(3) && q_BTHK.size(2) % x_BTHK.size(2) == 0,
              "x_BTHK on the CPU, heads apart, tokens and head size of q, got {} for {}",
              fmt::join(x_BTHK.sizes(), "x"), fmt::join(q_BTHK.sizes(), "x"));
}

Attention attention_of(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK, const at::Tensor& v_BTHK,
                       const Sections& sections) {
  switch (q_BTHK.scalar_type()) {
    case at::kFloat:
      return attention_of<float>(q_BTHK, k_BTHK, v_BTHK, sections);
    case at::kDouble:
      return attention_of<double>(q_BTHK, k_BTHK, v_BTHK, sections);
    default:
      return attention_of<c10::BFloat16>(q_BTHK, k_BTHK, v_BTHK, sections);
  }
}

AttentionGradient gradient_of(const at::Tensor& gradient_BTHK, const at::Tensor& q_BTHK,
                              const at::Tensor& k_BTHK, const at::Tensor& v_BTHK,
                              const Attention& attention, const Sections& sections) {
  switch (q_BTHK.scalar_type()) {
    case at::kFloat:
      return gradient_of<float>(gradient_BTHK, q_BTHK, k_BTHK, v_BTHK, attention, sections);
    case at::kDouble:
      return gradient_of<double>(gradient_BTHK, q_BTHK, k_BTHK, v_BTHK, attention, sections);
    default:
      return gradient_of<c10::BFloat16>(gradient_BTHK, q_BTHK, k_BTHK, v_BTHK, attention, sections);
  }
}

// Returns N rows as one sequence.
at::Tensor whole(const at::Tensor& x_NHK, at::ScalarType type) {
  return x_NHK.to(type).unsqueeze(0);
}

void check_rows(const RaggedRows& rows, const at::Tensor& x_NHK) {
  DYNMO_CHECK(!rows.offsets.empty() && rows.offsets.front() == 0 &&
                  rows.offsets.back() == x_NHK.size(0) &&
                  std::ssize(rows.positions) == x_NHK.size(0) &&
                  std::is_sorted(rows.offsets.begin(), rows.offsets.end()),
              "offsets from 0 to the {} rows, each with a position, got {} positions",
              x_NHK.size(0), rows.positions.size());
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

at::ScalarType product_type(at::ScalarType type) {
  return has_blocked_attention(type) ? type : at::kFloat;
}

Attention blocked_attention(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                            const at::Tensor& v_BTHK) {
  check(q_BTHK, q_BTHK, q_BTHK.size(1));
  for (const at::Tensor* x : {&k_BTHK, &v_BTHK}) {
    check(*x, q_BTHK, std::max(q_BTHK.size(1), k_BTHK.size(1)));
  }
  return attention_of(q_BTHK, k_BTHK, v_BTHK, WholeSequences(q_BTHK, k_BTHK).sections());
}

AttentionGradient blocked_attention_gradient(const at::Tensor& gradient_BTHK,
                                             const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                                             const at::Tensor& v_BTHK, const Attention& attention) {
  for (const at::Tensor* x : {&gradient_BTHK, &q_BTHK, &k_BTHK, &v_BTHK}) {
    check(*x, q_BTHK, q_BTHK.size(1));
  }
  return gradient_of(gradient_BTHK, q_BTHK, k_BTHK, v_BTHK, attention,
                     WholeSequences(q_BTHK, k_BTHK).sections());
}

std::int64_t pairs_of(const Ragged& ragged) { return RaggedSections(ragged).pairs(); }

RaggedAttention ragged_attention(const at::Tensor& q_NHK, const at::Tensor& k_MGK,
                                 const at::Tensor& v_MGK, const Ragged& ragged) {
  check_rows(ragged.queries, q_NHK);
  check_rows(ragged.keys, k_MGK);
  DYNMO_CHECK(ragged.queries.offsets.size() == ragged.keys.offsets.size(),
              "as many sections of keys as of queries, {}, got {}", ragged.queries.offsets.size(),
              ragged.keys.offsets.size());
  const at::ScalarType type = product_type(q_NHK.scalar_type());
  const RaggedSections sections(ragged);
  Attention attention =
      attention_of(whole(q_NHK, type), whole(k_MGK, type), whole(v_MGK, type), sections.sections());
  return {.out_NHK = attention.out_BTHK.squeeze(0).to(q_NHK.scalar_type()),
          .log_sum_exp = attention.log_sum_exp.squeeze(0)};
}

RaggedGradient ragged_attention_gradient(const at::Tensor& gradient_NHK, const at::Tensor& q_NHK,
                                         const at::Tensor& k_MGK, const at::Tensor& v_MGK,
                                         const RaggedAttention& attention, const Ragged& ragged) {
  const at::ScalarType type = product_type(q_NHK.scalar_type());
  const RaggedSections sections(ragged);
  const AttentionGradient gradient = gradient_of(
      whole(gradient_NHK, type), whole(q_NHK, type), whole(k_MGK, type), whole(v_MGK, type),
      {.out_BTHK = whole(attention.out_NHK, type),
       .log_sum_exp = attention.log_sum_exp.unsqueeze(0)},
      sections.sections());
  const auto back = [&](const at::Tensor& x_BTHK) {
    return x_BTHK.squeeze(0).to(q_NHK.scalar_type());
  };
  return {.q_NHK = back(gradient.q_BTHK),
          .k_MGK = back(gradient.k_BTHK),
          .v_MGK = back(gradient.v_BTHK)};
}

}  // namespace dynmo::kernels
