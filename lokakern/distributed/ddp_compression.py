"""Gradients between ranks in bfloat16 or FP8: a communication hook of DDP.

``ddp.register_comm_hook(Compression("fp8"), compress)``. In FP8 each rank quantizes its gradient,
sends every other rank the part that is its to add up, and quantizes the mean again to send it to
all: two bytes an element, where float32 takes eight. What rounding takes away is kept and added to
the next gradient (error feedback), so that over steps nothing is lost.
"""

# No `from __future__ import annotations` here: DDP compares annotations of hooks with types.
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from lokakern.errors import UnknownNameError
from lokakern.functional.quantize import quantize
from lokakern.registry.register import fp8_format
from lokakern.selection.arguments import device_of

COLUMNS = 256  # that share a scale: 1.6 % more bytes
WIRES = ("fp8", "bfloat16")
# torch 2.13 renamed it.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Errors(NamedTuple):
    """What rounding took, of a rank's gradient and of the part that it adds up."""

    local: Tensor
    mean: Tensor


class Compression:
    """State of `compress`: how gradients are sent, and what rounding took away so far.

    Args:
        wire: "fp8" or "bfloat16".
        group: Process group; None: the default one.
        error_feedback: Whether to add to a gradient what rounding took of the one before; it takes
            4 bytes for each element, and 4 more for each that a rank adds up. Of FP8 only.

    Raises:
        UnknownNameError: No such wire.
    """

    def __init__(
        self, wire: str = "fp8", *, group: Any = None, error_feedback: bool = True
    ) -> None:
        if wire not in WIRES:
            raise UnknownNameError(f"wire is {wire!r}; expected one of {', '.join(WIRES)}")
        self.wire, self.group, self.error_feedback = wire, group, error_feedback
        self._errors: dict[int, _Errors] = {}
        self._streams: dict[torch.device, Any] = {}

    def average(self, gradient: Tensor, bucket: int = 0) -> Tensor:
        """The mean over ranks of a flat gradient, which is overwritten; the same bits on all.

        An element that is not finite makes those that share its scale, or only itself, NaN on
        every rank, and nothing of it is kept.

        Args:
            gradient: ``[elements]``, as many on each rank.
            bucket: Whose errors are fed back.
        """
        if self.wire == "bfloat16":
            short = gradient.bfloat16().div_(dist.get_world_size(self.group))
            dist.all_reduce(short, group=self.group)
            return gradient.copy_(short)
        return gradient.copy_(self._in_fp8(gradient, bucket))

    def _in_fp8(self, gradient: Tensor, bucket: int) -> Tensor:
        ranks = dist.get_world_size(self.group)
        count = gradient.numel()
        rows = -(-count // (ranks * COLUMNS))  # that each rank adds up
        whole = gradient.new_zeros(ranks * rows * COLUMNS, dtype=torch.float32)
        whole[:count] = gradient
        whole = whole.view(ranks * rows, COLUMNS)
        errors = self._errors.get(bucket)
        if errors is not None and errors.local.shape != whole.shape:
            errors = None  # DDP made its buckets anew
        if errors is not None:
            whole += errors.local
        local, local_error = self._rounded(whole)
        parts = [torch.empty_like(x) for x in local]
        for sent, received in zip(local, parts, strict=True):
            dist.all_to_all_single(received, sent, group=self.group)
        mean = _restored(parts).view(ranks, rows, COLUMNS).mean(0)
        if errors is not None:
            mean += errors.mean
        sums, mean_error = self._rounded(mean)
        gathered = [x.new_empty((ranks * len(x), *x.shape[1:])) for x in sums]
        for sent, received in zip(sums, gathered, strict=True):
            _gather(received, sent, group=self.group)
        if self.error_feedback:
            self._errors[bucket] = _Errors(local_error, mean_error)
        return _restored(gathered).view(-1)[:count]

    def _rounded(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Bytes and scales of rows, and what they lack."""
        quantized = quantize(x)
        assert quantized.scale is not None  # by rows
        parts = [quantized.data.view(torch.uint8), quantized.scale]
        if not self.error_feedback:
            return parts, x
        lost = x - _restored(parts)
        return parts, torch.where(lost.isfinite(), lost, 0.0)

    def beside(self, x: Tensor) -> Any:
        """A stream for what must not wait for the backward pass, nor this for it; None on a CPU."""
        if not x.is_cuda:
            return None
        if x.device not in self._streams:
            self._streams[x.device] = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
        return self._streams[x.device]


def compress(state: Compression, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The hook: ``ddp.register_comm_hook(Compression("fp8"), compress)``."""
    gradient = bucket.buffer()
    stream = state.beside(gradient)
    if stream is None:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(state.average(gradient, bucket.index()))
        return done
    stream.wait_stream(torch.cuda.current_stream(gradient.device))
    with torch.cuda.stream(stream):
        done = torch.futures.Future(devices=[gradient.device])
        done.set_result(state.average(gradient, bucket.index()))
    gradient.record_stream(stream)
    return done


def _restored(parts: list[Tensor]) -> Tensor:
    """Float32 of bytes and scales."""
    data, scale = parts
    return data.view(fp8_format(device_of(data)).dtype).float() * scale
