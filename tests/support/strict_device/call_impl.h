// SPDX-License-Identifier: Apache-2.0
#pragma once

// A boxed call of an operator that the strict device computes itself: its arguments, and the work
// that it queues.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <string_view>
#include <vector>

#include "operators_impl.h"

namespace dynmo::strict {

// The arguments of a call by their names. The series of libtorch have them in other places.
class Arguments {
 public:
  // Takes them off the stack.
  Arguments(const c10::OperatorHandle& op, torch::jit::Stack& stack);

  [[nodiscard]] const c10::IValue& operator[](std::string_view name) const;
  // Returns an undefined tensor for none.
  [[nodiscard]] at::Tensor tensor(std::string_view name) const;
  [[nodiscard]] const char* name() const { return schema_.name().c_str(); }

 private:
  const c10::FunctionSchema& schema_;
  std::vector<c10::IValue> given_;
};

// Queues work on the bytes of the tensors. Refuses tensors of another device.
void launch(const char* name, const std::vector<at::Tensor>& read,
            const std::vector<at::Tensor>& written, std::function<void()> work);

// Adds an operator to operators_used().
void note_own_use(const char* name);

// Register the operators of their files.
void register_attention(torch::Library& library);
void register_norms_and_products(torch::Library& library);

}  // namespace dynmo::strict
