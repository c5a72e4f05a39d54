"""What runs a step of a chain: its output, operands as kernels read them, and the launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lokakern import numerics
from lokakern.device import current_device
from lokakern.registry.float16 import has_half
from lokakern.registry.register import KERNELS, Kernel, fp8_format, kernel_named
from lokakern.types import Granularity, NormEpilogue, QuantizedTensor, empty_data

Matrix = Tensor | QuantizedTensor
_NONE, _TENSOR = Granularity.NONE, Granularity.TENSOR


def empty_matrix(
    rows: int,
    columns: int,
    scales: Granularity,
    scale: Tensor | None,
    fp8: torch.dtype,
    device: torch.device,
    half: torch.dtype = torch.bfloat16,
) -> Matrix:
    """An output of a step: in ``half``, or FP8 with new scales or the given static one."""
    if scales is _NONE:
        return torch.empty((rows, columns), dtype=half, device=device)
    data = empty_data(rows, columns, fp8, device)
    if scale is None:
        scale = scales.empty_scale(rows, columns, device)
    return QuantizedTensor(data, scale, scales)


def read_as(written: Matrix, scales: Granularity) -> Matrix:
    """An output as the next layer reads it; a tensorwise scale is repeated for each row."""
    if not isinstance(written, QuantizedTensor) or written.granularity is scales:
        return written
    assert written.granularity is _TENSOR and written.scale is not None
    assert scales in (Granularity.ROW, Granularity.GROUP)
    rows, columns = written.data.shape
    spread = scales.empty_scale(rows, columns, written.device).copy_(written.scale)
    return QuantizedTensor(written.data, spread, scales)


def launcher_of(
    kernel: Kernel, a: Matrix, b: Matrix | None, out: Matrix, epilogue: NormEpilogue
) -> Callable[[Any, Any], None]:
    """A launch with a left operand and an output; its workspace is allocated here."""
    launch = kernel.launch
    if kernel.op == "quantize":
        assert isinstance(out, QuantizedTensor)  # its output
        scratch = kernel.workspace(a, out.data, out.scale)
        return lambda a, out: launch(a, out.data, out.scale, scratch)
    if kernel.op == "dequantize":
        assert isinstance(a, QuantizedTensor)  # its input
        scratch = kernel.workspace(a.data, a.scale, out)
        return lambda a, out: launch(a.data, a.scale, out, scratch)
    scratch = kernel.workspace(a, b, out, epilogue)
    return lambda a, out: launch(a, b, out, epilogue, scratch)


@functools.lru_cache(maxsize=1024)
def kernel_on(name: str, device: torch.device) -> Kernel:
    """The kernel of a step, or its emulation if it does not run on this device."""
    kernel = kernel_named(name)
    here = current_device(device.type, device.index or 0)
    return kernel if kernel.runs_on(here) else _emulation_of(kernel)


def _emulation_of(kernel: Kernel) -> Kernel:
    """The kernel with a launch of the same rounding in torch, which runs on any device."""
    if kernel.op != "gemm_norm":  # all kernels of these ops write the same bytes
        return KERNELS[f"torch.{kernel.op}_{kernel.granularity.suffix}"]
    launch = functools.partial(_emulate, kernel)
    return replace(kernel, launch=launch, workspace=lambda *_: ())


def _emulate(
    kernel: Kernel,
    a: Matrix,
    b: Matrix,
    out: Matrix,
    epilogue: NormEpilogue,
    _workspace: tuple[Tensor, ...],
) -> None:
    """A kernel of op gemm_norm: a float32 product, then what `torch.norm_quantize` does.

    A composition that starts with a quantizer reads a quantized. One of a GEMM and a norm adds a
    bfloat16 bias to the sums and rounds them to bfloat16; float16 alike.
    """
    half = torch.float16 if has_half(a, out, epilogue) else torch.bfloat16
    if kernel.granularity is not _NONE and isinstance(a, Tensor):
        form = fp8_format(current_device(a.device.type, a.device.index or 0))
        a = numerics.quantize(a, form, kernel.granularity)
    sums = _wide(a) @ _wide(b)
    if kernel.accumulation.endswith("rounded"):
        bias = epilogue.bias
        if bias is not None and bias.dtype is half:
            sums, epilogue = sums + bias, epilogue._replace(bias=None)
        sums = sums.to(half)
    KERNELS["torch.norm_quantize"].launch(sums, out, epilogue, ())


def _wide(x: Matrix) -> Tensor:
    return numerics.dequantize(x) if isinstance(x, QuantizedTensor) else x.float()
