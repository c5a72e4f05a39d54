"""Products of DTensors: each rank multiplies its shards with its own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from lokakern.functional.checks import warn_once

Product = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def product_of_shards(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.t() + bias``, where each rank multiplies its shards.

    Each shard has its own FP8 scales. Unsupported placements are left to DTensor, unquantized, with
    a warning.

    Args:
        product: Multiplies local tensors: x ``[..., k]``, weight ``[n, k]``, bias ``[n]`` or None.
        x: ``[..., k]``, a DTensor sharded by rows or k, or replicated.
        weight: ``[n, k]``, a DTensor sharded by n (ColwiseParallel), by k (RowwiseParallel), or
            replicated.
        bias: ``[n]`` or None, a DTensor.

    Returns:
        ``[..., n]``, a DTensor: sharded by n, partial sums, or sharded as x.
    """
    operands: list[Any] = [t for t in (x, weight, bias) if t is not None]
    mesh = operands[1].device_mesh
    if not all(isinstance(t, DTensor) and t.device_mesh == mesh for t in operands):
        return functional.linear(x, weight, bias)  # DTensor raises
    last = x.dim() - 1
    plans = [_plan(last, *places) for places in zip(*(t.placements for t in operands), strict=True)]
    if None in plans:
        places = (str(getattr(t, "placements", None)) for t in (x, weight, bias))
        x_places, w_places, b_places = places
        warn_once(
            f"a converted layer multiplies a DTensor with placements {x_places} by a weight with "
            f"{w_places} and a bias with {b_places} unquantized: kernels support ColwiseParallel, "
            "RowwiseParallel and sharded rows only"
        )
        return functional.linear(x, weight, bias)
    to_y, *gradients = zip(*filter(None, plans), strict=True)
    found = [t.to_local(grad_placements=to) for t, to in zip(operands, gradients, strict=False)]
    local_bias = found[2] if len(found) == 3 else None
    for axis, place in enumerate(to_y):
        if local_bias is not None and place.is_partial():
            local_bias = local_bias / mesh.size(axis)  # each rank has a partial sum
    y = product(found[0], found[1], local_bias)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, mesh, to_y, run_check=False, shape=shape, stride=stride)


def _plan(last: int, x: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any, Any] | None:
    """Placements of y and of the gradients of x, weight and bias on one axis of a mesh, or None."""
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
