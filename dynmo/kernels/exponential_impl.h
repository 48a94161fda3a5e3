// SPDX-License-Identifier: Apache-2.0
#pragma once

// The exponential of loops.cpp and of the kernels for devices. The second compile this text, too
// (device/kernels.cu). So it includes nothing, and DYNMO_INLINE comes from the file that includes
// it.

// Returns e^x by Cephes' polynomial (Moshier, expf.c), to 2 units in the last place. It has no
// branches, so that loops over it are vectorized. x is clamped to [-87, 88]. NaN stays NaN.
DYNMO_INLINE float exponential(float x) {
  x = x < -87.0F ? -87.0F : x;
  x = x > 88.0F ? 88.0F : x;
  constexpr float kRound = 12582912.0F;  // 1.5 x 2^23: adding it leaves no fraction
  const float n = (x * 1.44269504088896341F + kRound) - kRound;
  const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  const float y = p * (r * r) + r + 1.0F;
  return y * __builtin_bit_cast(float, (static_cast<int>(n) + 127) << 23);
}
