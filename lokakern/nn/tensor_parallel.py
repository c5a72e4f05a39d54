"""Products of sharded tensors: each rank multiplies its shards by kernels of its own."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

Product = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


@functools.cache
def _say_once(x: str, weight: str, bias: str) -> None:
    warnings.warn(
        f"a converted layer multiplies a DTensor with placements {x} by a weight with {weight} and "
        f"a bias with {bias} unquantized: kernels take ColwiseParallel, RowwiseParallel and "
        "sharded rows only",
        stacklevel=2,
    )


def product_of_shards(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.t() + bias``, of which each rank multiplies what it has, as DTensor does.

    FP8 scales are those of shards. What is laid out otherwise is left to DTensor, unquantized, with
    a warning.

    Args:
        product: Multiplies local tensors: x ``[..., k]``, weight ``[n, k]``, bias ``[n]`` or None.
        x: ``[..., k]``: a DTensor whose rows or k are sharded, or that is replicated.
        weight: ``[n, k]``, a DTensor sharded by n (ColwiseParallel), by k (RowwiseParallel), or
            replicated.
        bias: ``[n]`` or None, a DTensor.

    Returns:
        ``[..., n]``, a DTensor: sharded by n, partial sums, or sharded as x.
    """
    operands: list[Any] = [t for t in (x, weight, bias) if t is not None]
    mesh = operands[1].device_mesh
    if not all(isinstance(t, DTensor) and t.device_mesh == mesh for t in operands):
        return functional.linear(x, weight, bias)  # DTensor says what is wrong
    last = x.dim() - 1
    plans = [_plan(last, *places) for places in zip(*(t.placements for t in operands), strict=True)]
    if None in plans:
        _say_once(*(str(getattr(t, "placements", None)) for t in (x, weight, bias)))
        return functional.linear(x, weight, bias)
    to_y, *gradients = zip(*filter(None, plans), strict=True)
    found = [t.to_local(grad_placements=to) for t, to in zip(operands, gradients, strict=False)]
    local_bias = found[2] if len(found) == 3 else None
    for axis, place in enumerate(to_y):
        if local_bias is not None and place.is_partial():
            local_bias = local_bias / mesh.size(axis)  # as sums, of which each rank has a part
    y = product(found[0], found[1], local_bias)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, mesh, to_y, run_check=False, shape=shape, stride=stride)


def _plan(last: int, x: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any, Any] | None:
    """On one axis of a mesh: how y lies, and the gradients of x, weight and bias; None: unknown."""
    if bias is not None and bias != (weight if weight == Shard(0) else Replicate()):
        return None
    if x == Replicate() and weight == Shard(0):
        return Shard(last), Partial(), weight, bias
    if x == Shard(last) and weight == Shard(1):
        return Partial(), x, weight, Partial()
    if weight != Replicate() or not (x == Replicate() or x.is_shard()) or x == Shard(last):
        return None
    summed = Partial() if x.is_shard() else Replicate()
    return x, x, summed, summed
