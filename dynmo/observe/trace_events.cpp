// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "dynmo/observe/trace_events_impl.h"

namespace dynmo::observe {
namespace {

// A node's own event lies inside this one, which also counts what the engine does around it.
constexpr std::string_view kNode = "autograd::engine::evaluate_function: ";

std::string text(const Json& event, const char* key) {
  const auto found = event.find(key);
  return found != event.end() && found->is_string() ? found->get<std::string>() : "";
}

std::optional<std::int64_t> argument(const Json& event, const char* key) {
  const auto arguments = event.find("args");
  if (arguments == event.end() || !arguments->is_object()) return {};
  const auto found = arguments->find(key);
  if (found == arguments->end() || !found->is_number_integer()) return {};
  return found->get<std::int64_t>();
}

bool is_kernel(std::string_view category) {
  return category == "kernel" || category == "gpu_memcpy" || category == "gpu_memset";
}

class Sorter {
 public:
  explicit Sorter(std::string_view origin) : origin_(origin) {}

  Expected<void> add(const Json& event, std::size_t index) {
    if (!event.is_object() || text(event, "ph") != "X") return {};
    const std::string category = text(event, "cat");
    const auto correlation = argument(event, "correlation");
    if (is_kernel(category) && correlation) {
      DYNMO_ASSIGN(const TraceEvent kernel, read(event, index));
      events_.kernel_us[*correlation] += kernel.duration_us;
    } else if ((category == "cuda_runtime" || category == "cuda_driver") && correlation) {
      DYNMO_TRY(put(events_.launches, event, index, correlation));
    } else if (category == "user_annotation") {
      DYNMO_TRY(put(events_.ranges, event, index, {}));
    } else if (category == "cpu_op") {
      DYNMO_TRY(add_operation(event, index));
    }
    return {};
  }

  TraceEvents finish() && {
    for (auto* list : {&events_.ranges, &events_.operations, &events_.nodes, &events_.launches}) {
      std::stable_sort(list->begin(), list->end(), [](const TraceEvent& a, const TraceEvent& b) {
        return a.start_us != b.start_us ? a.start_us < b.start_us : a.duration_us > b.duration_us;
      });
    }
    return std::move(events_);
  }

 private:
  // Operations of the backward pass name the thread of their forward one, others say 0.
  Expected<void> add_operation(const Json& event, std::size_t index) {
    const auto sequence = argument(event, "Sequence number");
    const std::string name = text(event, "name");
    if (name.starts_with(kNode)) {
      DYNMO_TRY(put(events_.nodes, event, index, sequence));
      events_.nodes.back().name.erase(0, kNode.size());
    } else if (sequence && argument(event, "Fwd thread id").value_or(0) == 0) {
      DYNMO_TRY(put(events_.operations, event, index, sequence));
    }
    return {};
  }

  Expected<void> put(std::vector<TraceEvent>& list, const Json& json, std::size_t index,
                     std::optional<std::int64_t> number) {
    DYNMO_ASSIGN(TraceEvent event, read(json, index));
    event.number = number;
    list.push_back(std::move(event));
    return {};
  }

  Expected<TraceEvent> read(const Json& json, std::size_t index) {
    TraceEvent event;
    event.name = text(json, "name");
    event.thread = thread(json);
    DYNMO_ASSIGN(event.start_us, microseconds(json, index, "ts"));
    DYNMO_ASSIGN(event.duration_us, microseconds(json, index, "dur"));
    return event;
  }

  Expected<double> microseconds(const Json& json, std::size_t index, const char* key) {
    const auto found = json.find(key);
    const bool is_number = found != json.end() && found->is_number();
    const double value = is_number ? found->get<double>() : -1;
    if (value >= 0 && value <= 1e18) return value;
    return make_error(ErrorCode::kBadInput,
                      "{}: /traceEvents/{}/{} is {}, wanted microseconds, 0 or more", origin_,
                      index, key, found == json.end() ? "missing" : found->dump());
  }

  // Process and thread may be numbers or names.
  int thread(const Json& json) {
    const std::string key = json.value("pid", Json()).dump() + json.value("tid", Json()).dump();
    return threads_.emplace(key, static_cast<int>(threads_.size())).first->second;
  }

  std::string origin_;
  std::map<std::string, int> threads_;
  TraceEvents events_;
};

}  // namespace

Expected<TraceEvents> sort_events(const Json& trace, std::string_view origin) {
  const Json* list = &trace;
  if (trace.is_object() && trace.contains("traceEvents")) list = &trace["traceEvents"];
  if (!list->is_array()) {
    return make_error(ErrorCode::kBadInput,
                      "{}: /traceEvents is {}, wanted the events of a trace as PyTorch's "
                      "export_chrome_trace writes them",
                      origin, trace.is_object() && list == &trace ? "missing" : list->type_name());
  }
  Sorter sorter(origin);
  for (std::size_t i = 0; i < list->size(); ++i) DYNMO_TRY(sorter.add((*list)[i], i));
  return std::move(sorter).finish();
}

}  // namespace dynmo::observe
