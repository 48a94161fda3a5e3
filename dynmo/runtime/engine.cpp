// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/engine.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/seconds_since.h"
#include "dynmo/kernels/host_memory.h"
#include "dynmo/model/memory.h"
#include "dynmo/runtime/device_clock.h"
#include "dynmo/runtime/stage_messages.h"

namespace dynmo::runtime {
namespace {

using schedule::Action;
using schedule::ActionKind;
using Clock = std::chrono::steady_clock;
using Key = std::pair<StageId, MicroBatchId>;

// The saved tensors of a stage for a micro-batch, from F to the end of W, by layer.
struct StageStash {
  std::vector<std::unique_ptr<model::Stash>> layers;
};

class Interpreter {
 public:
  Interpreter(transport::Transport& transport, int lane, const model::Model& model,
              const StepInput& input, LayerStates& states)
      : rank_(transport.rank()),
        model_(model),
        input_(input),
        states_(states),
        emulated_(input.emulated_speed),
        clock_(input.staging.device, &emulated_),
        messages_(transport, lane, input, output_, clock_.start().host) {}

  Expected<StepOutput> run() {
    const model::EmulatedDevice::Use use(emulated_);
    const auto since_epoch = clock_.start().host.time_since_epoch();
    output_.start_ns = std::chrono::duration_cast<Nanoseconds>(since_epoch).count();
    for (const Action& action : input_.lowered.ranks[rank_.index()]) {
      if (!schedule::is_compute(action.kind)) {
        communicate(action);
        continue;
      }
      if (input_.before_action) input_.before_action();
      DYNMO_TRY(wait_for(action));
      const DeviceClock::Mark begin = clock_.mark();
      compute(action);
      times_.actions.emplace_back(begin, clock_.mark());
      output_.actions.push_back({action, {}, {}});
    }
    DYNMO_TRY(messages_.finish());
    queue_results();
    if (input_.before_wait) input_.before_wait();
    clock_.finish();
    output_.seconds = to_seconds(host_time());
    read_device();
    DYNMO_CHECK(stashes_.empty() && messages_.all_used() && values_.kept.empty(),
                "a schedule that uses all it makes");
    return std::move(output_);
  }

 private:
  int stages() const { return static_cast<int>(input_.plan.stages.size()); }
  const plan::PlanStage& stage(StageId id) const { return input_.plan.stages[id.index()]; }

  // Waits for the message of an action. An emulated device waits from the end of its work on, not
  // from the host's call.
  Expected<void> wait_for(const Action& action) {
    using Message = model::EmulatedDevice::Message;
    const double waited_s = output_.waiting_s;
    const bool emulated = emulated_.has_worked();
    const std::int64_t waits = emulated ? model::EmulatedDevice::waits() : 0;
    DYNMO_ASSIGN(values_.arrived, messages_.wait_for(action));
    if (!emulated || !values_.arrived) return {};
    const Clock::time_point since = emulated_.time();
    const bool waited = model::EmulatedDevice::waits() > waits;
    emulated_.receive(values_.arrived->x, waited ? Message::kWaitedFor : Message::kWasThere);
    output_.waiting_s = waited_s + to_seconds(emulated_.time() - since);
    return {};
  }

  void communicate(const Action& action) {
    const bool sends =
        action.kind == ActionKind::kSendActivation || action.kind == ActionKind::kSendGradient;
    if (!sends) return messages_.receive(action);
    model::Hidden value = take(values_.kept, {action.stage, action.micro_batch});
    if (emulated_.has_worked()) emulated_.stamp(value.x);
    messages_.send(action, std::move(value));
  }

  // Queues the copies of losses and figures, which the host reads when it has waited for all.
  void queue_results() {
    if (input_.staging.device.is_cpu()) return;
    for (auto* tensors_of : {&results_.losses, &results_.later_figures}) {
      for (auto& [layer, tensors] : *tensors_of) {
        tensors = input_.staging.to_host_later(at::stack(tensors).detach()).unbind();
      }
    }
  }

  // Reads the device's measurements and results once, after its work. So nothing waits for it
  // earlier.
  void read_device() {
    for (const Due& due : times_.due) *due.seconds = clock_.seconds(due.from, due.to);
    for (const auto& [seconds, fetch_s] : times_.fetched) *seconds += fetch_s;
    const auto since_start = [&](DeviceClock::Mark mark) {
      return to_nanoseconds(clock_.seconds(clock_.start(), mark));
    };
    for (std::size_t i = 0; i < times_.actions.size(); ++i) {
      output_.actions[i].start = since_start(times_.actions[i].first);
      output_.actions[i].end = since_start(times_.actions[i].second);
    }
    for (const auto& [layer, losses] : results_.losses) {
      for (const at::Tensor& loss : losses) output_.losses[layer].push_back(loss.item<double>());
    }
    for (const auto& [layer, micro_batches] : results_.later_figures) {
      for (std::size_t m = 0; m < micro_batches.size(); ++m) {
        const auto* own = kernels::host_data<const double>(micro_batches[m]);
        auto& figures = results_.figures.at(layer)[m];
        figures.insert(figures.end(), own, own + micro_batches[m].numel());
      }
    }
    for (const auto& [layer, figures] : results_.figures) output_.figures[layer] = sum(figures);
  }

  static std::vector<double> sum(const std::vector<std::vector<double>>& micro_batches) {
    std::vector<double> total(micro_batches.front().size(), 0.0);
    for (const std::vector<double>& figures : micro_batches) {
      for (std::size_t k = 0; k < total.size(); ++k) total[k] += figures.at(k);
    }
    return total;
  }

  // Sets `seconds` to the time between two marks at the end of the step. Its address must not
  // change.
  void measure(double& seconds, DeviceClock::Mark from, DeviceClock::Mark to) {
    times_.due.push_back({&seconds, from, to});
  }

  Nanoseconds host_time() const { return Clock::now() - clock_.start().host; }

  // Returns the input of an action: the message that arrived, or the value of a stage on this rank.
  model::Hidden input_of(Key key, StageId neighbour) {
    if (values_.arrived) return *std::exchange(values_.arrived, std::nullopt);
    return take(values_.kept, {neighbour, key.second});
  }

  template <typename Map>
  static typename Map::mapped_type take(Map& map, Key key) {
    const auto found = map.find(key);
    DYNMO_CHECK(found != map.end(), "a value for stage {}, micro-batch {}", key.first, key.second);
    auto value = std::move(found->second);
    map.erase(found);
    return value;
  }

  void compute(const Action& action) {
    const Key key{action.stage, action.micro_batch};
    switch (action.kind) {
      case ActionKind::kForward:
        return forward(key);
      case ActionKind::kInputGradient:
        return input_gradient(key, Weights::kLater);
      case ActionKind::kWeightGradient:
        return weight_gradient(key);
      default:
        return input_gradient(key, Weights::kNow);
    }
  }

  int micro_batches() const { return input_.lowered.shape.micro_batches; }
  int step_micro_batches() const {
    return input_.step_micro_batches > 0 ? input_.step_micro_batches : micro_batches();
  }
  MicroBatchId in_step(MicroBatchId id) const {
    return MicroBatchId(input_.first_micro_batch + id.value);
  }

  // Calls gradient_ready after a layer's last micro-batch. Weight gradients are in micro-batch
  // order in every schedule.
  void weight_gradient_done(LayerId layer, MicroBatchId id) {
    if (!input_.gradient_ready || id.value + 1 < micro_batches()) return;
    messages_.post_leaving();  // gradient_ready may wait for another replica
    input_.gradient_ready(layer);
  }

  // Returns a copy on the device, from pinned memory, so the host does not wait. `tensor` is
  // undefined in emulated runs.
  at::Tensor on_device(const at::Tensor& tensor) const {
    const Staging& staging = input_.staging;
    if (!tensor.defined() || staging.device.is_cpu()) return tensor;
    return staging.to_device(
        staging.host_buffer(tensor.sizes(), tensor.scalar_type()).copy_(tensor));
  }

  bool needs_targets(StageId id) const {
    const plan::LayerRange layers = stage(id).layers;
    for (int i = layers.first.value; i < layers.end(); ++i) {
      if (model_[static_cast<std::size_t>(i)]->needs().targets) return true;
    }
    return false;
  }

  // Returns the context of the stage's layers, with the parts of the batch that they need.
  model::LayerContext context_of(Key key) const {
    model::LayerContext context;
    context.step = input_.step;
    context.micro_batch = in_step(key.second);
    context.pass = input_.pass;
    context.loss_weight = 1.0 / step_micro_batches();
    if (input_.boundary_shape.size() == 3) {
      context.sequences = input_.boundary_shape[0];
      context.sequence_length = input_.boundary_shape[1];
    }
    const bool tokens = key.first.value == 0;
    const bool targets = needs_targets(key.first);
    if (tokens || targets) {
      const MicroBatch batch = input_.batch(context.micro_batch);
      if (tokens) context.tokens_BT = on_device(batch.tokens_BT);
      if (targets) context.targets_BT = on_device(batch.targets_BT);
    }
    return context;
  }

  cost::LayerTime& time_of(LayerId layer, MicroBatchId micro_batch) {
    std::vector<cost::LayerTime>& times = output_.layer_times[layer];
    if (times.empty()) times.resize(static_cast<std::size_t>(input_.lowered.shape.micro_batches));
    return times[micro_batch.index()];
  }

  void forward(Key key) {
    const plan::LayerRange layers = stage(key.first).layers;
    model::Hidden hidden;
    if (key.first.value > 0) hidden = input_of(key, StageId(key.first.value - 1));
    const Clock::time_point fetching = Clock::now();
    const model::LayerContext context = context_of(key);
    const bool fetches = key.first.value == 0 || needs_targets(key.first);
    const double fetch_s = fetches ? seconds_since(fetching) : 0;
    emulated_.stand_still(fetch_s);
    const bool trained = !input_.lowered.shape.stages[key.first.index()].frozen;
    StageStash stash;
    if (trained) stash.layers.resize(static_cast<std::size_t>(layers.count));
    for (int i = 0; i < layers.count; ++i) {
      const LayerId id(layers.first.value + i);
      const bool saves = trained && id.value >= input_.frozen_layers;
      hidden = forward_layer(id, key.second, hidden, context,
                             saves ? &stash.layers[static_cast<std::size_t>(i)] : nullptr);
    }
    if (trained) stashes_[key] = std::move(stash);
    const LayerId reader = key.first.value == 0 ? layers.first : LayerId(layers.end() - 1);
    times_.fetched.emplace_back(&time_of(reader, key.second).forward_s, fetch_s);
    if (key.first.value + 1 == stages()) return;
    DYNMO_CHECK(messages_.room_behind(key.first) > 0 || !hidden.rows.defined(),
                "room for rows behind stage {}", key.first);
    if (trained) messages_.forwarded(key, hidden);
    values_.kept[key] = std::move(hidden);
  }

  model::Hidden forward_layer(LayerId id, MicroBatchId micro_batch, const model::Hidden& input,
                              const model::LayerContext& context,
                              std::unique_ptr<model::Stash>* stash) {
    std::optional<model::AllocationMeter> meter;
    if (input_.meter_stashes && stash != nullptr) meter.emplace(input_.staging.device.type());
    const DeviceClock::Mark begin = clock_.mark();
    model::Output output = model_[id.index()]->forward(states_.at(id), input, context, stash);
    if (output.hidden.x.defined()) output.hidden.x = output.hidden.x.contiguous();
    measure(time_of(id, micro_batch).forward_s, begin, clock_.mark());
    if (stash != nullptr) note_stash(id, **stash, meter, input, output);
    note(id, micro_batch, output);
    return std::move(output.hidden);
  }

  void note_stash(LayerId id, const model::Stash& stash,
                  const std::optional<model::AllocationMeter>& meter, const model::Hidden& input,
                  const model::Output& output) {
    std::optional<Bytes> bytes = stash.bytes();
    if (!bytes && meter) {
      // The stash and the output are new memory. The input, which the stash keeps alive, is not.
      const auto size = [](const at::Tensor& tensor) {
        return Bytes{tensor.defined() ? static_cast<std::int64_t>(tensor.nbytes()) : 0};
      };
      bytes = meter->held() + size(input.x) - size(output.hidden.x) - size(output.loss);
    }
    if (bytes) output_.stash_bytes[id] = std::max(output_.stash_bytes[id], *bytes);
  }

  void note(LayerId id, MicroBatchId micro_batch, const model::Output& output) {
    const model::Layer& layer = *model_[id.index()];
    if (output.loss.defined()) {
      DYNMO_CHECK(layer.needs().loss, "layer {} ('{}') with a loss says so in needs()", id,
                  layer.name());
      auto& losses = results_.losses[id];
      losses.resize(static_cast<std::size_t>(micro_batches()));
      losses[micro_batch.index()] = output.loss;
    }
    if (!input_.room.empty() && input_.room[id.index()] > 0 &&
        input_.pass == model::Pass::kTraining) {
      auto& rows = output_.rows[id];
      rows.resize(static_cast<std::size_t>(micro_batches()));
      rows[micro_batch.index()] = output.hidden.x.numel() / output.hidden.x.size(-1);
    }
    if (input_.pass != model::Pass::kTraining) return;
    const auto keep = [&](auto& all, const auto& figures) {
      all[id].resize(static_cast<std::size_t>(micro_batches()));
      all[id][micro_batch.index()] = figures;
    };
    const bool later = output.later_figures.defined();
    if (later || !output.figures.empty()) keep(results_.figures, output.figures);
    if (later) keep(results_.later_figures, output.later_figures);
  }

  enum class Weights { kNow, kLater };

  void input_gradient(Key key, Weights weights) {
    const plan::LayerRange layers = stage(key.first).layers;
    at::Tensor gradient;
    if (key.first.value + 1 < stages()) gradient = input_of(key, StageId(key.first.value + 1)).x;
    StageStash& stash = stashes_.at(key);
    for (int i = layers.count - 1; i >= 0; --i) {
      const LayerId id(layers.first.value + i);
      if (id.value < input_.frozen_layers) break;
      // No layer needs the gradient below the first trained one.
      const auto wanted = id.value > input_.frozen_layers ? model::Layer::InputGradient::kWanted
                                                          : model::Layer::InputGradient::kNotWanted;
      model::LayerState& state = states_.at(id);
      model::Stash& saved = *stash.layers[static_cast<std::size_t>(i)];
      const DeviceClock::Mark begin = clock_.mark();
      gradient = model_[id.index()]->input_gradient(state, saved, gradient, wanted);
      if (gradient.defined()) gradient = gradient.contiguous();
      const DeviceClock::Mark middle = clock_.mark();
      cost::LayerTime& time = time_of(id, key.second);
      measure(time.input_gradient_s, begin, middle);
      if (weights == Weights::kNow) {
        model_[id.index()]->weight_gradient(state, saved);
        stash.layers[static_cast<std::size_t>(i)].reset();
        measure(time.weight_gradient_s, middle, clock_.mark());
        weight_gradient_done(id, key.second);
      }
    }
    if (weights == Weights::kNow) stashes_.erase(key);
    const bool sends =
        key.first.value > 0 && !input_.lowered.shape.stages[key.first.index() - 1].frozen;
    if (sends) values_.kept[key] = std::move(gradient);
  }

  void weight_gradient(Key key) {
    const plan::LayerRange layers = stage(key.first).layers;
    StageStash stash = take(stashes_, key);
    for (int i = layers.count - 1; i >= 0; --i) {
      const LayerId id(layers.first.value + i);
      if (id.value < input_.frozen_layers) break;
      const DeviceClock::Mark begin = clock_.mark();
      model_[id.index()]->weight_gradient(states_.at(id),
                                          *stash.layers[static_cast<std::size_t>(i)]);
      measure(time_of(id, key.second).weight_gradient_s, begin, clock_.mark());
      weight_gradient_done(id, key.second);
    }
  }

  // A time that is read from the device's clock at the end.
  struct Due {
    double* seconds;
    DeviceClock::Mark from;
    DeviceClock::Mark to;
  };
  // The results of layers, by micro-batch.
  struct Results {
    std::map<LayerId, std::vector<at::Tensor>> losses;
    std::map<LayerId, std::vector<std::vector<double>>> figures;
    std::map<LayerId, std::vector<at::Tensor>> later_figures;  // follow the figures
  };
  struct Times {
    std::vector<Due> due;  // point into output_.layer_times, which do not move
    std::vector<std::pair<DeviceClock::Mark, DeviceClock::Mark>> actions;
    std::vector<std::pair<double*, double>> fetched;  // forward time, seconds of reading tokens
  };

  struct Values {
    // Results by (stage, micro-batch) that are not yet sent, or used by a neighbouring stage of
    // this rank. Gradients have no rows.
    std::map<Key, model::Hidden> kept;
    std::optional<model::Hidden> arrived;  // message for the current action
  };

  transport::Member rank_;
  const model::Model& model_;
  const StepInput& input_;
  LayerStates& states_;

  model::EmulatedDevice emulated_;
  DeviceClock clock_;
  Times times_;
  Results results_;
  StepOutput output_;
  StageMessages messages_;
  std::map<Key, StageStash> stashes_;
  Values values_;
};

}  // namespace

Expected<StepOutput> run_schedule(transport::Transport& transport, int lane,
                                  const model::Model& model, const StepInput& input,
                                  LayerStates& states) {
  DYNMO_CHECK(input.lowered.lowered, "a lowered schedule");
  return Interpreter(transport, lane, model, input, states).run();
}

void append(StepOutput& step, StepOutput round, int first) {
  if (step.start_ns == 0) {
    step = std::move(round);
    return;
  }
  step.seconds += round.seconds;
  step.waiting_s += round.waiting_s;
  for (const auto& [layer, losses] : round.losses) {
    auto& all = step.losses[layer];
    all.insert(all.end(), losses.begin(), losses.end());
  }
  for (const auto& [layer, figures] : round.figures) {
    auto& sums = step.figures[layer];
    for (std::size_t k = 0; k < figures.size(); ++k) sums.at(k) += figures[k];
  }
  for (const auto& [layer, rows] : round.rows) {
    auto& all = step.rows[layer];
    all.insert(all.end(), rows.begin(), rows.end());
  }
  for (const auto& [layer, bytes] : round.stash_bytes) {
    step.stash_bytes[layer] = std::max(step.stash_bytes[layer], bytes);
  }
  for (const auto& [layer, times] : round.layer_times) {
    auto& all = step.layer_times[layer];
    all.insert(all.end(), times.begin(), times.end());
  }
  const Nanoseconds later{round.start_ns - step.start_ns};
  const auto append_to = [&](std::vector<schedule::TimedAction>& all,
                             const std::vector<schedule::TimedAction>& more) {
    for (schedule::TimedAction timed : more) {
      timed.action.micro_batch = MicroBatchId(first + timed.action.micro_batch.value);
      timed.start += later;
      timed.end += later;
      all.push_back(timed);
    }
  };
  append_to(step.actions, round.actions);
  append_to(step.messages, round.messages);
}

}  // namespace dynmo::runtime
