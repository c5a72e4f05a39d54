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

That of a `LinearNormAct` is a text of `lokakern.nn.joined`, if it has one; where its gradients are
not computed so, its product is in the form `SUMS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, float16, is_grad_enabled
from torch.compiler import is_exporting
from torch.nn import Parameter

from lokakern.nn.autocast import CAST, half_of
from lokakern.nn.bias_gradient import AddedBias
from lokakern.nn.logit import dot
from lokakern.nn.norm_gradient import CHUNK, is_fast, takes
from lokakern.nn.routed_matmul import FLOAT16, in_dtype, is_constant, quantizes_at, traced_route

if TYPE_CHECKING:
    from lokakern.nn.linear import Linear

DOT, LOGIT, SUMS = "dot", "logit", "sums"
LAYER_FORMS = (DOT, LOGIT, SUMS)


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
    if form == SUMS and not (is_grad_enabled() and bias is not None and bias.requires_grad):
        return None
    m = x.numel() // x.shape[-1]  # the size of a shape is no symbol in torch.export
    m = m if is_constant(m) else -1
    n = weight.shape[0]  # of a weight that was replaced, too
    if bias is not None and bias.shape != (n,):
        return None
    given = form, layer._plan, m, n, x.dtype, weight.dtype, x.device.type
    found = form_at(*given)
    if not found:
        return None
    if form != SUMS and (FLOAT16 in found) is not (x.dtype is float16):
        x = x.half() if FLOAT16 in found else x.bfloat16()  # which decides the dtype
    if form == LOGIT:
        y: Tensor = torch.ops.lokakern.logit(x, weight, bias)
        return y
    if form == DOT:
        return dot(x, weight, bias)
    assert bias is not None
    y = layer.forward_with(x, bias.detach(), input_scale)
    rows = y if y.dim() == 2 else y.reshape(-1, y.shape[-1])
    z: Tensor = AddedBias.apply(rows, bias)  # type: ignore[no-untyped-call]
    return z if y.dim() == 2 else z.view(y.shape)
