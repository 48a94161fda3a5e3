// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/load_trace_writer.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <system_error>
#include <utility>

#include "dynmo/observe/cut_lines.h"

namespace dynmo::observe {

Expected<std::unique_ptr<LoadTraceWriter>> LoadTraceWriter::go_on(
    const std::filesystem::path& path, std::int64_t every, std::int64_t step,
    dynamism::TraceLines::Device device) {
  DYNMO_ASSIGN(const CutLines cut, cut_lines(path, step));
  DYNMO_ASSIGN(File file, File::open(path, File::Start::kAppend));
  std::unique_ptr<LoadTraceWriter> writer(new LoadTraceWriter(std::move(file), every, device));
  writer->records_ = false;
  if (cut.has_header) writer->lines_.go_on(cut.newest);
  return writer;
}

std::map<std::int64_t, std::filesystem::path> load_traces(const RunFolder& folder) {
  std::map<std::int64_t, std::filesystem::path> found;
  std::error_code fault;
  for (std::filesystem::directory_iterator next(folder.root(), fault);
       !fault && next != std::filesystem::directory_iterator(); next.increment(fault)) {
    const std::string name = next->path().filename().string();
    const std::string first = folder.load_trace(0).filename().string();
    if (name == first) found.emplace(0, next->path());
    const std::size_t dash = name.rfind('-');
    if (dash == std::string::npos) continue;
    std::int64_t step = 0;
    std::from_chars(name.data() + dash + 1, name.data() + name.size(), step);
    if (step > 0 && next->path().filename() == folder.load_trace(step).filename()) {
      found.emplace(step, next->path());
    }
  }
  return found;
}

void remove_load_traces_after(const RunFolder& folder, std::int64_t step) {
  for (const auto& [first, path] : load_traces(folder)) {
    std::error_code fault;
    if (first > step) std::filesystem::remove(path, fault);
  }
}

Expected<std::unique_ptr<LoadTraceWriter>> LoadTraceWriter::open(
    const std::filesystem::path& path, std::int64_t every, dynamism::TraceLines::Device device) {
  DYNMO_ASSIGN(File file, File::open(path, File::Start::kEmpty, "create"));
  return std::unique_ptr<LoadTraceWriter>(new LoadTraceWriter(std::move(file), every, device));
}

void LoadTraceWriter::add(const Step& step) {
  const bool asked = step.moved || step.announced != cost::Announced::kNothing;
  if (!done_ || (step.step < next_ && !asked)) return;
  const auto costs = step.profiler.costs(step.frozen_layers);
  if (!costs) return;
  next_ = step.step + every_;
  const dynamism::TraceLines::Measured measured{step.observed, step.moving};
  const auto line = lines_.add(step.step, step.announced, *costs, records_ ? &measured : nullptr);
  done_ = line ? file_.append(*line) : Expected<void>(line.error());
}

Expected<void> LoadTraceWriter::close() {
  const Expected<void> closed = file_.close();
  if (done_) done_ = closed;
  return done_;
}

}  // namespace dynmo::observe
