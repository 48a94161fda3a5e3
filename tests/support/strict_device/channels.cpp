// SPDX-License-Identifier: Apache-2.0
// Messages of the strict device, for a stand-in of NCCL (tests/support/strict_channels.py). A send
// or receive is an operator of the current stream, which the stand-in has made its own. Bytes that
// arrive later are written behind the back of the clocks: the operator that receives them has
// counted as their writer since it was launched.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <array>
#include <cstring>

#include "operators_impl.h"

namespace dynmo::strict {
namespace {

using at::Tensor;

void check(const Tensor& tensor) {
  TORCH_CHECK(is_ours(tensor) && tensor.is_contiguous() && tensor.numel() > 0,
              "a channel takes contiguous tensors of the device");
}

Tensor send(const Tensor& tensor) {
  check(tensor);
  TORCH_CHECK(mode() == Mode::kAtOnce, "channels of the late mode");
  Tensor bytes = at::empty({static_cast<std::int64_t>(tensor.nbytes())}, at::kByte);
  std::array read = {block_of(tensor)};
  Machine::get().launch(tensor.device().index(), "send", read, {}, [&] {
    std::memcpy(bytes.mutable_data_ptr(), opened(tensor).const_data_ptr(), tensor.nbytes());
  });
  return bytes;
}

void receive(const Tensor& tensor) {
  check(tensor);
  std::array written = {block_of(tensor)};
  Machine::get().launch(tensor.device().index(), "receive", {}, written, [] {});
}

void arrive(const Tensor& tensor, const Tensor& bytes) {
  check(tensor);
  TORCH_CHECK(bytes.nbytes() == tensor.nbytes(), "a message of ", bytes.nbytes(), " bytes where ",
              tensor.nbytes(), " are received");
  std::memcpy(opened(tensor).mutable_data_ptr(), bytes.const_data_ptr(), tensor.nbytes());
}

TORCH_LIBRARY_FRAGMENT(strict_device, library) {
  library.def("send(Tensor tensor) -> Tensor", &send);
  library.def("receive(Tensor tensor) -> ()", &receive);
  library.def("arrive(Tensor tensor, Tensor bytes) -> ()", &arrive);
}

}  // namespace
}  // namespace dynmo::strict
