// SPDX-License-Identifier: Apache-2.0
#pragma once

// Folders that transformers saved, and the tensors of such a folder.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "dynmo/core/json.h"
#include "dynmo/weights/hugging_face.h"
#include "dynmo/weights/mixtral.h"

namespace dynmo::weights::testing {

inline const std::filesystem::path kGoldens = GOLDENS;

inline at::Tensor tensor_of(const checkpoint::TensorView& view, at::ScalarType type) {
  at::Tensor tensor = at::empty(view.shape, type);
  EXPECT_EQ(tensor.nbytes(), view.bytes.size());
  std::memcpy(tensor.data_ptr(), view.bytes.data(), view.bytes.size());
  return tensor;
}

// All tensors of a folder's files in fp32, by name; of experts by the name of each.
inline std::map<std::string, at::Tensor> tensors_of(const std::filesystem::path& folder) {
  TensorMap views;
  const std::vector<checkpoint::Safetensors> files = open_hugging_face(folder).value();
  for (const checkpoint::Safetensors& file : files) {
    for (const checkpoint::TensorView& view : file.tensors()) views[view.name] = view;
  }
  const std::filesystem::path config = folder / "config.json";
  const HuggingFaceModel model = parse_hugging_face(read_json(config).value(), "").value();
  if (model.experts) {
    EXPECT_TRUE(separate_experts(views, model::shape_of(model.decoder), *model.experts, ""));
  }
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, view] : views) {
    const at::ScalarType type = view.dtype == checkpoint::DType::kF16    ? at::kHalf
                                : view.dtype == checkpoint::DType::kBF16 ? at::kBFloat16
                                                                         : at::kFloat;
    tensors[name] = tensor_of(view, type).to(at::kFloat);
  }
  return tensors;
}

}  // namespace dynmo::weights::testing
