// SPDX-License-Identifier: Apache-2.0
// Traces of PyTorch's profiler that are taken give valid costs. A blank line divides two files.
#include "dynmo/observe/import/trace_import.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {

Outcome run_target(std::string_view text) {
  std::vector<observe::TraceText> traces;
  while (traces.size() < 4) {
    const std::size_t end = text.find("\n\n");
    traces.push_back({text.substr(0, end), fmt::format("rank{}.json", traces.size())});
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 2);
  }
  observe::StageLayers layers;
  if (text.ends_with(' ')) layers.blocks = {2, 3};
  const auto import = observe::import_traces(traces, layers);
  if (!import) return refused(import.error());
  const auto valid = cost::validate(import->model);
  DYNMO_CHECK(valid.has_value(), "valid costs, got {}", valid.error().message);
  DYNMO_CHECK(import->unclaimed_s >= 0, "time of 0 or more, got {}", import->unclaimed_s);
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  return {R"({"traceEvents": [
 {"ph":"X","cat":"user_annotation","name":"a.forward","pid":1,"tid":1,"ts":0,"dur":10},
 {"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,"ts":1,"dur":5,"args":{"Sequence number":7,"Fwd thread id":0}},
 {"ph":"X","cat":"user_annotation","name":"b.forward","pid":1,"tid":1,"ts":20,"dur":10},
 {"ph":"X","cat":"user_annotation","name":"b.backward","pid":1,"tid":1,"ts":40,"dur":16},
 {"ph":"X","cat":"cpu_op","name":"autograd::engine::evaluate_function: MmBackward0","pid":1,"tid":2,"ts":60,"dur":12,"args":{"Sequence number":7,"Fwd thread id":1}}]})",
          R"([{"ph":"X","cat":"user_annotation","name":"PP:0F0","tid":1,"ts":0,"dur":10},
 {"ph":"X","cat":"cpu_op","name":"aten::mm","tid":1,"ts":1,"dur":5,"args":{"Sequence number":7}},
 {"ph":"X","cat":"user_annotation","name":"PP:0SEND_F0","tid":1,"ts":10,"dur":1},
 {"ph":"X","cat":"user_annotation","name":"PP:0I0","tid":1,"ts":20,"dur":10},
 {"ph":"X","cat":"user_annotation","name":"PP:0W0","tid":1,"ts":40,"dur":16},
 {"ph":"X","cat":"cpu_op","name":"autograd::engine::evaluate_function: MmBackward0","tid":1,"ts":42,"dur":12}]

{"traceEvents":[
 {"ph":"X","cat":"user_annotation","name":"PP:1F0","tid":1,"ts":0,"dur":10},
 {"ph":"X","cat":"cpu_op","name":"aten::mm","tid":1,"ts":1,"dur":5,"args":{"Sequence number":7}},
 {"ph":"X","cat":"user_annotation","name":"PP:(1F1;0B1)OVERLAP_F_B","tid":1,"ts":20,"dur":10},
 {"ph":"X","cat":"user_annotation","name":"PP:1B0","tid":1,"ts":40,"dur":16},
 {"ph":"X","cat":"cpu_op","name":"autograd::engine::evaluate_function: MmBackward0","tid":1,"ts":42,"dur":12}]} )"};
}

}  // namespace dynmo::fuzz
