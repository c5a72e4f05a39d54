"""A linear layer, a norm and an activation in a compiled training step: one op for their gradients.

The forward pass is that of the modules, which a compiler fuses with what reads its output, such as
a quantizer. In the backward pass the gradients of the layer's output, of its bias and of the norm's
vectors, as far as there are any, come from `lokakern.functional.norm_gradient` instead of several
kernels of the compiler, and the layer does not compute that of the bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, bfloat16, float16, float32, is_grad_enabled, nn
from torch.compiler import is_compiling, is_exporting
from torch.nn import Parameter
from torch.nn.functional import layer_norm, rms_norm

from lokakern.functional.norm_gradient import (
    FEWEST_VECTORS,
    LONGEST_COMPILED,
    is_fast,
    takes,
)
from lokakern.nn.activations import APPLY, activation_of
from lokakern.nn.autocast import CAST, half_of
from lokakern.nn.chain_call import has_own_call, is_usual
from lokakern.nn.compiled_form import fuse_quantizers
from lokakern.nn.linear import ALTERED, Linear, is_linear
from lokakern.nn.rectified import are_calls_plain, has_backward_hooks
from lokakern.nn.routed_matmul import FLOAT16, OPS, in_dtype

NORMS = (nn.LayerNorm, nn.RMSNorm)


def joined_between(sequence: Iterable[nn.Module]) -> tuple[str, ...]:
    """For each layer the norm and the activation behind it, such as "layer relu", or "".

    Either may be missing, and is "none" then; see `joined_at` and `read_by`.
    """
    modules = list(sequence)
    found = [""] * len(modules)
    for place, layer in enumerate(modules):
        if is_linear(layer):
            behind = modules[place + 1 : place + 3]
            norm = behind.pop(0) if behind and type(behind[0]) in NORMS else None
            activation = activation_of(behind[0]) or "none" if behind else "none"
            text = joined_at(layer, norm, activation)
            after = modules[place + count_joined(text) :][:1] if text else []
            found[place] = read_by(after, text)
    return tuple(found)


def joined_at(layer: nn.Module, norm: nn.Module | None, activation: str) -> str:
    """The text of `joined_between` for a layer, or "".

    Without a norm there has to be a bias, else nothing is summed, and an activation; with a norm
    at least `FEWEST_VECTORS` of a bias and the norm's weight and bias.

    Args:
        layer: A module.
        norm: The norm behind it, if any.
        activation: A name of `lokakern.epilogue.ACTIVATIONS`.
    """
    if not isinstance(layer, Linear):
        return ""
    is_whole = layer.padding == (0, 0) and not layer.is_mixing and not layer.is_held
    columns = layer.out_features
    if not is_whole or layer.weight.dtype not in CAST or not takes(columns):
        return ""
    if norm is None:
        return f"none {activation}" if layer.bias is not None and activation != "none" else ""
    kind, of_norm, _ = _norm_of(norm)
    vectors = (layer.bias, *norm.parameters())
    if sum(vector is not None for vector in vectors) < FEWEST_VECTORS:
        return ""
    return f"{kind} {activation}" if kind and columns == of_norm <= LONGEST_COMPILED else ""


def read_by(readers: Sequence[nn.Module], text: str) -> str:
    """A text of `joined_at` with a third word, "linear", if linear layers read the output.

    Under autocast a norm of rows returns float32. Linear layers read it in bfloat16 or
    float16, so that the op, which takes a gradient in that, rounds nothing; other readers'
    gradients are float32.

    Args:
        readers: All modules that read the output; none if something else does.
        text: The text, or "".
    """
    is_cast = bool(readers) and all(isinstance(reader, nn.Linear) for reader in readers)
    return f"{text} linear" if is_cast and text and not text.startswith("none") else text


def _norm_of(norm: nn.Module) -> tuple[str, int, float]:
    """The name of a norm of rows, as of `lokakern.norm`, its columns and eps.

    The name is "" of other modules.
    """
    if type(norm) is nn.LayerNorm and len(norm.normalized_shape) == 1:
        return "layer", norm.normalized_shape[0], norm.eps
    if type(norm) is nn.RMSNorm and len(norm.normalized_shape) == 1:
        # torch computes in float32, and takes its eps; a number of this file would be a symbol.
        return "rms", norm.normalized_shape[0], 2.0**-23 if norm.eps is None else norm.eps
    return "", 0, 0.0


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
    kind, activation, *_ = text.split()
    norm = behind[0] if kind != "none" else None
    if not is_linear(layer) or has_own_call(layer) or has_backward_hooks(layer):
        return None
    if activation != "none" and len(modules) == count_joined(text):
        last = behind[-1]
        if activation_of(last) != activation:
            return None
        if has_own_call(last) or has_backward_hooks(last):
            return None
    return multiply_with_norm(layer, norm, x, text, input_scale)


def multiply_with_norm(
    layer: Linear, norm: nn.Module | None, x: Any, text: str, input_scale: str = "",
    residual: Any = None,
) -> Tensor | None:  # fmt: skip
    """`multiply_joined` with an activation that is no module.

    Args:
        layer: A layer whose calls have no hooks.
        norm: The norm behind it, if there is one.
        x: As of `multiply_joined`.
        text: As of `multiply_joined`.
        input_scale: As of `multiply_joined`.
        residual: Of the shape of the output, and added before the norm; or None.
    """
    kind, activation, *reader = text.split()
    if not is_usual(x) or not is_grad_enabled() or (norm is None) != (kind == "none"):
        return None
    if not is_compiling():  # Dynamo runs its callers as they are where a module breaks the graph
        return None
    if layer._plan.startswith(ALTERED):  # by a mod, since
        return None
    bias: Any = layer.bias
    vectors, eps = [bias, None, None], 0.0
    if norm is not None:
        found, columns, eps = _norm_of(norm)
        if found != kind or columns != layer.out_features:
            return None
        if has_own_call(norm) or has_backward_hooks(norm):
            return None
        if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
            vectors[1] = norm.weight
        if isinstance(norm, nn.LayerNorm):
            vectors[2] = norm.bias
    elif bias is None:
        return None
    given = [vector for vector in vectors if vector is not None]
    for place, vector in enumerate(given):
        if type(vector) is not Parameter or not vector.requires_grad:
            return None
        if vector.dtype is not given[0].dtype:
            return None
        # Dynamo breaks the graph at a function of autograd that is given one tensor twice.
        if any(vector is other for other in given[:place]):
            return None
    if type(layer.weight) is not Parameter or x.shape[-1] != layer.in_features or x.dim() < 2:
        return None
    is_wide = norm is not None and not reader
    way = joined_way(layer.out_features, x.dtype, layer.weight.dtype, x.device.type, is_wide)
    half = float16 if FLOAT16 in way else bfloat16
    # Of vectors of these dtypes kernels add up sums.
    if not way or (given and given[0].dtype not in (half, float32)):
        return None
    shape = (*x.shape[:-1], layer.out_features)
    if residual is not None and not (
        is_usual(residual) and residual.dtype is half and residual.shape == shape
    ):
        return None
    y = layer.forward_with(x, None if bias is None else bias.detach(), input_scale)
    y = y if residual is None else y + residual
    rows = y if y.dim() == 2 else y.reshape(-1, y.shape[-1])
    z: Tensor = JoinedGradients.apply(rows, *vectors, kind, activation, eps)  # type: ignore[no-untyped-call]
    return z if y.dim() == 2 else z.view(y.shape)


def joined_way(
    columns: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: str, is_wide: bool
) -> str:
    """A word with the dtype if the op is to compute the gradients, or ""; a constant for compilers.

    It reads the state of autocast and global hooks, which Dynamo guards. ``is_wide`` tells that
    the output may be read in float32 under autocast.
    """
    fuse_quantizers()
    half = half_of(dtype, weight_dtype, device)
    if half is None:
        return ""
    if is_wide and torch.is_autocast_enabled(device):
        return ""
    if torch._C._are_functorch_transforms_active() or not are_calls_plain() or is_exporting():
        return ""
    return in_dtype("joined", half) if is_fast(columns, device) else ""


class JoinedGradients(torch.autograd.Function):
    """A norm and an activation, with the gradient of a bias that the input contains."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Tensor | None, weight: Tensor | None, shift: Tensor | None,
        kind: str, activation: str, eps: float,
    ) -> Tensor:  # fmt: skip
        ctx.kind, ctx.activation, ctx.eps = kind, activation, eps
        z, columns = y, (y.shape[1],)
        if kind == "layer":
            z = layer_norm(y, columns, weight, shift, eps)
        elif kind == "rms":
            z = rms_norm(y, columns, weight, eps)
        z = APPLY[activation](z)
        # Of a relu alone the output, which the next layer keeps, too; a copy, which Inductor
        # removes: Dynamo does not notice that a module writes to it later.
        is_relu_alone = kind == "none" and activation == "relu"
        ctx.save_for_backward(z.clone() if is_relu_alone else y, bias, weight, shift)
        return z

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        y, bias, weight, shift = ctx.saved_tensors
        given = (y, bias, weight, shift, ctx.kind, ctx.activation, ctx.eps)
        # float32 behind a norm under autocast, cast from that of y: see `read_by`.
        dy, sums = OPS.norm_gradient(gradients[0].to(y.dtype), *given)
        of_bias = None if bias is None else sums[0]
        of_weight = None if weight is None else sums[int(bias is not None)]
        of_shift = None if shift is None else sums[-1]
        return dy, of_bias, of_weight, of_shift, None, None, None
