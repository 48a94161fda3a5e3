// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures what the layers of a rank really hold between forward and backward.

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>

#include "dynmo/core/units.h"
#include "dynmo/model/forwarding_layer.h"

namespace dynmo::train::testing {

// Follows each allocation of the thread that makes the meter, for as long as the meter exists.
// Counts an allocation as saved from the end of the forward that made it, or from the beginning of
// the forward that reads it, until it is freed. So all tensors that layers hold count, also those
// that the plan does not know. It replaces libtorch's profiler while it exists.
class SavedMeter {
 public:
  SavedMeter() { current() = this; }
  ~SavedMeter() { current() = nullptr; }
  SavedMeter(const SavedMeter&) = delete;
  SavedMeter& operator=(const SavedMeter&) = delete;

  // Returns the meter of this thread, or null.
  static SavedMeter*& current() {
    thread_local SavedMeter* meter = nullptr;
    return meter;
  }
  [[nodiscard]] Bytes peak() const { return book_->peak; }

  // Counts the input of a layer as saved. It stays so only if a layer keeps it.
  void save(const at::Tensor& input) { book_->save(memory_of(input)); }
  void begin_forward() { book_->made.clear(); }
  // Counts what the forward has made and not freed, but for its output.
  void end_forward(const model::Output& output) {
    const std::set<const void*> made = std::exchange(book_->made, {});
    for (const void* memory : made) {
      if (memory != memory_of(output.hidden.x) && memory != memory_of(output.loss)) {
        book_->save(memory);
      }
    }
  }

 private:
  struct Book final : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void* memory, std::int64_t size, std::size_t, std::size_t,
                           c10::Device) override {
      if (size > 0) {
        live[memory] = Bytes{size};
        made.insert(memory);
        return;
      }
      const auto found = live.find(memory);
      if (found == live.end()) return;
      if (saved.erase(memory) > 0) held = held - found->second;
      live.erase(found);
      made.erase(memory);
    }
    bool memoryProfilingEnabled() const override { return true; }

    void save(const void* memory) {
      if (memory == nullptr) return;
      const auto found = live.find(memory);
      ASSERT_NE(found, live.end()) << "a tensor that this thread has made in this step";
      if (saved.insert(memory).second) held += found->second;
      peak = std::max(peak, held);
    }

    std::map<const void*, Bytes> live;
    std::set<const void*> made;  // in the forward that runs
    std::set<const void*> saved;
    Bytes held;
    Bytes peak;
  };

  static const void* memory_of(const at::Tensor& tensor) {
    return tensor.defined() ? tensor.storage().data() : nullptr;
  }

  std::shared_ptr<Book> book_ = std::make_shared<Book>();
  c10::DebugInfoGuard guard_{c10::DebugInfoKind::PROFILER_STATE, book_};
};

// A trained layer that tells the thread's meter, if there is one, of every forward.
class MeteredLayer final : public model::ForwardingLayer {
 public:
  using ForwardingLayer::ForwardingLayer;
  model::Output forward(const model::LayerState& state, const model::Hidden& input,
                        const model::LayerContext& context,
                        std::unique_ptr<model::Stash>* stash) const override {
    SavedMeter* meter = SavedMeter::current();
    if (meter == nullptr || state.frozen) return inner().forward(state, input, context, stash);
    meter->save(input.x);
    meter->begin_forward();
    model::Output output = inner().forward(state, input, context, stash);
    meter->end_forward(output);
    return output;
  }
};

inline model::Model metered(model::Model layers) {
  for (auto& layer : layers) layer = std::make_shared<MeteredLayer>(std::move(layer));
  return layers;
}

}  // namespace dynmo::train::testing
