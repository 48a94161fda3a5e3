// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/last_files.h"

#include "dynmo/core/files.h"
#include "dynmo/cost/files.h"
#include "dynmo/transport/tags.h"

namespace dynmo::train {
namespace {

Expected<void> note_full_disk(const Expected<void>& written, std::vector<std::string>& lines) {
  if (written || written.error().code != ErrorCode::kBadInput) return written;
  lines.push_back(written.error().message);
  return {};
}

}  // namespace

Expected<LastFiles> write_last_files(transport::Transport& group, const GroupRun& part,
                                     const RunLog& log, const config::Config& config,
                                     std::span<const transport::ClockFit> clocks) {
  LastFiles files;
  const transport::Tag tag = transport::control_tag(transport::Control::kTraces);
  DYNMO_ASSIGN(JointTrace trace, gather_traces(group, tag, log.traces(), clocks));
  if (!trace.ranks.empty()) {
    DYNMO_TRY(note_full_disk(
        write_trace(trace, static_cast<int>(config.pipeline.replicas),
                    emulates(config) ? "emulated" : "measured", log.folder().trace()),
        files.lines));
  }
  files.clocks = std::move(trace.clocks);
  const auto costs = part.pipeline().costs();
  if (group.rank() != transport::Member(0) || !costs) return files;
  Json profile = cost::profile_json(*costs);
  if (emulates(config)) profile["emulated"] = true;
  DYNMO_TRY(note_full_disk(write_file_durably(log.folder().profile(), profile.dump(2) + "\n"),
                           files.lines));
  return files;
}

}  // namespace dynmo::train
