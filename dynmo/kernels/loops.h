// SPDX-License-Identifier: Apache-2.0
#pragma once

// Element-wise loops of operations.cpp: each passes over its rows once, where a chain of libtorch's
// operations takes three to eight passes and as many temporaries. One thread; rows are contiguous.
//
// Every loop exists for the instruction sets of the machine (avx512f, avx2, any), chosen when the
// program is loaded. Sums are taken in one order that is written out, so results depend on the
// instruction set only by whether it fuses a product with a sum. Elements are float, double or
// c10::BFloat16; arithmetic and what is kept beside them is in Wide: float, for double double.
//
// Dimensions: N rows of D (hidden), F (of an MLP) or V (vocabulary) elements.

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <type_traits>

namespace dynmo::kernels::loops {

template <typename Element>
using Wide = std::conditional_t<std::is_same_v<Element, double>, double, float>;

// The functions for one type of element; kernels.cpp has them for three.
#define DYNMO_LOOPS(Element)                                                                      \
  /* inverse[n] = 1 / sqrt(mean_D(x^2) + epsilon). */                                             \
  void rstd(const Element* x, std::int64_t rows, std::int64_t width, double epsilon,              \
            Wide<Element>* inverse);                                                              \
  /* y = x * inverse * weight. */                                                                 \
  void rms_norm(const Element* x, const Wide<Element>* inverse, const Element* weight,            \
                std::int64_t rows, std::int64_t width, Element* y);                               \
  /* Gradients of rms_norm(): weight_gradient[D] is set; x_gradient, where it is not null, is set \
     to the gradient of x plus `residual`, where that is not null. `partial` is room for D. */    \
  void norm_gradient(const Element* gradient, const Element* x, const Wide<Element>* inverse,     \
                     const Element* weight, const Element* residual, std::int64_t rows,           \
                     std::int64_t width, Element* x_gradient, Wide<Element>* weight_gradient,     \
                     Wide<Element>* partial);                                                     \
  /* product = silu(gate) * up. */                                                                \
  void swiglu(const Element* gate, const Element* up, std::int64_t count, Element* product);      \
  /* From gate, up and the gradient of product to their gradients and the product, in place. */   \
  void swiglu_gradient(Element* gate, Element* up, Element* product, std::int64_t count);         \
  /* From scores to probabilities, in place. Returns the sum of -log(probability of target). */   \
  double cross_entropy(Element* scores, const std::int64_t* targets, std::int64_t rows,           \
                       std::int64_t width);                                                       \
  /* From probabilities to scale * (probabilities - one-hot of target), in place. */              \
  void cross_entropy_gradient(Element* scores, const std::int64_t* targets, std::int64_t rows,    \
                              std::int64_t width, double scale);                                  \
  /* One token's heads: pairs (k, k + half) turned by the angle of cosine[k], sign * sine[k]. */  \
  void apply_rope(Element* x, const Wide<Element>* cosine, const Wide<Element>* sine,             \
                  Wide<Element> sign, std::int64_t heads, std::int64_t half);                     \
  /* Causal softmax of `rows` rows of scores, of which row t sees the first `seen[t]` of          \
     `width`: sets the probabilities (zero where not seen; they may lie in the scores' memory)    \
     and the logarithm of each row's sum of exponentials. Scores are lost. A row that sees none   \
     has probabilities of 0. */                                                                   \
  void causal_softmax(Wide<Element>* scores, std::int64_t rows, const std::int64_t* seen,         \
                      std::int64_t width, Element* probabilities, Wide<Element>* log_sum_exp);    \
  /* Recomputes the probabilities p from scores and log_sum_exp, and from their gradient g makes  \
     that of the scores: p * (g - correction[t]). Both results may lie in the memory of what      \
     they are made from. */                                                                       \
  void causal_softmax_gradient(const Wide<Element>* scores, const Wide<Element>* gradient,        \
                               const Wide<Element>* log_sum_exp, const Wide<Element>* correction, \
                               std::int64_t rows, const std::int64_t* seen, std::int64_t width,   \
                               Element* probabilities, Element* score_gradient);                  \
  /* sums[t] = sum_K(a * b), of rows that lie `a_stride` and `b_stride` apart. */                 \
  void row_products(const Element* a, std::int64_t a_stride, const Element* b,                    \
                    std::int64_t b_stride, std::int64_t rows, std::int64_t width,                 \
                    Wide<Element>* sums);                                                         \
  /* highest[t] = 2 h + (1 if x direction_h < 0), of the h with the largest |x direction_h|, the  \
     lowest of equals. directions: [width, hashes]. Sums in the order of `width`. */              \
  void highest_hash(const Element* x, std::int64_t stride, std::int64_t rows, std::int64_t width, \
                    const Wide<Element>* directions, std::int64_t hashes, std::int32_t* highest); \
  /* Rows of y, `stride` apart, from those of x, which lie together. */                           \
  void rounded(const Wide<Element>* x, std::int64_t rows, std::int64_t width, Element* y,         \
               std::int64_t stride);

DYNMO_LOOPS(float)
DYNMO_LOOPS(double)
DYNMO_LOOPS(c10::BFloat16)

}  // namespace dynmo::kernels::loops
