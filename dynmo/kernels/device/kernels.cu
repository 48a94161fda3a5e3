// SPDX-License-Identifier: Apache-2.0
// Kernels for operations that libtorch composes of several passes over memory. NVRTC compiles this
// text, after that of exponential_impl.h, for the device of a run (nvrtc.h). Tests compile it for
// the CPU, where the macros below are loops (tests/support/kernels_on_host.cpp).
//
// Results have the bits of the CPU's loops (loops.h, adamw_loops.cpp), except for sums over a row
// and over the rows for the weight of a norm, which have another order. The compiler must not fuse
// a product and a sum (--fmad=false), so only fmaf does. Each thread reads and writes 16 bytes at a
// time, so every tensor must start at a multiple of 16 bytes.

#ifdef __CUDACC_RTC__
#define KERNEL extern "C" __global__ void __launch_bounds__(kThreads)
#define SHARED __shared__
#define BLOCK static_cast<long long>(blockIdx.x)
// Runs for each i below `count`, divided over all threads of the launch.
#define EACH(i, count)                                                                         \
  for (long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x; i < (count); \
       i += static_cast<long long>(gridDim.x) * kThreads)
// Runs for each i below `count`, divided over the threads of one block.
#define EACH_OF_BLOCK(i, count) for (int i = threadIdx.x; i < (count); i += kThreads)
// Runs in each thread of a block, and ends with a barrier.
#define PHASE(thread) for (int thread = threadIdx.x, once = 1; once != 0; once = 0, __syncthreads())
#endif

template <typename E>
constexpr int kPack = 16 / sizeof(E);
template <typename E>
struct alignas(16) Pack {
  E at[kPack<E>];
};

struct Bf16 {
  unsigned short bits;
};

DYNMO_INLINE float wide(float x) { return x; }
DYNMO_INLINE float wide(Bf16 x) {
  return __builtin_bit_cast(float, static_cast<unsigned>(x.bits) << 16);
}
// Rounds to nearest, ties to even, as libtorch does.
DYNMO_INLINE void round_to(float& to, float x) { to = x; }
DYNMO_INLINE void round_to(Bf16& to, float x) {
  const unsigned bits = __builtin_bit_cast(unsigned, x);
  to.bits =
      static_cast<unsigned short>(x == x ? (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16 : 0x7FC0U);
}

template <typename E>
DYNMO_INLINE Pack<E>& pack(E* x, long long i) {
  return reinterpret_cast<Pack<E>*>(x)[i];
}
template <typename E>
DYNMO_INLINE const Pack<E>& pack(const E* x, long long i) {
  return reinterpret_cast<const Pack<E>*>(x)[i];
}

// product = silu(gate) * up.
template <typename E>
DYNMO_INLINE void swiglu_one(E gate, E up, E& product) {
  const float g = wide(gate);
  round_to(product, g / (1.0F + exponential(-g)) * wide(up));
}

template <typename E>
DYNMO_INLINE void swiglu(const E* gate, const E* up, E* product, long long count) {
  EACH(p, count / kPack<E>) {
    const Pack<E> g = pack(gate, p);
    const Pack<E> u = pack(up, p);
    Pack<E> result;
    for (int i = 0; i < kPack<E>; ++i) swiglu_one(g.at[i], u.at[i], result.at[i]);
    pack(product, p) = result;
  }
  const long long whole = count - count % kPack<E>;
  EACH(i, count - whole) swiglu_one(gate[whole + i], up[whole + i], product[whole + i]);
}
KERNEL swiglu_float(const float* gate, const float* up, float* product, long long count) {
  swiglu(gate, up, product, count);
}
KERNEL swiglu_bf16(const Bf16* gate, const Bf16* up, Bf16* product, long long count) {
  swiglu(gate, up, product, count);
}

// Replaces gate and up by their gradients, and the gradient of the product by the product. silu(g)
// = g s with s = 1 / (1 + e^-g). Its derivative is s (1 + g (1 - s)).
template <typename E>
DYNMO_INLINE void swiglu_gradient_one(E& gate, E& up, E& product) {
  const float g = wide(gate);
  const float u = wide(up);
  const float slope = wide(product);
  const float s = 1.0F / (1.0F + exponential(-g));
  const float silu = g * s;
  round_to(product, silu * u);
  round_to(up, silu * slope);
  round_to(gate, slope * u * (s * (1.0F + g * (1.0F - s))));
}

template <typename E>
DYNMO_INLINE void swiglu_gradient(E* gate, E* up, E* product, long long count) {
  EACH(p, count / kPack<E>) {
    Pack<E> g = pack(gate, p);
    Pack<E> u = pack(up, p);
    Pack<E> y = pack(product, p);
    for (int i = 0; i < kPack<E>; ++i) swiglu_gradient_one(g.at[i], u.at[i], y.at[i]);
    pack(gate, p) = g;
    pack(up, p) = u;
    pack(product, p) = y;
  }
  const long long whole = count - count % kPack<E>;
  EACH(i, count - whole) swiglu_gradient_one(gate[whole + i], up[whole + i], product[whole + i]);
}
KERNEL swiglu_gradient_float(float* gate, float* up, float* product, long long count) {
  swiglu_gradient(gate, up, product, count);
}
KERNEL swiglu_gradient_bf16(Bf16* gate, Bf16* up, Bf16* product, long long count) {
  swiglu_gradient(gate, up, product, count);
}

// Rotates the pairs (k, k + half) of a token's heads. Each block rotates one token. Its position in
// the sequence is the block's index modulo `tokens`.
template <typename E>
DYNMO_INLINE void rotate_one(E& low, E& high, float cosine, float sine) {
  const float first = wide(low);
  const float second = wide(high);
  round_to(low, first * cosine - sine * second);
  round_to(high, second * cosine + sine * first);
}

template <typename E>
DYNMO_INLINE void rotate(E* x, const float* cosine, const float* sine, float sign, long long tokens,
                         int heads, int half) {
  E* const token = x + BLOCK * heads * half * 2;
  const float* const c = cosine + BLOCK % tokens * half;
  const float* const s = sine + BLOCK % tokens * half;
  if (half % kPack<E> == 0) {
    const int packs = half / kPack<E>;
    EACH_OF_BLOCK(j, heads * packs) {
      E* const low = token + j / packs * (2 * half);
      const int p = j % packs;
      Pack<E> first = pack(low, p);
      Pack<E> second = pack(low + half, p);
      for (int i = 0; i < kPack<E>; ++i) {
        const int k = p * kPack<E> + i;
        rotate_one(first.at[i], second.at[i], c[k], sign * s[k]);
      }
      pack(low, p) = first;
      pack(low + half, p) = second;
    }
  } else {
    EACH_OF_BLOCK(j, heads * half) {
      const int k = j % half;
      E* const low = token + j / half * (2 * half) + k;
      rotate_one(low[0], low[half], c[k], sign * s[k]);
    }
  }
}
KERNEL rotate_float(float* x, const float* cosine, const float* sine, float sign, long long tokens,
                    int heads, int half) {
  rotate(x, cosine, sine, sign, tokens, heads, half);
}
KERNEL rotate_bf16(Bf16* x, const float* cosine, const float* sine, float sign, long long tokens,
                   int heads, int half) {
  rotate(x, cosine, sine, sign, tokens, heads, half);
}

// Calls function(element, index) for this thread's elements of a row, and writes them back.
template <typename E, typename Function>
DYNMO_INLINE void update_row(E* row, int width, int thread, Function function) {
  if (width % kPack<E> == 0) {
    for (int p = thread; p < width / kPack<E>; p += kThreads) {
      Pack<E> elements = pack(row, p);
      for (int i = 0; i < kPack<E>; ++i) function(elements.at[i], p * kPack<E> + i);
      pack(row, p) = elements;
    }
  } else {
    for (int v = thread; v < width; v += kThreads) function(row[v], v);
  }
}
// Calls function(value in fp32) for this thread's elements of a row.
template <typename E, typename Function>
DYNMO_INLINE void read_row(const E* row, int width, int thread, Function function) {
  if (width % kPack<E> == 0) {
    for (int p = thread; p < width / kPack<E>; p += kThreads) {
      const Pack<E> elements = pack(row, p);
      for (int i = 0; i < kPack<E>; ++i) function(wide(elements.at[i]));
    }
  } else {
    for (int v = thread; v < width; v += kThreads) function(wide(row[v]));
  }
}

// Sets the gradient of the block's row of rms_norm(), plus `residual`, if it is not null. It is
// rounded once. With u = x * inverse: dx = inverse * (dy * w - u * mean_D(dy * w * u)).
template <typename E>
DYNMO_INLINE void norm_gradient(const E* gradient, const E* x, const float* inverse,
                                const E* weight, const E* residual, E* x_gradient, int width) {
  SHARED float parts[kThreads];
  const long long first = BLOCK * width;
  const float scale = inverse[BLOCK];
  const bool packed = width % kPack<E> == 0;
  PHASE(thread) {
    float sum = 0.0F;
    if (packed) {
      for (int p = thread; p < width / kPack<E>; p += kThreads) {
        const Pack<E> dy = pack(gradient + first, p);
        const Pack<E> row = pack(x + first, p);
        const Pack<E> w = pack(weight, p);
        for (int i = 0; i < kPack<E>; ++i) {
          sum += wide(dy.at[i]) * wide(w.at[i]) * (wide(row.at[i]) * scale);
        }
      }
    } else {
      for (int d = thread; d < width; d += kThreads) {
        sum += wide(gradient[first + d]) * wide(weight[d]) * (wide(x[first + d]) * scale);
      }
    }
    parts[thread] = sum;
  }
  for (int half = kThreads / 2; half > 0; half /= 2) {
    PHASE(thread) {
      if (thread < half) parts[thread] += parts[thread + half];
    }
  }
  const float mean = parts[0] / static_cast<float>(width);
  const auto slope = [scale, mean](E dy, E w, E row) {
    return scale * (wide(dy) * wide(w) - wide(row) * scale * mean);
  };
  PHASE(thread) {
    if (packed) {
      for (int p = thread; p < width / kPack<E>; p += kThreads) {
        const Pack<E> dy = pack(gradient + first, p);
        const Pack<E> row = pack(x + first, p);
        const Pack<E> w = pack(weight, p);
        Pack<E> added = {};
        if (residual != nullptr) added = pack(residual + first, p);
        Pack<E> result;
        for (int i = 0; i < kPack<E>; ++i) {
          round_to(result.at[i], slope(dy.at[i], w.at[i], row.at[i]) + wide(added.at[i]));
        }
        pack(x_gradient + first, p) = result;
      }
    } else {
      for (int d = thread; d < width; d += kThreads) {
        const float added = residual != nullptr ? wide(residual[first + d]) : 0.0F;
        round_to(x_gradient[first + d],
                 slope(gradient[first + d], weight[d], x[first + d]) + added);
      }
    }
  }
}
KERNEL norm_gradient_float(const float* gradient, const float* x, const float* inverse,
                           const float* weight, const float* residual, float* x_gradient,
                           int width) {
  norm_gradient(gradient, x, inverse, weight, residual, x_gradient, width);
}
KERNEL norm_gradient_bf16(const Bf16* gradient, const Bf16* x, const float* inverse,
                          const Bf16* weight, const Bf16* residual, Bf16* x_gradient, int width) {
  norm_gradient(gradient, x, inverse, weight, residual, x_gradient, width);
}

// Sums the gradient of the weight of rms_norm() over each 32 rows. `parts` is [ceil(N / 32), D].
template <typename E>
DYNMO_INLINE void norm_weight_gradient(const E* gradient, const E* x, const float* inverse,
                                       float* parts, long long rows, long long width) {
  constexpr long long kRows = 32;
  EACH(place, (rows + kRows - 1) / kRows * width) {
    const long long first = place / width * kRows;
    const long long d = place % width;
    float sum = 0.0F;
    for (long long n = first; n < rows && n < first + kRows; ++n) {
      sum += wide(gradient[n * width + d]) * (wide(x[n * width + d]) * inverse[n]);
    }
    parts[place] = sum;
  }
}
KERNEL norm_weight_gradient_float(const float* gradient, const float* x, const float* inverse,
                                  float* parts, long long rows, long long width) {
  norm_weight_gradient(gradient, x, inverse, parts, rows, width);
}
KERNEL norm_weight_gradient_bf16(const Bf16* gradient, const Bf16* x, const float* inverse,
                                 float* parts, long long rows, long long width) {
  norm_weight_gradient(gradient, x, inverse, parts, rows, width);
}

// The maximum of some scores, and the sum of their e^(score - highest).
struct Exponentials {
  float highest;
  float sum;
};
DYNMO_INLINE Exponentials joined(Exponentials a, Exponentials b) {
  const float highest = a.highest > b.highest ? a.highest : b.highest;
  return {highest,
          a.sum * exponential(a.highest - highest) + b.sum * exponential(b.highest - highest)};
}

// Replaces the block's row of scores by probabilities, and sets its loss, -log(probability of the
// target), in fp64. The loss of a target outside the row is NaN.
template <typename E>
DYNMO_INLINE void cross_entropy(E* scores, const long long* targets, double* losses, int width) {
  SHARED Exponentials parts[kThreads];
  E* const row = scores + BLOCK * width;
  PHASE(thread) {
    Exponentials part = {-3.0e38F, 0.0F};
    read_row(row, width, thread, [&part](float x) {
      if (x > part.highest) {
        part.sum = part.sum * exponential(part.highest - x) + 1.0F;
        part.highest = x;
      } else {
        part.sum += exponential(x - part.highest);
      }
    });
    parts[thread] = part;
  }
  for (int half = kThreads / 2; half > 0; half /= 2) {
    PHASE(thread) {
      if (thread < half) parts[thread] = joined(parts[thread], parts[thread + half]);
    }
  }
  const Exponentials all = parts[0];
  PHASE(thread) {
    if (thread == 0) {
      const long long target = targets[BLOCK];
      losses[BLOCK] = target >= 0 && target < width
                          ? log(static_cast<double>(all.sum)) -
                                static_cast<double>(wide(row[target]) - all.highest)
                          : __builtin_bit_cast(double, 0x7FF8000000000000LL);
    }
  }
  const float inverse = 1.0F / all.sum;
  PHASE(thread) {
    update_row(row, width, thread, [all, inverse](E& x, int) {
      round_to(x, exponential(wide(x) - all.highest) * inverse);
    });
  }
}
KERNEL cross_entropy_float(float* scores, const long long* targets, double* losses, int width) {
  cross_entropy(scores, targets, losses, width);
}
KERNEL cross_entropy_bf16(Bf16* scores, const long long* targets, double* losses, int width) {
  cross_entropy(scores, targets, losses, width);
}

// Replaces the probabilities of the block's row by scale * (probability - one-hot of the target).
template <typename E>
DYNMO_INLINE void cross_entropy_gradient(E* probabilities, const long long* targets, int width,
                                         float scale) {
  const long long target = targets[BLOCK];
  PHASE(thread) {
    update_row(probabilities + BLOCK * width, width, thread, [target, scale](E& p, int v) {
      round_to(p, (v == target ? wide(p) - 1.0F : wide(p)) * scale);
    });
  }
}
KERNEL cross_entropy_gradient_float(float* probabilities, const long long* targets, int width,
                                    float scale) {
  cross_entropy_gradient(probabilities, targets, width, scale);
}
KERNEL cross_entropy_gradient_bf16(Bf16* probabilities, const long long* targets, int width,
                                   float scale) {
  cross_entropy_gradient(probabilities, targets, width, scale);
}

// Sets kept[i] to whether word i of Philox 4x32-10 (Salmon et al., 2011) under `key` is at least
// `threshold`.
KERNEL keep_mask(unsigned char* kept, long long count, unsigned long long key, unsigned threshold) {
  EACH(block, (count + 3) / 4) {
    unsigned c[4] = {static_cast<unsigned>(block), static_cast<unsigned>(block >> 32), 0, 0};
    unsigned key0 = static_cast<unsigned>(key);
    unsigned key1 = static_cast<unsigned>(key >> 32);
    for (int round = 0; round < 10; ++round) {
      const unsigned long long first = static_cast<unsigned long long>(c[0]) * 0xD2511F53U;
      const unsigned long long second = static_cast<unsigned long long>(c[2]) * 0xCD9E8D57U;
      c[0] = static_cast<unsigned>(second >> 32) ^ c[1] ^ key0;
      c[1] = static_cast<unsigned>(second);
      c[2] = static_cast<unsigned>(first >> 32) ^ c[3] ^ key1;
      c[3] = static_cast<unsigned>(first);
      key0 += 0x9E3779B9U;
      key1 += 0xBB67AE85U;
    }
    unsigned word = 0;
    for (int i = 0; i < 4; ++i) word |= (c[i] >= threshold ? 1U : 0U) << (8 * i);
    if (4 * block + 4 <= count) {
      reinterpret_cast<unsigned*>(kept)[block] = word;
    } else {
      for (int i = 0; 4 * block + i < count; ++i) {
        kept[4 * block + i] = static_cast<unsigned char>(word >> (8 * i));
      }
    }
  }
}

// Constants of one AdamW step, as in adamw_factors.h. The arithmetic is that of adamw_loops.cpp.
struct AdamW {
  float gradient;
  float first;
  float second;
  float second_kept;
  float rate;
  float deviation;
  float epsilon;
  float kept;
};
DYNMO_INLINE void adamw_one(float& value, float& gradient, float& first, float& second,
                            const AdamW& f) {
  const float g = gradient * f.gradient;
  gradient = 0;
  const float mean = fmaf(f.first, g - first, first);
  const float square = fmaf(f.second * g, g, second * f.second_kept);
  first = mean;
  second = square;
  const float deviation = sqrtf(square) / f.deviation + f.epsilon;
  value = value * f.kept + f.rate * mean / deviation;
}

// Updates `count` elements, and zeroes the gradient. `copy`, if not null, gets the values in bf16.
KERNEL adamw(float* value, float* gradient, float* first, float* second, Bf16* copy,
             long long count, AdamW factors) {
  EACH(p, count / 4) {
    Pack<float> v = pack(value, p);
    Pack<float> g = pack(gradient, p);
    Pack<float> m = pack(first, p);
    Pack<float> s = pack(second, p);
    for (int i = 0; i < 4; ++i) adamw_one(v.at[i], g.at[i], m.at[i], s.at[i], factors);
    pack(value, p) = v;
    pack(gradient, p) = g;
    pack(first, p) = m;
    pack(second, p) = s;
    if (copy != nullptr) {
      for (int i = 0; i < 4; ++i) round_to(copy[4 * p + i], v.at[i]);
    }
  }
  const long long whole = count - count % 4;
  EACH(j, count - whole) {
    const long long i = whole + j;
    adamw_one(value[i], gradient[i], first[i], second[i], factors);
    if (copy != nullptr) round_to(copy[i], value[i]);
  }
}
