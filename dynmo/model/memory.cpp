// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/memory.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>

#include "dynmo/core/check.h"
#include "dynmo/model/family_impl.h"
#include "dynmo/model/recipe.h"

namespace dynmo::model {
namespace {

constexpr std::int64_t kFloat = 4;

std::int64_t element_bytes(cost::Precision precision) {
  return static_cast<std::int64_t>(c10::elementSize(scalar_type(precision)));
}

}  // namespace

struct AllocationMeter::Impl {
  class Reporter final : public c10::MemoryReportingInfoBase {
   public:
    explicit Reporter(c10::DeviceType device) : device_(device) {}
    void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t,
                           c10::Device device) override {
      if (device.type() != device_) return;
      held += Bytes{size};
      peak = std::max(peak, held);
    }
    bool memoryProfilingEnabled() const override { return true; }

    Bytes held;
    Bytes peak;

   private:
    c10::DeviceType device_;
  };

  explicit Impl(c10::DeviceType device) : reporter(std::make_shared<Reporter>(device)) {}
  std::shared_ptr<Reporter> reporter;
  c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, reporter};
};

AllocationMeter::AllocationMeter(c10::DeviceType device) : impl_(std::make_unique<Impl>(device)) {}
AllocationMeter::~AllocationMeter() = default;
Bytes AllocationMeter::held() const { return impl_->reporter->held; }
Bytes AllocationMeter::peak() const { return impl_->reporter->peak; }

Bytes parameter_bytes(const Layer& layer) {
  std::int64_t total = 0;
  for (const ParameterSpec& spec : layer.parameters()) {
    total += kFloat * c10::multiply_integers(spec.shape);
  }
  return Bytes{total};
}

Bytes copy_bytes(const Layer& layer) {
  if (layer.compute_type() == at::kFloat) return Bytes{0};
  const auto element = static_cast<std::int64_t>(c10::elementSize(layer.compute_type()));
  return Bytes{parameter_bytes(layer).value / kFloat * element};
}

Bytes buffer_bytes(const Layer& layer) {
  std::int64_t total = 0;
  for (const BufferSpec& spec : layer.buffers()) {
    total +=
        static_cast<std::int64_t>(c10::elementSize(spec.type)) * c10::multiply_integers(spec.shape);
  }
  return Bytes{total};
}

Bytes boundary_bytes(const LlamaConfig& config, std::int64_t sequences, cost::Precision precision) {
  return Bytes{element_bytes(precision) * sequences * config.shape.sequence * config.shape.hidden};
}

// Dimensions as in operations.h. Per token, with D and V = kv_heads x head_size:
//   attention: x, rotated q, output (3 D), rotated k, v (2 V), 1 / rms, log-sum-exp (heads)
//   mlp: x (D), gate, up (2 F), 1 / rms
//   head: x (D), probabilities, 1 / rms
// and one byte of dropout mask for each output of a half block. In bf16 all take half as much but
// 1 / rms, log-sum-exp and probabilities, which stay fp32. What weight gradients need beside
// it (the normed input, the product of gate and up) is computed again.
Bytes activation_bytes(const LlamaConfig& config, LayerId layer, std::int64_t sequences,
                       cost::Precision precision) {
  const Part part = decoder_place(layer, config.shape.blocks).part;
  const std::int64_t tokens = sequences * config.shape.sequence;
  const std::int64_t element = element_bytes(precision);
  const std::int64_t mask = config.dropout > 0 ? config.shape.hidden : 0;
  if (part == Part::kEmbedding) return Bytes{0};
  if (part == Part::kHead) {
    return Bytes{tokens * (element * config.shape.hidden + kFloat * (config.shape.vocabulary + 1))};
  }
  if (part == Part::kAttention) {
    const std::int64_t kv = config.shape.kv_heads * config.head_size();
    return Bytes{tokens * (element * (3 * config.shape.hidden + 2 * kv) +
                           kFloat * (1 + config.shape.heads) + mask)};
  }
  return Bytes{tokens *
               (element * (config.shape.hidden + 2 * config.shape.intermediate) + kFloat + mask)};
}

Bytes boundary_bytes(const Gpt2Config& config, std::int64_t sequences, cost::Precision precision) {
  return Bytes{element_bytes(precision) * sequences * config.shape.sequence * config.shape.hidden};
}

// Per token, with D and F as in operations.h:
//   embedding: a mask where dropout acts
//   attention: x, query, key, value, output (5 D), mean, 1 / std, log-sum-exp (heads)
//   mlp: x (D), input of gelu (F), mean, 1 / std
//   head: x (D), probabilities, mean, 1 / std
// and a mask as above. In bf16 all take half as much but the statistics (mean, 1 / std,
// log-sum-exp) and probabilities, which stay fp32.
Bytes activation_bytes(const Gpt2Config& config, LayerId layer, std::int64_t sequences,
                       cost::Precision precision) {
  const Part part = decoder_place(layer, config.shape.blocks).part;
  const std::int64_t tokens = sequences * config.shape.sequence;
  const std::int64_t mask = config.dropout > 0 ? config.shape.hidden : 0;
  const std::int64_t element = element_bytes(precision);
  const std::int64_t normed = element * config.shape.hidden + kFloat * 2;  // what every norm keeps
  if (part == Part::kEmbedding) return Bytes{tokens * mask};
  if (part == Part::kHead) return Bytes{tokens * (normed + kFloat * config.shape.vocabulary)};
  const std::int64_t own = part == Part::kAttention
                               ? element * 4 * config.shape.hidden + kFloat * config.shape.heads
                               : element * config.shape.intermediate;
  return Bytes{tokens * (normed + own + mask)};
}

StashBytes measure_stash(const Layer& layer, const LayerState& state, const at::Tensor& input,
                         const LayerContext& context) {
  std::unique_ptr<Stash> stash;
  StashBytes bytes;
  {
    const AllocationMeter meter(
        state.parameters.empty() ? at::kCPU : state.parameters.front().value.device().type());
    const Output output = layer.forward(state, input, context, &stash);
    const auto size = [](const at::Tensor& t) {
      return Bytes{t.defined() ? static_cast<std::int64_t>(t.nbytes()) : 0};
    };
    bytes.held = meter.held() - size(output.hidden.x) - size(output.loss) + size(input);
    bytes.peak = meter.peak();
  }
  return bytes;
}

}  // namespace dynmo::model
