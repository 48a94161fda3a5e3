// SPDX-License-Identifier: Apache-2.0
#pragma once

// Element-wise loops of operations.cpp. Each passes over its rows once. A chain of libtorch's
// operations takes three to eight passes, and a temporary for each. One thread; rows are
// contiguous.
//
// Every loop exists for the instruction sets of the machine (avx512f, avx2, any), chosen when the
// program is loaded. Sums are taken in one order that is written out. So results depend on the
// instruction set only by whether it fuses a product with a sum. Elements are float, double or
// c10::BFloat16. Arithmetic and statistics are in Wide: double for double, and float for the
// others.
//
// Dimensions: N rows of D (hidden), F (of an MLP) or V (vocabulary) elements.

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <type_traits>

namespace dynmo::kernels::loops {

template <typename Element>
using Wide = std::conditional_t<std::is_same_v<Element, double>, double, float>;

// The functions for one type of element. There are three types (loops.cpp).
#define DYNMO_LOOPS(Element)                                                                      \
  /* Sets inverse[n] = 1 / sqrt(mean_D(x^2) + epsilon). */                                        \
  void rstd(const Element* x, std::int64_t rows, std::int64_t width, double epsilon,              \
            Wide<Element>* inverse);                                                              \
  /* Sets y = x * inverse * weight. */                                                            \
  void rms_norm(const Element* x, const Wide<Element>* inverse, const Element* weight,            \
                std::int64_t rows, std::int64_t width, Element* y);                               \
  /* Sets the gradients of rms_norm(). If x_gradient is not null, it becomes the gradient of x    \
     plus `residual`, if that is not null. `partial` has room for D elements. */                  \
  void norm_gradient(const Element* gradient, const Element* x, const Wide<Element>* inverse,     \
                     const Element* weight, const Element* residual, std::int64_t rows,           \
                     std::int64_t width, Element* x_gradient, Wide<Element>* weight_gradient,     \
                     Wide<Element>* partial);                                                     \
  /* Sets product = silu(gate) * up. */                                                           \
  void swiglu(const Element* gate, const Element* up, std::int64_t count, Element* product);      \
  /* Replaces gate and up by their gradients, and the gradient of product by the product. */      \
  void swiglu_gradient(Element* gate, Element* up, Element* product, std::int64_t count);         \
  /* Replaces scores by probabilities. Returns the sum of -log(probability of target). */         \
  double cross_entropy(Element* scores, const std::int64_t* targets, std::int64_t rows,           \
                       std::int64_t width);                                                       \
  /* Replaces probabilities by scale * (probabilities - one-hot of target). */                    \
  void cross_entropy_gradient(Element* scores, const std::int64_t* targets, std::int64_t rows,    \
                              std::int64_t width, double scale);                                  \
  /* Rotates pairs (k, k + half) of a token's heads by the angle (cosine[k], sign * sine[k]). */  \
  void apply_rope(Element* x, const Wide<Element>* cosine, const Wide<Element>* sine,             \
                  Wide<Element> sign, std::int64_t heads, std::int64_t half);                     \
  /* Computes the causal softmax of `rows` rows of scores. Row t sees the first `seen[t]` of      \
     `width`. Sets the probabilities, which are zero where not seen and may be in the scores'     \
     memory. Sets the logarithm of each row's sum of exponentials. Scores are lost. A row that    \
     sees none has probabilities of 0. */                                                         \
  void causal_softmax(Wide<Element>* scores, std::int64_t rows, const std::int64_t* seen,         \
                      std::int64_t width, Element* probabilities, Wide<Element>* log_sum_exp);    \
  /* Recomputes the probabilities p from scores and log_sum_exp. From their gradient g makes      \
     that of the scores: p * (g - correction[t]). Both results may overwrite their inputs. */     \
  void causal_softmax_gradient(const Wide<Element>* scores, const Wide<Element>* gradient,        \
                               const Wide<Element>* log_sum_exp, const Wide<Element>* correction, \
                               std::int64_t rows, const std::int64_t* seen, std::int64_t width,   \
                               Element* probabilities, Element* score_gradient);                  \
  /* Sets sums[t] = sum_K(a * b) of rows that start `a_stride` and `b_stride` apart. */           \
  void row_products(const Element* a, std::int64_t a_stride, const Element* b,                    \
                    std::int64_t b_stride, std::int64_t rows, std::int64_t width,                 \
                    Wide<Element>* sums);                                                         \
  /* Sets highest[t] = 2 h + (1 if x direction_h < 0). h has the largest |x direction_h| and is   \
     the lowest of equals. directions: [width, hashes]. Sums are in the order of `width`. */      \
  void highest_hash(const Element* x, std::int64_t stride, std::int64_t rows, std::int64_t width, \
                    const Wide<Element>* directions, std::int64_t hashes, std::int32_t* highest); \
  /* Rounds the rows of x, which are contiguous, to those of y, `stride` apart. */                \
  void rounded(const Wide<Element>* x, std::int64_t rows, std::int64_t width, Element* y,         \
               std::int64_t stride);

DYNMO_LOOPS(float)
DYNMO_LOOPS(double)
DYNMO_LOOPS(c10::BFloat16)

}  // namespace dynmo::kernels::loops
