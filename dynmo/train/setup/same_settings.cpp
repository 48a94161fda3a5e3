// SPDX-License-Identifier: Apache-2.0
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "dynmo/kernels/device/launcher.h"
#include "dynmo/train/setup/start.h"
#include "dynmo/transport/gather.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

Expected<void> check_same_settings(transport::Transport& transport, const ResolvedRun& run) {
  config::Config config = run.config();
  config.data.path = config.run.directory = "";
  std::string mine = to_toml(config);
  mine +=
      fmt::format("resume = {}\ncompare = {}\nvocabulary of the data = {}\n", run.options().resume,
                  fmt::join(run.options().compare, ","), run.batches().vocabulary());
  DYNMO_ASSIGN(const auto all,
               transport::gather_texts(
                   transport, transport::control_tag(transport::Control::kSettings), mine));
  const std::vector<std::string> wanted = lines_of(all.front());
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all.front()) continue;
    const std::vector<std::string> given = lines_of(all[rank]);
    const auto [there, here] =
        std::mismatch(wanted.begin(), wanted.end(), given.begin(), given.end());
    return make_error(ErrorCode::kBadInput,
                      "rank {} was started with '{}', rank 0 with '{}': start all ranks with the "
                      "same command",
                      rank, here == given.end() ? "" : *here, there == wanted.end() ? "" : *there);
  }
  return {};
}

Expected<std::string> unlike_processors(transport::Transport& transport, std::string_view own) {
  DYNMO_ASSIGN(const auto all,
               transport::gather_texts(transport,
                                       transport::control_tag(transport::Control::kSettings), own));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all.front()) continue;
    return fmt::format(
        "numbers  may depend on the layout in their last bits: rank {} computes with {}, rank 0 "
        "with {}",
        rank, all[rank], all.front());
  }
  return std::string();
}

Expected<void> agree_on_kernels(transport::Transport& transport, ResolvedRun& run) {
  if (!on_device(run.config()) || !run.config().run.fused_kernels) return {};
  TrainOptions::RankDevice device = run.options().rank_device;
  DYNMO_ASSIGN(
      const auto reasons,
      transport::gather_texts(transport, transport::control_tag(transport::Control::kSettings),
                              device.no_kernels));
  const auto first = std::ranges::find_if(reasons, [](const auto& why) { return !why.empty(); });
  if (first == reasons.end()) return {};
  kernels::device::use_kernels(false);
  device.no_kernels = fmt::format("rank {}: {}", first - reasons.begin(), *first);
  run.use(std::move(device));
  return run.set(std::vector<std::string>{"run.fused_kernels=false"});
}

}  // namespace dynmo::train
