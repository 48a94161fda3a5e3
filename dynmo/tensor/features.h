// SPDX-License-Identifier: Apache-2.0
#pragma once

// Numbers that describe how uneven a sparse tensor is, after "A sparse tensor generator with
// efficient feature extraction" (Torun, Taweel, Unat, 2025). They say how many entries the slices
// and fibers of every mode have, and how that number is spread. A fiber has one free mode, a slice
// has two.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/tensor/sparse_tensor.h"

namespace dynmo::tensor {

// The spread of a number over groups.
struct Spread {
  double min = 0;
  double mean = 0;
  double std = 0;        // of the whole population
  double cv = 0;         // std / mean; 0 if the mean is 0
  double imbalance = 0;  // max / mean - 1; 0 if the mean is 0
};

// A number that each group has: entries, nonempty fibers, or the sum of values. `all` is over all
// possible groups, `of_nonempty` over those with an entry.
struct Distribution {
  double groups = 0;  // number of possible groups: a product of sizes
  std::uint64_t nonempty = 0;
  double sum = 0;
  double max = 0;
  Spread all = {};
  Spread of_nonempty = {};
};

// Groups in which the modes `free` vary and all others are fixed.
struct GroupFeatures {
  std::vector<int> free;  // ascending
  Distribution entries = {};
  std::optional<Distribution> fibers = {};  // nonempty fibers of a slice, along its last mode
  std::optional<Distribution> values = {};  // sum of values, if the tensor has them
};

// The time for which the load along a mode (the steps) stays the same. A series has the values of
// one place along that mode, absent ones as 0.
struct Persistence {
  int mode = 0;
  // Correlation with the next step, pooled over all series. 0 if nothing varies.
  double autocorrelation = 0;
  // Number of steps after which the autocorrelation is at most a half. A plan made now has then
  // lost half of what it knew. nullopt if that takes more than half of the steps.
  std::optional<std::int64_t> half_life = {};
};

// The unevenness of the load of rows, by step and by row. The tensor has three modes. The first is
// the steps, the second the rows, and the numbers are coefficients of variation over the third.
//
// In a mixture of experts, counts are more uneven in late blocks than in early ones. They are also
// more uneven in the first steps than later.
struct Unevenness {
  // Mean over all rows, for equal consecutive parts of the steps.
  std::vector<double> steps;
  // Mean over all steps, for each row or for equal parts of the rows.
  std::vector<double> rows;
};
inline constexpr std::size_t kMaxStepParts = 64;
inline constexpr std::size_t kMaxRowParts = 256;

struct Features {
  std::vector<std::uint64_t> sizes;
  std::vector<std::string> names = {};
  std::uint64_t entries = 0;
  double density = 0;                       // entries / product of the sizes
  std::optional<Distribution> values = {};  // of single places, if the tensor has values
  std::vector<GroupFeatures> modes = {};    // one index of a mode is fixed; from 4 modes on
  std::vector<GroupFeatures> fibers = {};   // for each mode
  std::vector<GroupFeatures> slices = {};   // for each pair of modes
  std::optional<Persistence> along = {};
  // Along the first mode, if the tensor has three modes and values.
  std::optional<Unevenness> uneven = {};
};

struct FeatureOptions {
  int threads = 1;                // any number gives the same result
  std::optional<int> along = {};  // mode of the steps
};

// Computes the features. Each of several entries at the same place counts.
//
// Returns kBadInput for a mode that the tensor does not have, and for modes whose indices need more
// than 128 bits together. Also returns it for more than 2^28 values of series along the steps.
[[nodiscard]] Expected<Features> features_of(const SparseTensor& tensor,
                                             const FeatureOptions& options = {});

// Writes "dynmo-features-1" (docs/formats.md).
[[nodiscard]] Json to_json(const Features& features);
// Reads any JSON. Errors are kBadInput with `origin` and the JSON pointer.
[[nodiscard]] Expected<Features> parse_features(const Json& json, const std::string& origin);

}  // namespace dynmo::tensor
