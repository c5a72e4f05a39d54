"""Forms of a layer in compiled code of which a compiler makes faster code than of `nn.Linear`.

`DOT`, of a layer with one output, such as logits: a sum over products of elements. cuBLAS takes
three launches for such a layer in training, far from the limit of memory: 9.5 us of an H200 for the
output at 8192 x 128, 9.2 for the gradient of the weight and 4.0 for that of the input, of 2 MB
each. A compiler computes the output in the kernel that computes the input, and the gradient of the
input in the kernel that reads it.

`LOGIT`, of a model that was converted for a budget: the same by an op, by which passes over graphs
(`lokakern.nn.graph_passes`) know such a model, even if nothing of it runs in FP8.

`SUMS`, in training: the gradient of the bias by an op of its own, `lokakern.nn.bias_gradient`,
where the kernel of the compiler that would compute it does not read along the rows of memory.

Behind `BEHIND_CROSS`, in training, also a route with two kernels at each m, those of the gradients
of input and weight of the last layer of a cross, see `lokakern.nn.crossed_gradients`.

That of a `LinearNormAct` is a text of `lokakern.nn.joined`, if it has one; where its gradients are
not computed so, its product is in the form `SUMS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, float16, is_grad_enabled
from torch.compiler import is_exporting
from torch.nn import Parameter

from lokakern.functional.norm_gradient import CHUNK, is_fast, takes
from lokakern.nn.autocast import CAST, half_of
from lokakern.nn.bias_gradient import AddedBias
from lokakern.nn.logit import dot
from lokakern.nn.routed_matmul import (
    FLOAT16,
    constant_of,
    crossed,
    dtype_of,
    has_delayed,
    has_switch,
    in_dtype,
    kernel_at,
    merged,
    quantizes_at,
    route_text,
    traced_route,
)
from lokakern.nn.saved_inputs import unsaved
from lokakern.sampled_check import is_checked
from lokakern.types import GROUP, Granularity

if TYPE_CHECKING:
    from lokakern.nn.linear import Linear

DOT, LOGIT, SUMS = "dot", "logit", "sums"
LAYER_FORMS = (DOT, LOGIT, SUMS)
BEHIND_CROSS = " crossed:"


def form_of(layer: Linear) -> str:
    """The form of a layer, or ""."""
    if layer.weight.dtype not in CAST or layer.padding != (0, 0) or layer.is_mixing:
        return ""
    if layer.out_features == 1 and layer.in_features:
        return DOT
    return SUMS if layer.bias is not None and takes(layer.out_features) else ""


def form_at(
    form: str, plan: str, m: int, columns: int, dtype: torch.dtype, weight_dtype: torch.dtype,
    device: str,
) -> str:  # fmt: skip
    """The form where it is used, with the dtype, or ""; a constant for compilers.

    It reads the state of autocast, which Dynamo guards. Not where a gradient is quantized: the
    quantizer sums what it reads.

    Args:
        form: `DOT`, `LOGIT` or `SUMS`.
        plan: Of the layer, see `Routed.changed`.
        m: Rows of the input; -1 if they are dynamic.
        columns: n.
        dtype: Of the input.
        weight_dtype: Of the weight.
        device: Type of the device.
    """
    half = half_of(dtype, weight_dtype, device)
    if half is None:
        return ""
    if torch._C._are_functorch_transforms_active() or is_exporting():
        return ""
    if form in (DOT, LOGIT):  # timed on the same GPUs
        is_taken = not plan and columns == 1 and is_fast(CHUNK, device)
        if is_taken and form == LOGIT:
            fuse_quantizers()
        return in_dtype(form, half) if is_taken else ""
    flags, _, _, *gradients = plan.split("\0") if plan else ("", "", "")
    routes = tuple(map(traced_route, gradients))
    if flags or (any(routes) if m < 0 else quantizes_at(routes, m)):
        return ""
    if not is_fast(columns, device):
        return ""
    fuse_quantizers()
    return in_dtype(form, half)


def behind_cross(form: str, segments: list[tuple[int, tuple[str, str]]]) -> str:
    """A form, or "", with the kernels of the gradients behind a cross.

    Args:
        form: `SUMS` or "".
        segments: First m, and the kernels of the gradients of input and weight, or twice "".
    """
    names = [(m, "|".join(kernels) if all(kernels) else "") for m, kernels in segments]
    text = route_text(Granularity.GROUP, merged([(0, ""), *names]), [(0, "")])
    return form + BEHIND_CROSS + text if text else form


def kernels_behind_cross(form: str, m: int) -> tuple[str, ...]:
    """The two kernels of a form at m, or none."""
    text = form.partition(BEHIND_CROSS)[2]
    name = "" if m % GROUP else kernel_at(text, m)  # scales of the transpose are of whole groups
    return tuple(name.split("|")) if name else ()


def crossed_plan(
    form: str, plan: str, m: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: str
) -> str:
    """The plan with kernels for gradients behind a cross, or "" where they are not used.

    A constant for compilers, as `form_at`, whose arguments it has. Not with switches, checks, main
    gradients and scales of earlier steps, which know the products of routes only.
    """
    if m < 0 or half_of(dtype, weight_dtype, device) is not torch.bfloat16:
        return ""
    kernels = kernels_behind_cross(form, m)
    flags, columns, *routes = plan.split("\0") if plan else ("",) * 5
    is_other = flags or has_switch(plan) or has_delayed(plan) or is_checked(plan)
    if not kernels or is_other or dtype_of(plan) is not torch.bfloat16:
        return ""
    if torch._C._are_functorch_transforms_active() or is_exporting():
        return ""
    output, *gradients = (unsaved(traced_route(route)) for route in routes)
    return "\0".join((flags, columns, output, *map(crossed, gradients, kernels)))


def fuse_quantizers() -> str:
    """See `lokakern.nn.inductor`, which is imported when a compiler first traces a product: 2 s."""
    from lokakern.nn import graph_passes, inductor

    inductor.fuse_quantizers()
    graph_passes.install_passes()
    return ""


def multiply_in_form(layer: Linear, x: Tensor, input_scale: str) -> Tensor | None:
    """The output of a layer in its form, or None where it multiplies as usual.

    Only for compilers.

    Args:
        layer: A layer with a form.
        x: The input.
        input_scale: See `Linear.forward`.
    """
    weight, bias = layer.weight, layer.bias
    form = layer.form if layer.form in (DOT, LOGIT) else SUMS
    if type(x) is not Tensor or x.is_meta or x.is_nested or x.dim() < 2:
        return None
    if type(weight) is not Parameter or not x.shape[-1] or x.shape[-1] != weight.shape[1]:
        return None
    if bias is not None and (type(bias) is not Parameter or bias.dtype is not weight.dtype):
        return None
    is_behind = form == SUMS and BEHIND_CROSS in layer.form and is_grad_enabled()
    has_sums = is_grad_enabled() and bias is not None and bias.requires_grad
    if form == SUMS and not (is_behind or has_sums):
        return None
    m = constant_of(x.numel() // x.shape[-1])  # the size of a shape is no symbol in torch.export
    n = weight.shape[0]  # of a weight that was replaced, too
    if bias is not None and bias.shape != (n,):
        return None
    plan = ""
    if is_behind:
        operands = m, x.dtype, weight.dtype, x.device.type
        plan = crossed_plan(layer.form, layer._plan, *operands)
    is_formed = form != SUMS or (has_sums and not layer.form.startswith(BEHIND_CROSS))
    given = form, layer._plan, m, n, x.dtype, weight.dtype, x.device.type
    found = form_at(*given) if is_formed else ""
    if not found:
        return layer.forward_with(x, bias, input_scale, plan) if plan else None
    if form != SUMS and (FLOAT16 in found) is not (x.dtype is float16):
        x = x.half() if FLOAT16 in found else x.bfloat16()  # which decides the dtype
    if form == LOGIT:
        y: Tensor = torch.ops.lokakern.logit(x, weight, bias)
        return y
    if form == DOT:
        return dot(x, weight, bias)
    assert bias is not None
    y = layer.forward_with(x, bias.detach(), input_scale, plan)
    rows = y if y.dim() == 2 else y.reshape(-1, y.shape[-1])
    z: Tensor = AddedBias.apply(rows, bias)  # type: ignore[no-untyped-call]
    return z if y.dim() == 2 else z.view(y.shape)
