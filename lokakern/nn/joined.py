"""A linear layer, a norm and an activation in a compiled training step: one op for their gradients.

The forward pass is that of the modules, which a compiler fuses with what reads its output, such as
a quantizer. In the backward pass the gradients of the layer's output, of its bias and of the norm's
vectors come from `lokakern.nn.norm_gradient` instead of several kernels of the compiler, and the
layer does not compute that of the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, bfloat16, is_grad_enabled, nn
from torch.compiler import is_compiling, is_exporting
from torch.nn import Parameter
from torch.nn.functional import hardswish, layer_norm, relu, silu

from lokakern.nn.chain_call import has_own_call, is_usual
from lokakern.nn.linear import Linear, fuse_quantizers
from lokakern.nn.norm_gradient import is_fast, takes
from lokakern.nn.rectified import are_calls_plain, has_backward_hooks
from lokakern.nn.routed_matmul import OPS

# Training steps of three layers with LayerNorm and relu take an H200 0.71 to 0.99 times as long
# with it at 128 to 2048 columns and 512 to 32768 rows, and at 4096 columns 0.98 to 1.08.
LONGEST_ROW = 2048
ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.Hardswish: "hardswish",
    nn.SiLU: "silu",
}
_APPLY = {"none": None, "relu": relu, "hardswish": hardswish, "silu": silu}


def joined_between(sequence: nn.Sequential) -> tuple[str, ...]:
    """For each layer the norm and the activation behind it, such as "layer relu", or "".

    A norm may have no activation behind it. Without a norm it is a relu, whose gradient is known
    from its output.
    """
    modules = list(sequence)
    found = [""] * len(modules)
    for place, layer in enumerate(modules):
        behind = modules[place + 1 : place + 3]
        norm = behind.pop(0) if behind and type(behind[0]) is nn.LayerNorm else None
        activation = ACTIVATIONS.get(type(behind[0]), "none") if behind else "none"
        found[place] = joined_at(layer, norm, activation)
    return tuple(found)


def joined_at(layer: nn.Module, norm: nn.Module | None, activation: str) -> str:
    """The text of `joined_between` for a layer, or "".

    Args:
        layer: A module.
        norm: The norm behind it, if any.
        activation: A name of `ACTIVATIONS`, or "none".
    """
    if type(layer) is not Linear or not _is_usual(layer):
        return ""
    if norm is None:
        return "none relu" if activation == "relu" else ""
    return f"layer {activation}" if _is_over(norm, layer) else ""


def _is_usual(layer: Linear) -> bool:
    is_whole = layer.padding == (0, 0) and not layer.is_mixing and not layer.is_held
    is_biased = layer.bias is not None and layer.weight.dtype is bfloat16
    return is_whole and is_biased and takes(layer.out_features)


def _is_over(norm: Any, layer: Linear) -> bool:
    is_row = norm.normalized_shape == (layer.out_features,) and layer.out_features <= LONGEST_ROW
    return is_row and norm.weight is not None and norm.bias is not None


def count_joined(text: str) -> int:
    """How many modules a text of `joined_between` stands for, the layer included."""
    return 3 - text.split().count("none")


def multiply_joined(
    modules: Sequence[nn.Module], x: Any, text: str, input_scale: str = ""
) -> Tensor | None:
    """The output of a layer and of what is behind it, or None where the modules have to run.

    Only for compilers. That is with hooks, in another dtype, with unusual tensors, and where a
    gradient is not wanted.

    Args:
        modules: As many as `count_joined` says, or one less where a function is the activation.
        x: The input.
        text: See `joined_between`.
        input_scale: Of the layer, see `Linear.forward`.
    """
    layer, *behind = modules
    kind, activation = text.split()
    norm = behind[0] if kind != "none" else None
    if type(layer) is not Linear or not is_usual(x) or not is_grad_enabled() or not is_compiling():
        return None
    vectors = [layer.bias]
    if norm is not None:
        if type(norm) is not nn.LayerNorm or norm.normalized_shape != (layer.out_features,):
            return None
        vectors += [norm.weight, norm.bias]
    is_module = len(modules) == count_joined(text) and activation != "none"
    if is_module and ACTIVATIONS.get(type(behind[-1])) != activation:
        return None
    for place, vector in enumerate(vectors):
        if type(vector) is not Parameter or vector.dtype is not bfloat16:
            return None
        if not vector.requires_grad:
            return None
        # Dynamo breaks the graph at a function of autograd that is given one tensor twice.
        if any(vector is other for other in vectors[:place]):
            return None
    for module in modules:
        if has_own_call(module) or has_backward_hooks(module):
            return None
    if type(layer.weight) is not Parameter or x.shape[-1] != layer.in_features or x.dim() < 2:
        return None
    if not joined_way(layer.out_features, x.dtype, layer.weight.dtype, x.device.type):
        return None
    bias = layer.bias
    assert bias is not None
    y = layer.forward_with(x, bias.detach(), input_scale)
    rows = y if y.dim() == 2 else y.reshape(-1, y.shape[-1])
    eps = norm.eps if norm is not None else 0.0
    given = (*vectors, None, None)[:3]
    z: Tensor = JoinedGradients.apply(rows, *given, kind, activation, eps)  # type: ignore[no-untyped-call]
    return z if y.dim() == 2 else z.view(y.shape)


def joined_way(columns: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: str) -> str:
    """A word if the op is to compute the gradients, or ""; a constant for compilers.

    It reads the state of autocast and global hooks, which Dynamo guards.
    """
    fuse_quantizers()
    if not (dtype is weight_dtype is bfloat16) or torch.is_autocast_enabled(device):
        return ""
    if torch._C._are_functorch_transforms_active() or not are_calls_plain() or is_exporting():
        return ""
    return "joined" if is_fast(columns, device) else ""


class JoinedGradients(torch.autograd.Function):
    """A norm and an activation, with the gradient of a bias that the input contains."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Tensor, weight: Tensor | None, shift: Tensor | None, kind: str,
        activation: str, eps: float,
    ) -> Tensor:  # fmt: skip
        ctx.kind, ctx.activation, ctx.eps = kind, activation, eps
        z = y if kind == "none" else layer_norm(y, (y.shape[1],), weight, shift, eps)
        last = _APPLY[activation]
        z = z if last is None else last(z)
        # Of a relu alone the output, which the next layer keeps, too; a copy, which Inductor
        # removes: Dynamo does not notice that a module writes to it later.
        ctx.save_for_backward(z.clone() if kind == "none" else y, bias, weight, shift)
        return z

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        y, bias, weight, shift = ctx.saved_tensors
        given = (y, bias, weight, shift, ctx.kind, ctx.activation, ctx.eps)
        dy, sums = OPS.norm_gradient(gradients[0], *given)
        of_norm = (None, None) if weight is None else (sums[1], sums[2])
        return dy, sums[0], *of_norm, None, None, None
