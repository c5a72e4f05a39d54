#pragma once

#include "plan.h"

// Shows a call that does not pass torch's dispatcher to torch's profilers until the block ends.
#define SHOW_CALL(name) RECORD_FUNCTION(std::string(name), c10::ArrayRef<const c10::IValue>{})

namespace lokakern {

// Ops that have plans; `recorded_op` in Python registers NAME_cold for each.
inline constexpr const char* kOps[] = {"gemm", "routed_gemm", "weight_gradient",
                                       "wide_weight_gradient", "quantize_weight",
                                       "quantize_activated", "activated_gemm",
                                       "rectified_product", "crossed_product",
                                       "norm_gradient", "bias_gradient", "crossed_gradient",
                                       "quantized_weight_gradient", "routed_chain",
                                       "quantized_chain", "routed_gemm_into",
                                       "rectified_product_into", "routed_chain_into",
                                       "quantized_chain_into",
                                       "gemm_norm", "gemm_norm_scaled", "norm_quantize",
                                       "norm_quantize_scaled", "scaled_gemm", "quantize",
                                       "quantize_static", "quantize_transpose",
                                       "quantize_transpose_sums", "quantize_transpose_static",
                                       "quantize_transpose_static_sums", "dequantize",
                                       "output_scale"};
// As Python defines them, for programs without it.
inline constexpr const char* kSchemas[] = {
    "gemm(Tensor a, Tensor b, Tensor? b_scale, Tensor? source, Tensor? bias, str granularity, "
    "float[] limits, str[] distributions, str on_miss, str? check=None) -> Tensor",
    "routed_gemm(Tensor? a, Tensor? b, Tensor? data, Tensor? scale, Tensor? bias, str route, "
    "Tensor? left=None, Tensor? left_scales=None, str left_scale=\"\", bool apart=False) -> Tensor",
    "weight_gradient(Tensor grad, Tensor x, str route) -> Tensor",
    "wide_weight_gradient(Tensor grad, Tensor x, str route) -> Tensor",
    "quantize_weight(Tensor weight, str scales) -> (Tensor, Tensor)",
    "quantize_activated(Tensor x, str activation, str name) -> (Tensor, Tensor)",
    "activated_gemm(Tensor x, str activation, str name, Tensor data, Tensor scale, Tensor? bias, "
    "str route) -> Tensor",
    "rectified_product(Tensor? a, Tensor? b, Tensor? data, Tensor? scale, Tensor? bias, "
    "str route, Tensor? left=None, Tensor? left_scales=None) -> Tensor",
    "crossed_product(Tensor? a, Tensor? b, Tensor? data, Tensor? scale, Tensor? bias, Tensor x0, "
    "Tensor x, str route, Tensor? left=None, Tensor? left_scales=None) -> (Tensor, Tensor)",
    "norm_gradient(Tensor dd, Tensor y, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, str "
    "norm, str activation, float eps) -> (Tensor, Tensor)",
    "bias_gradient(Tensor grad, Tensor bias) -> Tensor",
    "crossed_gradient(Tensor[] terms, Tensor? x0, str sums) -> (Tensor, Tensor, Tensor, Tensor, "
    "Tensor)",
    "quantized_weight_gradient(Tensor turned, Tensor scales, Tensor? x, str route, bool is_wide, "
    "Tensor? data=None, Tensor? data_scales=None) -> Tensor",
    "routed_chain(Tensor x, Tensor?[] operands, str plan) -> Tensor",
    "quantized_chain(Tensor data, Tensor scales, Tensor?[] operands, str plan) -> Tensor",
    "routed_gemm_into(Tensor? a, Tensor? b, Tensor? data, Tensor? scale, Tensor? bias, str route, "
    "Tensor? left, Tensor? left_scales, str left_scale, bool apart, Tensor(a!) out) -> ()",
    "rectified_product_into(Tensor? a, Tensor? b, Tensor? data, Tensor? scale, Tensor? bias, "
    "str route, Tensor? left, Tensor? left_scales, Tensor(a!) out) -> ()",
    "routed_chain_into(Tensor x, Tensor?[] operands, str plan, Tensor(a!) out) -> ()",
    "quantized_chain_into(Tensor data, Tensor scales, Tensor?[] operands, str plan, Tensor(a!) "
    "out) -> ()",
    "gemm_norm(Tensor a, Tensor? a_scale, str a_granularity, Tensor b, Tensor? b_scale, Tensor? "
    "source, str b_granularity, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, Tensor? "
    "residual, Tensor? gate, Tensor? x0, Tensor? x, str norm, float eps, str activation, bool "
    "residual_last, str out_format, str out_granularity, Tensor? out_scale, float[] limits, str[] "
    "distributions, str on_miss) -> Tensor",
    "gemm_norm_scaled(Tensor a, Tensor? a_scale, str a_granularity, Tensor b, Tensor? b_scale, "
    "Tensor? source, str b_granularity, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor? residual, Tensor? gate, Tensor? x0, Tensor? x, str norm, float eps, str activation, "
    "bool residual_last, str out_format, str out_granularity, Tensor? out_scale, float[] limits, "
    "str[] distributions, str on_miss) -> (Tensor, Tensor)",
    "norm_quantize(Tensor rows, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, Tensor? "
    "residual, Tensor? gate, Tensor? x0, Tensor? x, str norm, float eps, str activation, bool "
    "residual_last, str out_format, str out_granularity, Tensor? out_scale) -> Tensor",
    "norm_quantize_scaled(Tensor rows, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor? residual, Tensor? gate, Tensor? x0, Tensor? x, str norm, float eps, str activation, "
    "bool residual_last, str out_format, str out_granularity, Tensor? out_scale) -> (Tensor, "
    "Tensor)",
    "scaled_gemm(Tensor a, Tensor a_scale, str a_granularity, Tensor b, Tensor b_scale, str "
    "b_granularity, Tensor? bias, Tensor? x0, Tensor? x, Tensor? out_scale, Tensor? offsets, str "
    "activation, bool accumulate, str out_format, SymInt groups, float[] limits, bool "
    "batch_invariant) -> Tensor",
    "quantize(Tensor x, str granularity, str out_format, bool power_of_two) -> (Tensor, Tensor)",
    "quantize_static(Tensor x, str granularity, str out_format, bool power_of_two, Tensor scale) "
    "-> Tensor",
    "quantize_transpose(Tensor x, str granularity, str out_format, bool power_of_two) -> (Tensor, "
    "Tensor, Tensor, Tensor)",
    "quantize_transpose_sums(Tensor x, str granularity, str out_format, bool power_of_two) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    "quantize_transpose_static(Tensor x, str granularity, str out_format, bool power_of_two, "
    "Tensor scale) -> (Tensor, Tensor, Tensor)",
    "quantize_transpose_static_sums(Tensor x, str granularity, str out_format, bool power_of_two, "
    "Tensor scale) -> (Tensor, Tensor, Tensor, Tensor)",
    "dequantize(Tensor data, Tensor scale, str granularity, str out_format) -> Tensor",
    "output_scale(Tensor like, Tensor? weight, Tensor? bias, str norm, SymInt columns, str "
    "out_format, float number) -> Tensor"};

// Raises a failed launch as Python's LaunchError; null in a program without Python.
extern void (*raise_in_python)(const LaunchFailure&);

// Signature of the op call under way that is to be recorded, or null.
extern thread_local const Words* recorded;

// Calls an op on a GPU: replays its plan, or lets Python make the call.
void replay_op(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Adds a text to a signature.
void add_text(std::string_view text, Words& words);

std::string text_of(const Words& words);
Words words_of(std::string_view text);

}  // namespace lokakern
