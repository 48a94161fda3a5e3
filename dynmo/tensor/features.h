// SPDX-License-Identifier: Apache-2.0
#pragma once

// Numbers that describe how uneven a sparse tensor is, after "A sparse tensor generator with
// efficient feature extraction" (Torun, Taweel, Unat, 2025): how many entries the slices and fibers
// of every mode have, and how that is spread. A fiber has one free mode, a slice has two.

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
  double cv = 0;         // std / mean; 0 where the mean is 0
  double imbalance = 0;  // max / mean - 1; 0 where the mean is 0
};

// A number of each group (entries, nonempty fibers, or the sum of values), over all groups that
// there can be and over those that have an entry.
struct Distribution {
  double groups = 0;  // that there can be: a product of sizes
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
  std::optional<Distribution> fibers = {};  // of a slice, along its last mode: nonempty ones
  std::optional<Distribution> values = {};  // their sum; where the tensor has values
};

// How long the load along a mode (the steps) stays what it is. A series has the values of one place
// along it, absent ones as 0.
struct Persistence {
  int mode = 0;
  double autocorrelation = 0;  // with the next step, pooled over all series; 0: nothing varies
  // Steps after which the autocorrelation is at most a half: a plan made now has lost half of what
  // it knew. nullopt: not within half of the steps.
  std::optional<std::int64_t> half_life = {};
};

// Where the load of rows is uneven, and when: coefficients of variation over the last of three
// modes, of which the first is the steps and the second the rows. The counts of a mixture of
// experts are more uneven in late blocks than in early ones, and in the first steps than later.
struct Unevenness {
  std::vector<double> steps;  // in equal parts of the steps, in order: the mean over all rows
  std::vector<double> rows;   // of each row, or of equal parts of them: the mean over all steps
};
inline constexpr std::size_t kMaxStepParts = 64;
inline constexpr std::size_t kMaxRowParts = 256;

struct Features {
  std::vector<std::uint64_t> sizes;
  std::vector<std::string> names = {};
  std::uint64_t entries = 0;
  double density = 0;                       // entries / product of the sizes
  std::optional<Distribution> values = {};  // of single places, where the tensor has values
  std::vector<GroupFeatures> modes = {};    // one index of a mode is fixed; from 4 modes on
  std::vector<GroupFeatures> fibers = {};   // for each mode
  std::vector<GroupFeatures> slices = {};   // for each pair of modes
  std::optional<Persistence> along = {};
  std::optional<Unevenness> uneven = {};  // of three modes with values, along the first one
};

struct FeatureOptions {
  int threads = 1;                // the result is the same for any number
  std::optional<int> along = {};  // mode of the steps
};

// Entries at the same place count each. kBadInput: a mode that the tensor has not, modes whose
// indices take more than 128 bits together, or more than 2^28 values of series along the steps.
[[nodiscard]] Expected<Features> features_of(const SparseTensor& tensor,
                                             const FeatureOptions& options = {});

// "dynmo-features-1" (docs/formats.md).
[[nodiscard]] Json to_json(const Features& features);
// Any JSON; kBadInput names `origin` and JSON pointer.
[[nodiscard]] Expected<Features> parse_features(const Json& json, const std::string& origin);

}  // namespace dynmo::tensor
