// SPDX-License-Identifier: Apache-2.0
#pragma once

// Times of layers and stages by the files of a trace, before the files are joined.

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/observe/import/trace_events_impl.h"

namespace dynmo::observe {

// Seconds of each occurrence, for medians.
struct PartTimes {
  std::vector<double> forward_s;
  std::vector<double> input_s;
  std::vector<double> weight_s;

  // Adds the occurrences of another file.
  void append(const PartTimes& other) {
    const auto add = [](std::vector<double>& all, const std::vector<double>& more) {
      all.insert(all.end(), more.begin(), more.end());
    };
    add(forward_s, other.forward_s);
    add(input_s, other.input_s);
    add(weight_s, other.weight_s);
  }
};

// Time of an event: its own, or that of the kernels launched in it.
class TraceClock {
 public:
  explicit TraceClock(const TraceEvents& events);
  [[nodiscard]] bool device() const { return device_; }
  // Returns the time of an event: its own, or that of the kernels that its own thread launched in
  // it.
  [[nodiscard]] double seconds(const TraceEvent& event) const;
  // Returns the time of an action of a pipeline. The wait for a message before its first operation
  // is left out. Kernels are those of all threads.
  [[nodiscard]] double seconds_of_action(const TraceEvent& range) const;

 private:
  struct Launches {
    std::vector<double> start_us;      // ascending
    std::vector<double> sum_us = {0};  // of the kernels of the launches before each
    [[nodiscard]] double between(double start, double end) const;
  };
  const TraceEvents& events_;
  bool device_;
  std::map<int, Launches> threads_;
};

// Returns the share of a node's time for gradients of weights. It is 1 for their accumulation and
// for the embedding. It is one half for products with weights, which compute two gradients with the
// same arithmetic, and for compiled layers. It is 0 for all others.
[[nodiscard]] double weight_share(std::string_view node);

// Returns the indices of the nodes that are no part of another node.
[[nodiscard]] std::vector<std::size_t> outer_nodes(const TraceEvents& events);

// An action of PyTorch's pipelining, whose range is called "PP:2F0".
struct StageAction {
  int stage = 0;
  char pass = 'F';  // or B, I, W
  const TraceEvent* range = nullptr;
};

// The actions of a file, in order of start.
struct StageActions {
  std::vector<StageAction> list;
  std::set<int> senders;    // stages that send activations to the next stage
  std::set<int> receivers;  // stages that receive activations from the stage before
  int overlapped = 0;       // ranges of two actions at once, which are left out

  // Returns the action that runs at a time, or nullptr.
  [[nodiscard]] const StageAction* at(double time_us) const;
};
[[nodiscard]] StageActions find_actions(const TraceEvents& events);

// Returns the times of each stage that has an action.
[[nodiscard]] std::map<int, PartTimes> stage_times(const TraceEvents& events,
                                                   const TraceClock& clock,
                                                   const StageActions& actions);

struct NamedLayer {
  std::string name;
  int stage = -1;  // whose forward pass has the first occurrence; -1: none
  PartTimes times;
};

struct NamedLayers {
  std::vector<NamedLayer> layers;  // in order of their first forward
  double unclaimed_s = 0;          // backward nodes of no layer
  std::string looked_through;      // name of a library's range, whose contents were read; "": none
};

// Finds the layers whose forward runs in ranges NAME.forward. Returns kBadInput if ranges overlap,
// and none if there are no such ranges.
[[nodiscard]] Expected<NamedLayers> named_layers(const TraceEvents& events, const TraceClock& clock,
                                                 const StageActions& actions,
                                                 std::string_view origin);

}  // namespace dynmo::observe
