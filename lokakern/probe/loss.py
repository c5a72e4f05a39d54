"""True change of a loss with one site at a time in FP8, against the same step without it.

An error of a layer does not tell its effect on later layers. Differences are paired: both runs see
the same batch and the same random numbers, so that dropout and the spread between batches cancel.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lokakern import numerics
from lokakern.device import current_device
from lokakern.errors import MeasurementError
from lokakern.nn.module_scan import Joined, weight_of
from lokakern.registry.register import fp8_format
from lokakern.types import Granularity

# 97.5 % quantiles of Student's t, for 1, 2, ... degrees of freedom; beyond, a series in their
# inverse that is right to 0.001.
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
LARGEST = 1e100  # a change whose square is finite


@dataclass(frozen=True, slots=True)
class LossChange:
    """Mean of ``(loss in FP8 - loss) / |loss|`` over batches, and its 95 % interval."""

    mean: float
    low: float
    high: float
    batches: int

    @property
    def is_told(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def interval_of(changes: list[float]) -> LossChange:
    """Mean and interval by Student's t.

    Raises:
        MeasurementError: There are fewer than two, of which no interval can be made.
    """
    count = len(changes)
    if count < 2:
        raise MeasurementError(f"an interval needs at least 2 batches; there were {count}")
    if not all(abs(change) < LARGEST for change in changes):  # NaN, too
        return LossChange(math.inf, math.inf, math.inf, count)
    mean = statistics.fmean(changes)
    degrees = count - 1
    quantile = (*STUDENT, 1.96 + 2.4 / degrees + 2.5 / degrees**2)[min(degrees - 1, len(STUDENT))]
    half = quantile * statistics.stdev(changes) / math.sqrt(count)
    return LossChange(mean, mean - half, mean + half, count)


def loss_changes(
    sites: Mapping[str, nn.Module],
    loss: Callable[[Any], Tensor],
    batches: Iterable[Any],
    granularity: Granularity = Granularity.ROW,
    buffers: Sequence[Tensor] = (),
) -> dict[str, LossChange]:
    """Change of a loss when the output of one site is multiplied in FP8, emulated.

    Nothing is differentiated or updated: each run finds buffers, such as running means, as they
    were. Each batch, of two at least, costs one run, and one more for each site. The granularity is
    that of the scales of both operands.

    Raises:
        MeasurementError: There are fewer than two batches.
    """
    changes: dict[str, list[float]] = {name: [] for name in sites}
    for batch in batches:
        before = loss_of(loss, batch, buffers)
        for name, module in sites.items():
            hook = functools.partial(_in_fp8, granularity)
            handle = module.register_forward_hook(hook, with_kwargs=True)
            try:
                after = loss_of(loss, batch, buffers)
            finally:
                handle.remove()
            changes[name].append(relative_change(before, after))
    return {name: interval_of(found) for name, found in changes.items()}


def relative_change(before: float, after: float) -> float:
    """``(after - before) / |before|``; infinite for any change of a loss of 0."""
    change, size = after - before, abs(before)
    return change / size if size else math.inf if change else 0.0


def loss_of(loss: Callable[[Any], Tensor | float], batch: Any, buffers: Sequence[Tensor]) -> float:
    """A loss without gradients; random numbers and buffers are as before afterwards."""
    is_up = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if is_up else ()
    held = [x.clone() for x in buffers]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            return float(loss(batch))
    finally:
        with torch.no_grad():
            for x, was in zip(buffers, held, strict=True):
                x.copy_(was)


def _in_fp8(granularity: Granularity, module: nn.Module, args: Any, kwargs: Any, y: Any) -> Any:
    """Output of a linear layer, or outputs of a joined one, of operands that are quantized.

    In bfloat16 before that, or in float16 if the output is.
    """
    x = args[0] if args else kwargs["input"]
    form = fp8_format(current_device())
    first = y[0] if isinstance(module, Joined) else y
    half = first.dtype if first.dtype is torch.float16 else torch.bfloat16
    left, right = (
        numerics.dequantize(numerics.quantize(operand.to(half), form, granularity))
        for operand in (x.reshape(-1, x.shape[-1]), weight_of(module))
    )
    found = left @ right.t()
    if not isinstance(module, Joined):
        return _with_bias(found, module, y)
    parts = zip(found.split([part.shape[-1] for part in y], -1), module.parts, y, strict=True)  # type: ignore[no-untyped-call]
    return tuple(_with_bias(*part) for part in parts)


def _with_bias(found: Tensor, module: nn.Module, y: Tensor) -> Tensor:
    bias = getattr(module, "bias", None)
    return (found if bias is None else found + bias).to(y.dtype).view_as(y)
