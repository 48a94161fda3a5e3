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

namespace dynmo::model::kernels {

template <typename Element>
using Wide = std::conditional_t<std::is_same_v<Element, double>, double, float>;

// The functions for one type of element; kernels.cpp has them for three.
#define DYNMO_MODEL_KERNELS(Element)                                                             \
  /* inverse[n] = 1 / sqrt(mean_D(x^2) + epsilon). */                                            \
  void inverse_rms(const Element* x, std::int64_t rows, std::int64_t width, double epsilon,      \
                   Wide<Element>* inverse);                                                      \
  /* y = x * inverse * weight. */                                                                \
  void normed(const Element* x, const Wide<Element>* inverse, const Element* weight,             \
              std::int64_t rows, std::int64_t width, Element* y);                                \
  /* Gradients of normed(): weight_gradient[D] is set; x_gradient, where it is not null, is set  \
     to the gradient of x plus `residual`, where that is not null. `partial` is room for D. */   \
  void norm_gradient(const Element* gradient, const Element* x, const Wide<Element>* inverse,    \
                     const Element* weight, const Element* residual, std::int64_t rows,          \
                     std::int64_t width, Element* x_gradient, Wide<Element>* weight_gradient,    \
                     Wide<Element>* partial);                                                    \
  /* product = silu(gate) * up. */                                                               \
  void silu_times(const Element* gate, const Element* up, std::int64_t count, Element* product); \
  /* From gate, up and the gradient of product to their gradients and the product, in place. */  \
  void silu_times_gradient(Element* gate, Element* up, Element* product, std::int64_t count);    \
  /* From scores to probabilities, in place. Returns the sum of -log(probability of target). */  \
  double cross_entropy(Element* scores, const std::int64_t* targets, std::int64_t rows,          \
                       std::int64_t width);                                                      \
  /* From probabilities to scale * (probabilities - one-hot of target), in place. */             \
  void cross_entropy_gradient(Element* scores, const std::int64_t* targets, std::int64_t rows,   \
                              std::int64_t width, double scale);                                 \
  /* One token's heads: pairs (k, k + half) turned by the angle of cosine[k], sign * sine[k]. */ \
  void rotate(Element* x, const Wide<Element>* cosine, const Wide<Element>* sine,                \
              Wide<Element> sign, std::int64_t heads, std::int64_t half);

DYNMO_MODEL_KERNELS(float)
DYNMO_MODEL_KERNELS(double)
DYNMO_MODEL_KERNELS(c10::BFloat16)

}  // namespace dynmo::model::kernels
