// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <string>
#include <utility>

#include "call_impl.h"

namespace dynmo::strict {

using at::Tensor;
using c10::IValue;

Arguments::Arguments(const c10::OperatorHandle& op, torch::jit::Stack& stack)
    : schema_(op.schema()),
      given_(stack.end() - static_cast<std::ptrdiff_t>(schema_.arguments().size()), stack.end()) {
  stack.erase(stack.end() - static_cast<std::ptrdiff_t>(given_.size()), stack.end());
}

const IValue& Arguments::operator[](std::string_view name) const {
  for (std::size_t a = 0; a < given_.size(); ++a) {
    if (schema_.arguments()[a].name() == name) return given_[a];
  }
  TORCH_CHECK(false, "strict device: ", schema_.name(), " has no argument ", std::string(name));
}

Tensor Arguments::tensor(std::string_view name) const {
  const IValue& value = (*this)[name];
  return value.isTensor() ? value.toTensor() : Tensor();
}

void launch(const char* name, const std::vector<Tensor>& read, const std::vector<Tensor>& written,
            std::function<void()> work) {
  last_operator() = name;
  note_own_use(name);
  const auto blocks = [](const std::vector<Tensor>& tensors) {
    std::vector<Block*> all;
    for (const Tensor& tensor : tensors) {
      if (Block* const block = block_of(tensor)) all.push_back(block);
    }
    return all;
  };
  for (const auto* tensors : {&read, &written}) {
    for (const Tensor& tensor : *tensors) {
      TORCH_CHECK(is_ours(tensor), "strict device: ", name, " of a tensor that is not on it");
    }
  }
  Machine::get().launch(read.front().device().index(), name, blocks(read), blocks(written),
                        std::move(work));
}

}  // namespace dynmo::strict
