#pragma once

#include "plan.h"

namespace lokakern {

// Ops that have plans; `recorded_op` in Python registers NAME_cold for each.
inline constexpr const char* kOps[] = {"gemm", "routed_gemm", "weight_gradient", "quantize_weight",
                                       "quantize_activated", "activated_gemm"};
// As Python defines them, for programs without it.
inline constexpr const char* kSchemas[] = {
    "gemm(Tensor a, Tensor b, Tensor? b_scale, Tensor? source, Tensor? bias, str granularity, "
    "float[] limits, str[] distributions, str on_miss, str? check=None) -> Tensor",
    "routed_gemm(Tensor? a, Tensor? b, Tensor? data, Tensor? scale, Tensor? bias, str route, "
    "Tensor? left=None, Tensor? left_scales=None, str left_scale=\"\", bool apart=False) -> Tensor",
    "weight_gradient(Tensor grad, Tensor x, str route) -> Tensor",
    "quantize_weight(Tensor weight, str scales) -> (Tensor, Tensor)",
    "quantize_activated(Tensor x, str activation, str name) -> (Tensor, Tensor)",
    "activated_gemm(Tensor x, str activation, str name, Tensor data, Tensor scale, Tensor? bias, "
    "str route) -> Tensor"};

// Signature of the op call under way that is to be recorded, or null.
extern thread_local const Words* recorded;

// Calls an op on a GPU: replays its plan, or lets Python make the call.
void replay_op(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Adds a text to a signature.
void add_text(std::string_view text, Words& words);

std::string text_of(const Words& words);
Words words_of(std::string_view text);

}  // namespace lokakern
