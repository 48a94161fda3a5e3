// SPDX-License-Identifier: Apache-2.0
// A trace of PyTorch's profiler that is taken gives valid costs.
#include "dynmo/observe/trace_import.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {

Outcome run_target(std::string_view text) {
  const auto json = parse_json(text, "trace.json");
  if (!json) return refused(json.error());
  const auto import = observe::import_trace(*json, "trace.json");
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
 {"ph":"X","cat":"cpu_op","name":"autograd::engine::evaluate_function: MmBackward0","pid":1,"tid":2,"ts":60,"dur":12,"args":{"Sequence number":7,"Fwd thread id":1}}]})"};
}

}  // namespace dynmo::fuzz
