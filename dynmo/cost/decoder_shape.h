// SPDX-License-Identifier: Apache-2.0
#pragma once

// The sizes of a decoder. Its layers, their costs, a run's config, a scenario and a config.json all
// contain this struct.

#include <cstdint>

#include "dynmo/core/expected.h"

namespace dynmo::cost {

struct DecoderShape {
  std::int64_t vocabulary = 0;
  std::int64_t hidden = 0;
  int blocks = 0;  // layers in Hugging Face's sense; two of ours each
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;  // grouped-query attention if fewer than heads
  std::int64_t intermediate = 0;
  std::int64_t sequence = 0;   // longest input, in tokens
  std::int64_t positions = 0;  // learned vectors, or the longest input an export names; 0: sequence
  std::int64_t head_slices = 1;  // layers that the head is cut into, by words

  friend bool operator==(const DecoderShape&, const DecoderShape&) = default;
};

// The architecture of GPT-2 (Radford et al. 2019), of Llama (Touvron et al. 2023), or of Mixtral
// 8x7B (Jiang et al. 2024).
enum class Architecture { kGpt, kLlama, kMixtral };

// Sets sizes that are 0: heads, key-value heads, intermediate width, vocabulary and positions. They
// follow from the other sizes in the architecture's proportions, for any width.
[[nodiscard]] DecoderShape with_defaults(DecoderShape shape, Architecture architecture);

struct DecoderLimits {
  std::int64_t hidden = std::int64_t{1} << 30;  // and heads
  std::int64_t blocks = 100'000;
  std::int64_t intermediate = std::int64_t{1} << 30;
  std::int64_t tokens = std::int64_t{1} << 30;  // of a vocabulary, a sequence, positions
};

// Checks the sizes. Returns kBadInput with the key of a run's config or a scenario, its value and
// the allowed values. Sizes are 1 to the limits (positions may be 0), and tokens at most the
// positions. kv_heads must divide heads. A slice of the head has at least kSliceRows words.
[[nodiscard]] Expected<void> validate(const DecoderShape& shape, const DecoderLimits& limits = {});

// Rows [begin, end) of the head's matrix, which has one row for each word.
struct HeadRows {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  friend bool operator==(const HeadRows&, const HeadRows&) = default;
};

// A slice begins at a multiple of this, so that products keep whole tiles.
inline constexpr std::int64_t kSliceRows = 128;

// Returns the rows of slice `slice` of `slices`, as equal as multiples of kSliceRows allow. The
// last slice also has the words beyond the last multiple. Requires 1 <= slices <= max(1, vocabulary
// / kSliceRows).
[[nodiscard]] HeadRows head_rows(std::int64_t vocabulary, std::int64_t slices, std::int64_t slice);

}  // namespace dynmo::cost
