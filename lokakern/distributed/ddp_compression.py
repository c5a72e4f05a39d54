"""A communication hook of DDP that sends gradients in bfloat16 or FP8.

``ddp.register_comm_hook(Compression("fp8"), compress)``. In FP8 each rank quantizes its gradient
and sends each other rank the part that it reduces, and then quantizes the mean and sends it to all
ranks: two bytes for each element instead of eight in float32. Rounding errors are added to the next
gradient (error feedback), so that they do not accumulate over steps.
"""

# Without `from __future__ import annotations`: DDP compares annotations of hooks with types.
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from lokakern.errors import UnknownNameError
from lokakern.functional.quantize import quantize
from lokakern.registry.register import fp8_format
from lokakern.selection.arguments import device_of

COLUMNS = 256  # elements of a scale: 1.6 % more bytes
WIRES = ("fp8", "bfloat16")
# Renamed in torch 2.13.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Errors(NamedTuple):
    """Rounding errors of a rank's gradient and of the mean that it computes."""

    local: Tensor
    mean: Tensor


class Compression:
    """State of `compress`: the wire format, and rounding errors for error feedback.

    Args:
        wire: "fp8" or "bfloat16".
        group: Process group; None: the default one.
        error_feedback: Whether to add the last rounding errors to the next gradient; for FP8 only.
            It takes 4 bytes for each element, and 4 more for each that the rank reduces.

    Raises:
        UnknownNameError: The wire format is unknown.
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
        """The mean of a flat gradient over ranks, in place; bitwise equal on all ranks.

        A non-finite element makes itself, or all elements of its scale, NaN on every rank, and is
        not part of error feedback.

        Args:
            gradient: ``[elements]``, with the same size on each rank.
            bucket: Index of the DDP bucket.
        """
        if self.wire == "bfloat16":
            short = gradient.bfloat16().div_(dist.get_world_size(self.group))
            dist.all_reduce(short, group=self.group)
            return gradient.copy_(short)
        return gradient.copy_(self._in_fp8(gradient, bucket))

    def _in_fp8(self, gradient: Tensor, bucket: int) -> Tensor:
        ranks = dist.get_world_size(self.group)
        count = gradient.numel()
        rows = -(-count // (ranks * COLUMNS))  # rows that each rank reduces
        whole = gradient.new_zeros(ranks * rows * COLUMNS, dtype=torch.float32)
        whole[:count] = gradient
        whole = whole.view(ranks * rows, COLUMNS)
        errors = self._errors.get(bucket)
        if errors is not None and errors.local.shape != whole.shape:
            errors = None  # DDP rebuilt its buckets
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
        """Bytes and scales of rows, and the rounding errors."""
        quantized = quantize(x)
        assert quantized.scale is not None  # rowwise
        parts = [quantized.data.view(torch.uint8), quantized.scale]
        if not self.error_feedback:
            return parts, x
        lost = x - _restored(parts)
        return parts, torch.where(lost.isfinite(), lost, 0.0)

    def stream_of(self, x: Tensor) -> Any:
        """A separate stream, so that communication overlaps the backward pass; None on a CPU."""
        if not x.is_cuda:
            return None
        if x.device not in self._streams:
            self._streams[x.device] = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
        return self._streams[x.device]


def compress(state: Compression, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The hook: ``ddp.register_comm_hook(Compression("fp8"), compress)``."""
    gradient = bucket.buffer()
    stream = state.stream_of(gradient)
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
    """Dequantized float32 values of bytes and scales."""
    data, scale = parts
    return data.view(fp8_format(device_of(data)).dtype).float() * scale
