// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/run.h"

#include <fmt/format.h>

#include <utility>

#include "dynmo/train/earlier_run.h"
#include "dynmo/train/measured_keys.h"
#include "dynmo/train/run_impl.h"
#include "dynmo/train/same_settings.h"

namespace dynmo::train {
namespace {

Expected<void> train_in(transport::Transport& transport, elastic::Groups* groups,
                        const TrainOptions& given, const Reporter& reporter) {
  DYNMO_TRY(validate(given.config));
  TrainOptions options = given;
  if (options.resume) {
    DYNMO_ASSIGN(options.config, resumed_config(options.config));
  }
  DYNMO_TRY(pipeline_ranks(options.config, transport.size()));
  DYNMO_ASSIGN(Inputs inputs, open_inputs(options));
  DYNMO_TRY(check_same_settings(transport, options, inputs.batches.vocabulary()));
  DYNMO_TRY(check_folder_is_free(options));
  if (transport.rank() == transport::Member(0)) {
    DYNMO_ASSIGN(const bool removed, remove_earlier_run(options));
    if (removed) {
      reporter.line(fmt::format("removed  the earlier run in '{}'", options.config.run.directory));
    }
  }
  DYNMO_TRY(make_directories(options.config.run.directory));
  DYNMO_TRY(wait_for_all(transport));  // no rank writes before all have looked
  DYNMO_TRY(measure_keys(transport, options, inputs, reporter));
  return Run(transport, groups, options, reporter, std::move(inputs)).run();
}

}  // namespace

Expected<void> train(transport::Transport& transport, const TrainOptions& options,
                     const Reporter& reporter) {
  return train_in(transport, nullptr, options, reporter);
}

Expected<void> train(elastic::Groups& groups, const TrainOptions& options,
                     const Reporter& reporter) {
  return train_in(groups.group(), &groups, options, reporter);
}

Expected<void> join(elastic::Groups& groups, const TrainOptions& options, const Reporter& reporter,
                    const std::function<void()>& taken) {
  DYNMO_ASSIGN(Inputs inputs, open_inputs(options));
  return Run(groups.group(), &groups, options, reporter, std::move(inputs)).join(taken);
}

}  // namespace dynmo::train
