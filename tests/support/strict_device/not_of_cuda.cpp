// SPDX-License-Identifier: Apache-2.0
// Operators of ATen that the CPU computes and CUDA does not, as the dispatcher of PyTorch 2.11.0
// for CUDA 13 says: _dispatch_has_computed_kernel_for_dispatch_key(name, "CPU"), (name, "CUDA").
#include <set>
#include <string_view>

namespace dynmo::strict {

extern const std::set<std::string_view> kNotOfCuda;
const std::set<std::string_view> kNotOfCuda = {
    "aten::_add_relu.Scalar",
    "aten::_add_relu.Tensor",
    "aten::_add_relu.out",
    "aten::_add_relu_.Scalar",
    "aten::_add_relu_.Tensor",
    "aten::_convert_weight_to_int4pack_for_cpu",
    "aten::_dyn_quant_matmul_4bit",
    "aten::_dyn_quant_pack_4bit_weight",
    "aten::_empty_affine_quantized",
    "aten::_empty_per_channel_affine_quantized",
    "aten::_foobar",
    "aten::_functional_assert_async.msg",
    "aten::_histogramdd_bin_edges",
    "aten::_histogramdd_from_bin_cts",
    "aten::_histogramdd_from_bin_tensors",
    "aten::_make_dep_token",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_spdiags",
    "aten::_test_functorch_fallback",
    "aten::_test_optional_filled_intlist",
    "aten::_test_optional_floatlist",
    "aten::_test_optional_intlist",
    "aten::_weight_int4pack_mm_for_cpu",
    "aten::from_file",
    "aten::histogram.bin_ct",
    "aten::histogram.bin_ct_out",
    "aten::histogram.bins_tensor",
    "aten::histogram.bins_tensor_out",
    "aten::mkldnn_rnn_layer",
    "aten::mkldnn_rnn_layer_backward",
    "aten::narrow_copy.out",
    "aten::quantize_per_tensor.tensors",
    "aten::quantized_gru.data",
    "aten::quantized_gru.data_legacy",
    "aten::quantized_gru.input",
    "aten::quantized_gru.input_legacy",
    "aten::quantized_lstm.data",
    "aten::quantized_lstm.data_legacy",
    "aten::quantized_lstm.input",
    "aten::quantized_lstm.input_legacy",
    "aten::slow_conv3d_forward",
    "aten::slow_conv3d_forward.output",
    "aten::to_mkldnn",
};

}  // namespace dynmo::strict
