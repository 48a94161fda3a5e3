// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/loops.h"

#include <algorithm>
#include <cmath>
#include <limits>

// These are names of extensions, because g++ inlines no function into one of another architecture.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DYNMO_EACH_INSTRUCTION_SET __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define DYNMO_EACH_INSTRUCTION_SET
#endif
#define DYNMO_INLINE [[gnu::always_inline]] inline

namespace dynmo::kernels::loops {
namespace {

#include "dynmo/kernels/exponential_impl.h"

constexpr std::int64_t kLanes = 32;  // running sums of a row: enough to hide an addition's latency

DYNMO_INLINE double exponential(double x) { return std::exp(x); }

// Returns the sum of term(i) over 0 <= i < count.
template <typename Sum, typename Term>
DYNMO_INLINE Sum sum_of(std::int64_t count, Term term) {
  Sum lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (std::int64_t lane = 0; i + lane < count; ++lane) lanes[lane] += term(i + lane);
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <typename Element>
DYNMO_INLINE Wide<Element> wide(Element x) {
  return static_cast<Wide<Element>>(x);
}

template <typename E>
DYNMO_INLINE Wide<E> highest_of(const E* x, std::int64_t count) {
  Wide<E> lanes[kLanes];
  std::fill_n(lanes, kLanes, wide(x[0]));
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const Wide<E> element = wide(x[i + lane]);
      lanes[lane] = lanes[lane] < element ? element : lanes[lane];
    }
  }
  for (; i < count; ++i) lanes[0] = std::max(lanes[0], wide(x[i]));
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::int64_t lane = 0; lane < half; ++lane) {
      lanes[lane] = lanes[lane] < lanes[lane + half] ? lanes[lane + half] : lanes[lane];
    }
  }
  return lanes[0];
}

template <typename E>
DYNMO_INLINE void rstd_rows(const E* x, std::int64_t rows, std::int64_t width, double epsilon,
                            Wide<E>* inverse) {
  for (std::int64_t n = 0; n < rows; ++n, x += width) {
    const auto squares = sum_of<Wide<E>>(
        width, [x](std::int64_t d)
                   __attribute__((always_inline)) { return wide(x[d]) * wide(x[d]); });
    inverse[n] = Wide<E>(1) /
                 std::sqrt(squares / static_cast<Wide<E>>(width) + static_cast<Wide<E>>(epsilon));
  }
}

template <typename E>
DYNMO_INLINE void normed_rows(const E* __restrict x, const Wide<E>* inverse,
                              const E* __restrict weight, std::int64_t rows, std::int64_t width,
                              E* __restrict y) {
  for (std::int64_t n = 0; n < rows; ++n, x += width, y += width) {
    const Wide<E> scale = inverse[n];
    for (std::int64_t d = 0; d < width; ++d) {
      y[d] = static_cast<E>(wide(x[d]) * scale * wide(weight[d]));
    }
  }
}

// With u = x * inverse: dweight = sum_N(dy * u), dx = inverse * (dy * w - u * mean_D(dy * w * u)).
template <typename E>
DYNMO_INLINE void norm_gradient_rows(const E* __restrict gradient, const E* __restrict x,
                                     const Wide<E>* inverse, const E* __restrict weight,
                                     const E* __restrict residual, std::int64_t rows,
                                     std::int64_t width, E* __restrict x_gradient,
                                     Wide<E>* __restrict weight_gradient,
                                     Wide<E>* __restrict partial) {
  constexpr std::int64_t kBlock = 32;  // rows of a partial sum, which keeps fp32 sums accurate
  std::fill_n(weight_gradient, width, Wide<E>(0));
  std::fill_n(partial, width, Wide<E>(0));
  for (std::int64_t n = 0; n < rows; ++n, gradient += width, x += width) {
    const Wide<E> scale = inverse[n];
    for (std::int64_t d = 0; d < width; ++d) {
      partial[d] += wide(gradient[d]) * (wide(x[d]) * scale);
    }
    if (n % kBlock == kBlock - 1 || n + 1 == rows) {
      for (std::int64_t d = 0; d < width; ++d) {
        weight_gradient[d] += partial[d];
        partial[d] = 0;
      }
    }
    if (x_gradient == nullptr) continue;
    const auto product = sum_of<Wide<E>>(
        width, [ gradient, x, weight, scale ](std::int64_t d) __attribute__((always_inline)) {
          return wide(gradient[d]) * wide(weight[d]) * (wide(x[d]) * scale);
        });
    const Wide<E> mean = product / static_cast<Wide<E>>(width);
    if (residual != nullptr) {
      for (std::int64_t d = 0; d < width; ++d) {
        const Wide<E> slope =
            scale * (wide(gradient[d]) * wide(weight[d]) - wide(x[d]) * scale * mean);
        x_gradient[d] = static_cast<E>(slope + wide(residual[d]));
      }
      residual += width;
    } else {
      for (std::int64_t d = 0; d < width; ++d) {
        x_gradient[d] = static_cast<E>(
            scale * (wide(gradient[d]) * wide(weight[d]) - wide(x[d]) * scale * mean));
      }
    }
    x_gradient += width;
  }
}

template <typename E>
DYNMO_INLINE void swiglu_loop(const E* __restrict gate, const E* __restrict up, std::int64_t count,
                              E* __restrict product) {
  for (std::int64_t i = 0; i < count; ++i) {
    const Wide<E> g = wide(gate[i]);
    product[i] = static_cast<E>(g / (Wide<E>(1) + exponential(-g)) * wide(up[i]));
  }
}

// silu(g) = g s with s = 1 / (1 + e^-g); its derivative is s (1 + g (1 - s)).
template <typename E>
DYNMO_INLINE void swiglu_gradient_loop(E* __restrict gate, E* __restrict up, E* __restrict product,
                                       std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const Wide<E> g = wide(gate[i]);
    const Wide<E> u = wide(up[i]);
    const Wide<E> slope = wide(product[i]);
    const Wide<E> s = Wide<E>(1) / (Wide<E>(1) + exponential(-g));
    const Wide<E> silu = g * s;
    product[i] = static_cast<E>(silu * u);
    up[i] = static_cast<E>(silu * slope);
    gate[i] = static_cast<E>(slope * u * (s * (Wide<E>(1) + g * (Wide<E>(1) - s))));
  }
}

template <typename E>
DYNMO_INLINE double cross_entropy_rows(E* scores, const std::int64_t* targets, std::int64_t rows,
                                       std::int64_t width) {
  double total = 0;
  for (std::int64_t n = 0; n < rows; ++n, scores += width) {
    const Wide<E> highest = highest_of(scores, width);
    const Wide<E> target = wide(scores[targets[n]]) - highest;
    Wide<E> sum;
    if constexpr (std::is_same_v<E, Wide<E>>) {
      sum = sum_of<E>(
          width, [ scores, highest ](std::int64_t i) __attribute__((always_inline)) {
            return scores[i] = exponential(scores[i] - highest);
          });
      const E inverse = E(1) / sum;
      for (std::int64_t i = 0; i < width; ++i) scores[i] *= inverse;
    } else {
      // Computes exponentials twice, so that a probability is rounded to the element only once.
      sum = sum_of<Wide<E>>(
          width, [ scores, highest ](std::int64_t i) __attribute__((always_inline)) {
            return exponential(wide(scores[i]) - highest);
          });
      const Wide<E> inverse = Wide<E>(1) / sum;
      for (std::int64_t i = 0; i < width; ++i) {
        scores[i] = static_cast<E>(exponential(wide(scores[i]) - highest) * inverse);
      }
    }
    total += std::log(static_cast<double>(sum)) - static_cast<double>(target);
  }
  return total;
}

template <typename E>
DYNMO_INLINE void cross_entropy_gradient_rows(E* scores, const std::int64_t* targets,
                                              std::int64_t rows, std::int64_t width, double scale) {
  const auto factor = static_cast<Wide<E>>(scale);
  for (std::int64_t n = 0; n < rows; ++n, scores += width) {
    const Wide<E> of_target = (wide(scores[targets[n]]) - Wide<E>(1)) * factor;
    for (std::int64_t v = 0; v < width; ++v) scores[v] = static_cast<E>(wide(scores[v]) * factor);
    scores[targets[n]] = static_cast<E>(of_target);
  }
}

template <typename E>
DYNMO_INLINE void rotate_heads(E* x, const Wide<E>* __restrict cosine,
                               const Wide<E>* __restrict sine, Wide<E> sign, std::int64_t heads,
                               std::int64_t half) {
  for (std::int64_t h = 0; h < heads; ++h, x += 2 * half) {
    E* __restrict low = x;
    E* __restrict high = x + half;
    for (std::int64_t k = 0; k < half; ++k) {
      const Wide<E> first = wide(low[k]);
      const Wide<E> second = wide(high[k]);
      const Wide<E> turned = sign * sine[k];
      low[k] = static_cast<E>(first * cosine[k] - turned * second);
      high[k] = static_cast<E>(second * cosine[k] + turned * first);
    }
  }
}

// Sums whole rows, which is faster than parts. The keys that a row does not see add less than the
// last bit of the sum.
template <typename E>
DYNMO_INLINE void causal_softmax_rows(Wide<E>* scores, std::int64_t rows, const std::int64_t* seen,
                                      std::int64_t width, E* probabilities, Wide<E>* log_sum_exp) {
  for (std::int64_t t = 0; t < rows; ++t, scores += width, probabilities += width) {
    const std::int64_t count = seen[t];
    if (count == 0) {
      std::fill(probabilities, probabilities + width, E(0));
      log_sum_exp[t] = -std::numeric_limits<Wide<E>>::infinity();
      continue;
    }
    std::fill(scores + count, scores + width, -std::numeric_limits<Wide<E>>::infinity());
    const Wide<E> highest = highest_of(scores, width);
    const auto sum = sum_of<Wide<E>>(
        width, [ scores, highest ](std::int64_t i) __attribute__((always_inline)) {
          return scores[i] = exponential(scores[i] - highest);
        });
    const Wide<E> inverse = Wide<E>(1) / sum;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) probabilities[i] = static_cast<E>(scores[i] * inverse);
    std::fill(probabilities + count, probabilities + width, E(0));
    log_sum_exp[t] = highest + std::log(sum);
  }
}

template <typename E>
DYNMO_INLINE void causal_softmax_gradient_rows(const Wide<E>* scores, const Wide<E>* gradient,
                                               const Wide<E>* log_sum_exp,
                                               const Wide<E>* correction, std::int64_t rows,
                                               const std::int64_t* seen, std::int64_t width,
                                               E* probabilities, E* score_gradient) {
  for (std::int64_t t = 0; t < rows; ++t) {
    const std::int64_t count = seen[t];
    const Wide<E> shift = log_sum_exp[t];
    const Wide<E> less = correction[t];
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) {
      const Wide<E> p = exponential(scores[i] - shift);
      const Wide<E> slope = p * (gradient[i] - less);
      probabilities[i] = static_cast<E>(p);
      score_gradient[i] = static_cast<E>(slope);
    }
    std::fill(probabilities + count, probabilities + width, E(0));
    std::fill(score_gradient + count, score_gradient + width, E(0));
    scores += width;
    gradient += width;
    probabilities += width;
    score_gradient += width;
  }
}

template <typename E>
DYNMO_INLINE void row_products_rows(const E* a, std::int64_t a_stride, const E* b,
                                    std::int64_t b_stride, std::int64_t rows, std::int64_t width,
                                    Wide<E>* sums) {
  for (std::int64_t t = 0; t < rows; ++t, a += a_stride, b += b_stride) {
    sums[t] = sum_of<Wide<E>>(
        width, [ a, b ](std::int64_t k)
                   __attribute__((always_inline)) { return wide(a[k]) * wide(b[k]); });
  }
}

constexpr std::int64_t kMaxHashes = 64;  // computed together

template <typename E>
DYNMO_INLINE void highest_hash_rows(const E* x, std::int64_t stride, std::int64_t rows,
                                    std::int64_t width, const Wide<E>* directions,
                                    std::int64_t hashes, std::int32_t* highest) {
  for (std::int64_t t = 0; t < rows; ++t, x += stride) {
    Wide<E> best = -std::numeric_limits<Wide<E>>::infinity();
    std::int64_t found = 0;
    for (std::int64_t first = 0; first < hashes; first += kMaxHashes) {
      const std::int64_t count = std::min(kMaxHashes, hashes - first);
      Wide<E> sums[kMaxHashes] = {};
      for (std::int64_t k = 0; k < width; ++k) {
        const Wide<E> factor = wide(x[k]);
        const Wide<E>* __restrict direction = directions + k * hashes + first;
        for (std::int64_t h = 0; h < count; ++h) sums[h] += factor * direction[h];
      }
      for (std::int64_t h = 0; h < count; ++h) {
        const bool behind = sums[h] < 0;
        const Wide<E> size = behind ? -sums[h] : sums[h];
        if (size > best) {
          best = size;
          found = 2 * (first + h) + (behind ? 1 : 0);
        }
      }
    }
    highest[t] = static_cast<std::int32_t>(found);
  }
}

template <typename E>
DYNMO_INLINE void rounded_rows(const Wide<E>* __restrict x, std::int64_t rows, std::int64_t width,
                               E* __restrict y, std::int64_t stride) {
  for (std::int64_t t = 0; t < rows; ++t, x += width, y += stride) {
    for (std::int64_t k = 0; k < width; ++k) y[k] = static_cast<E>(x[k]);
  }
}

}  // namespace

#define DYNMO_DEFINE_KERNELS(E)                                                                    \
  DYNMO_EACH_INSTRUCTION_SET void rstd(const E* x, std::int64_t rows, std::int64_t width,          \
                                       double epsilon, Wide<E>* inverse) {                         \
    rstd_rows(x, rows, width, epsilon, inverse);                                                   \
  }                                                                                                \
  DYNMO_EACH_INSTRUCTION_SET void rms_norm(const E* x, const Wide<E>* inverse, const E* weight,    \
                                           std::int64_t rows, std::int64_t width, E* y) {          \
    normed_rows(x, inverse, weight, rows, width, y);                                               \
  }                                                                                                \
  DYNMO_EACH_INSTRUCTION_SET void norm_gradient(                                                   \
      const E* gradient, const E* x, const Wide<E>* inverse, const E* weight, const E* residual,   \
      std::int64_t rows, std::int64_t width, E* x_gradient, Wide<E>* weight_gradient,              \
      Wide<E>* partial) {                                                                          \
    norm_gradient_rows(gradient, x, inverse, weight, residual, rows, width, x_gradient,            \
                       weight_gradient, partial);                                                  \
  }                                                                                                \
  DYNMO_EACH_INSTRUCTION_SET void swiglu(const E* gate, const E* up, std::int64_t count,           \
                                         E* product) {                                             \
    swiglu_loop(gate, up, count, product);                                                         \
  }                                                                                                \
  DYNMO_EACH_INSTRUCTION_SET void swiglu_gradient(E* gate, E* up, E* product,                      \
                                                  std::int64_t count) {                            \
    swiglu_gradient_loop(gate, up, product, count);                                                \
  }                                                                                                \
  DYNMO_EACH_INSTRUCTION_SET double cross_entropy(E* scores, const std::int64_t* targets,          \
                                                  std::int64_t rows, std::int64_t width) {         \
    return cross_entropy_rows(scores, targets, rows, width);                                       \
  }                                                                                                \
  DYNMO_EACH_INSTRUCTION_SET void cross_entropy_gradient(E* scores, const std::int64_t* targets,   \
                                                         std::int64_t rows, std::int64_t width,    \
                                                         double scale) {                           \
    cross_entropy_gradient_rows(scores, targets, rows, width, scale);                              \
  }                                                                                                \
  DYNMO_EACH_INSTRUCTION_SET void apply_rope(E* x, const Wide<E>* cosine, const Wide<E>* sine,     \
                                             Wide<E> sign, std::int64_t heads,                     \
                                             std::int64_t half) {                                  \
    rotate_heads(x, cosine, sine, sign, heads, half);                                              \
  }                                                                                                \
  DYNMO_EACH_INSTRUCTION_SET void causal_softmax(Wide<E>* scores, std::int64_t rows,               \
                                                 const std::int64_t* seen, std::int64_t width,     \
                                                 E* probabilities, Wide<E>* log_sum_exp) {         \
    causal_softmax_rows(scores, rows, seen, width, probabilities, log_sum_exp);                    \
  }                                                                                                \
  DYNMO_EACH_INSTRUCTION_SET void causal_softmax_gradient(                                         \
      const Wide<E>* scores, const Wide<E>* gradient, const Wide<E>* log_sum_exp,                  \
      const Wide<E>* correction, std::int64_t rows, const std::int64_t* seen, std::int64_t width,  \
      E* probabilities, E* score_gradient) {                                                       \
    causal_softmax_gradient_rows(scores, gradient, log_sum_exp, correction, rows, seen, width,     \
                                 probabilities, score_gradient);                                   \
  }                                                                                                \
  DYNMO_EACH_INSTRUCTION_SET void row_products(const E* a, std::int64_t a_stride, const E* b,      \
                                               std::int64_t b_stride, std::int64_t rows,           \
                                               std::int64_t width, Wide<E>* sums) {                \
    row_products_rows(a, a_stride, b, b_stride, rows, width, sums);                                \
  }                                                                                                \
  DYNMO_EACH_INSTRUCTION_SET void highest_hash(const E* x, std::int64_t stride, std::int64_t rows, \
                                               std::int64_t width, const Wide<E>* directions,      \
                                               std::int64_t hashes, std::int32_t* highest) {       \
    highest_hash_rows(x, stride, rows, width, directions, hashes, highest);                        \
  }                                                                                                \
  DYNMO_EACH_INSTRUCTION_SET void rounded(const Wide<E>* x, std::int64_t rows, std::int64_t width, \
                                          E* y, std::int64_t stride) {                             \
    rounded_rows(x, rows, width, y, stride);                                                       \
  }

DYNMO_DEFINE_KERNELS(float)
DYNMO_DEFINE_KERNELS(double)
DYNMO_DEFINE_KERNELS(c10::BFloat16)

}  // namespace dynmo::kernels::loops
