// SPDX-License-Identifier: Apache-2.0
#pragma once

// A question for a plan as a user asks it, before its files are read. One table has the options.
// The flags of `dynmo plan`, the arguments of dynmo.plan() and the checks of both follow from it.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/cost/transformer.h"
#include "dynmo/plan/question/question.h"

namespace dynmo::plan {

struct Asked {
  // The costs come from one of three files. `config` is that of a training, and `shape` its model.
  std::optional<std::string> profile;
  std::optional<std::string> model;
  std::optional<std::string> config;
  std::optional<std::string> device;
  std::optional<std::int64_t> sequence;
  std::optional<std::int64_t> micro_batch_size;
  std::optional<std::int64_t> head_slices;
  std::optional<std::int64_t> tensor_parallel;
  std::optional<std::int64_t> optimizer_shards;
  std::optional<std::int64_t> ranks;
  std::optional<std::string> memory;
  std::optional<double> head_room;
  std::optional<std::string> cluster;
  std::optional<std::string> granularity;
  std::optional<std::int64_t> micro_batches;
  std::optional<std::string> balancer;
  std::optional<std::string> schedule;
  std::optional<std::string> recompute;
  std::optional<std::string> from;
  bool place = false;
  bool pack = false;
  std::optional<double> slack;
  std::optional<std::int64_t> evaluations;
  std::optional<std::string> form;

  // The caller may have read these. A file that stands in `documents` by its name is not opened.
  Json documents = Json::object();
  std::optional<std::vector<cost::LayerWork>> work;  // the layers of `model`, counted
  std::optional<cost::TransformerShape> shape;
  double bytes_per_element = 0;                 // of `shape`
  std::optional<std::int64_t> stages_per_rank;  // of interleaved, by `config`
};

struct Option {
  enum class With { kAny, kModel, kShape };  // costs by formulas, of `model` or any shape
  std::string_view flag;                     // "--head-room"; "profile" is a word without a flag
  std::string_view argument;                 // of dynmo.plan(), "head_room"; "": there is none
  std::variant<std::optional<std::string>*, std::optional<std::int64_t>*, std::optional<double>*,
               bool*>
      value;
  std::string help;
  std::string_view placeholder = {};  // "PLAN.json"; an argument of such a file is its content
  std::int64_t max = 0;               // of a whole number from 1; 0: checked where it is used
  With with = With::kAny;             // the costs that it goes with
  std::string_view shown = {};        // the default, in help
};
// Returns all options of a question, in the order of `dynmo plan --help`. They refer to `asked`.
[[nodiscard]] std::vector<Option> options_of(Asked& asked);
[[nodiscard]] bool is_given(const Option& option);

// The name of an option in an error: "--micro-batches" or "micro_batches".
enum class Spelling { kFlag, kArgument };

// Makes the question, without its `from`. Returns kBadInput for options that exclude or want one
// another, for values out of range, and for errors of the files.
[[nodiscard]] Expected<Question> question_of(const Asked& asked, Spelling spelling);

// Refuses options that cannot change the answer to `question`.
[[nodiscard]] Expected<void> check_effects(const Asked& asked, const Question& question,
                                           Spelling spelling);

// Returns the costs of such a question, which may omit ranks.
[[nodiscard]] Expected<cost::ModelCost> costs_of(const Asked& asked, Spelling spelling);
// Returns the arithmetic and the bytes of the layers of its `model`.
[[nodiscard]] Expected<std::vector<cost::LayerWork>> work_of(const Asked& asked, Spelling spelling);

}  // namespace dynmo::plan
