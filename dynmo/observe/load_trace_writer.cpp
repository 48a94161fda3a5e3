// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/load_trace_writer.h"

#include <cerrno>
#include <cstring>
#include <utility>

namespace dynmo::observe {

Expected<std::unique_ptr<LoadTraceWriter>> LoadTraceWriter::open(
    const std::filesystem::path& path, std::int64_t every, dynamism::TraceLines::Device device) {
  std::FILE* file = std::fopen(path.c_str(), "we");
  if (file == nullptr) {
    return make_error(ErrorCode::kBadInput, "cannot create '{}': {}", path.string(),
                      std::strerror(errno));
  }
  return std::unique_ptr<LoadTraceWriter>(new LoadTraceWriter(path, file, every, device));
}

void LoadTraceWriter::fail(const char* reason) {
  if (error_) return;
  error_ = make_error(ErrorCode::kBadInput, "cannot write '{}': {}", path_.string(), reason);
}

void LoadTraceWriter::add(const Step& step) {
  const bool asked = step.moved || step.announced != cost::Announced::kNothing;
  if (error_ || (step.step < next_ && !asked)) return;
  const auto costs = step.profiler.costs(step.frozen_layers);
  if (!costs) return;
  next_ = step.step + every_;
  const dynamism::TraceLines::Measured measured{step.observed, step.moving};
  const auto line =
      lines_.add(step.step, step.announced, *costs, every_ == 1 ? &measured : nullptr);
  if (!line) {
    error_ = line.error();
    return;
  }
  if (std::fwrite(line->data(), 1, line->size(), file_.get()) != line->size()) {
    fail(std::strerror(errno));
  }
}

Expected<void> LoadTraceWriter::close() {
  if (file_ != nullptr && std::fclose(file_.release()) != 0) fail(std::strerror(errno));
  if (error_) return *error_;
  return {};
}

}  // namespace dynmo::observe
