"""Checks of kernels that normalize, for interpret.py: against float64, over tails and outputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lokakern import numerics
from lokakern.epilogue import ACTIVATIONS
from lokakern.measure.norm_errors import norm_kernel_error
from lokakern.norm import NO_NORM, Norm, static_scale
from lokakern.registry import ops
from lokakern.registry.register import Kernel
from lokakern.types import Format, Granularity, NormEpilogue, QuantizedTensor, empty_data

NONE, TENSOR = Granularity.NONE, Granularity.TENSOR
ROW, GROUP = Granularity.ROW, Granularity.GROUP
# What comes before and after the norm, by what it is given; "affine" is a weight and a bias.
TAILS = (
    ("bias", "affine", "hardswish"), ("residual", "norm_weight"), ("bias", "gate"), ("silu",),
    ("bias", "residual", "affine", "cross"), ("norm_bias", "relu"), ("residual_last",),
    ("bias", "residual_last", "affine", "gate"), (), ("residual", "silu"), ("cross",),
    ("bias", "affine", "gelu"), ("residual_last", "gelu_tanh"),
)  # fmt: skip
OUTS = ((Format.BFLOAT16, NONE), (Format.E4M3FN, ROW), (Format.E4M3FN, TENSOR),
        (Format.E4M3FN, GROUP), (Format.E4M3FNUZ, ROW), (Format.E5M2, GROUP))  # fmt: skip
PADDING = 9  # of unquantized outputs
LAYER, RMS = Norm("layer"), Norm("rms", eps=1e-6)
# m, n, k and the norm: one row, tails on every axis, one to four parts of a row.
ROWS = (
    (1, 8, 13, LAYER), (3, 130, 129, RMS), (65, 200, 96, LAYER), (67, 33, 200, NO_NORM),
    (5, 480, 144, LAYER), (2, 1, 16, RMS), (130, 64, 128, LAYER), (66, 256, 128, LAYER),
    (9, 384, 80, RMS), (4, 512, 256, NO_NORM), (7, 300, 128, LAYER), (520, 40, 64, LAYER),
)  # fmt: skip
# For blocks: three across, one that is the row, several tiles of rows, long sums.
BLOCKS = (
    (1, 96, 13, 32), (67, 768, 144, 256), (130, 64, 96, 64), (3, 256, 128, 256),
    (65, 384, 256, 128), (5, 128, 40, 128), (520, 256, 528, 256),
    (2, 32, 64, 32), (9, 64, 33, 64), (4, 192, 129, 64), (17, 64, 16, 32), (6, 512, 48, 256),
)  # fmt: skip
# Rows of norm_quantize, with the norm; those of the last do not fill their registers.
LENGTHS = (
    (1, 13, LAYER), (5, 1000, RMS), (3, 128, LAYER), (4, 1024, LAYER), (70, 64, NO_NORM),
    (3, 384, Norm("block_rms", 128)), (5, 2048, Norm("block_rms", 32)), (2, 8192, LAYER),
    (3, 48, Norm("block_rms", 48)), (33, 130, RMS), (2, 5000, LAYER), (300, 1, RMS),
    (270, 9, LAYER),
)  # fmt: skip


def vectors(
    words: tuple[str, ...], rows: int, columns: int, generator: torch.Generator,
    half: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of a `NormEpilogue`, float32 vectors and matrices of padded rows in ``half``."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def matrix() -> Tensor:
        return random(rows, columns + 5).to(half)[:, :columns]

    given: dict[str, Any] = {"residual_last": "residual_last" in words}
    dtype = half if "gate" in words else torch.float32
    for name in ("bias", "norm_weight", "norm_bias"):
        if name in words or ("affine" in words and name != "bias"):
            given[name] = random(columns).to(dtype)
    if "residual" in words or "residual_last" in words:
        given["residual"] = matrix()
    if "gate" in words:
        given["gate"] = matrix()
    elif "cross" in words:
        given["x0"], given["x"] = matrix(), matrix()
    else:
        given["activation"] = next((w for w in words if w in ACTIVATIONS), "none")
    return given


def poisoned(
    rows: int, columns: int, form: Format, granularity: Granularity, epilogue: NormEpilogue
) -> Tensor | QuantizedTensor:
    """An output where every element that a kernel leaves out shows; unquantized rows are padded."""
    cpu = torch.device("cpu")
    if granularity is NONE:
        return torch.full((rows, columns + PADDING), 77.0, dtype=form.dtype)[:, :columns]
    data = empty_data(rows, columns, form.dtype, cpu)
    data.view(torch.uint8).fill_(form.nan_byte)
    scale = granularity.empty_scale(rows, columns, cpu).fill_(float("nan"))
    if granularity is TENSOR and epilogue.norm.kind == "none":
        scale.fill_(0.01)  # some outputs saturate
    elif granularity is TENSOR:
        weight, bias = epilogue.norm_weight, epilogue.norm_bias
        scale.fill_(static_scale(epilogue.norm, columns, form, weight, bias))
    return QuantizedTensor(data, scale, granularity)


def compare(
    case: str,
    out: Tensor | QuantizedTensor,
    exact: Tensor,
    magnitude: Tensor,
    spoiled: int | None,
) -> Iterator[str]:
    """Failures of one output; `spoiled` is the only row that is given a NaN."""
    form = Format.of(out.dtype) if isinstance(out, Tensor) else out.format
    error = norm_kernel_error(out, exact, magnitude, form.unit_roundoff)
    if error.maximum > 1.0:  # no tensor core here: float32 sums, so every kernel meets it
        yield f"{case}: kernel_error {error.maximum:.3g} > 1"
    values = out if isinstance(out, Tensor) else out.data
    finite = torch.isfinite(values.float())
    broken = (~finite).any(dim=1).nonzero().flatten().tolist()
    if broken != ([] if spoiled is None else [spoiled]):
        yield f"{case}: NaN in rows {broken}, given in {spoiled}"
    if isinstance(out, Tensor):
        columns = out.shape[1]
        whole = out.as_strided((len(out), columns + PADDING), (columns + PADDING, 1))
        if not bool((whole[:, columns:] == 77.0).all()):
            yield f"{case}: wrote past the end of a row"
    if isinstance(out, QuantizedTensor) and out.granularity in (ROW, GROUP):
        # amax divided by amax / MAX is MAX: so scale and data are of the same values.
        groups = values.float().nan_to_num(0.0).abs()
        if out.granularity is GROUP:
            groups = torch.nn.functional.pad(groups, (0, -groups.shape[1] % 128))
            groups = groups.view(len(groups), -1, 128)
        most = groups.amax(-1)
        wrong = (most != form.maximum) & (most != 0)
        if bool(wrong.any()):
            yield f"{case}: largest elements {most[wrong][:3].tolist()}, not {form.maximum}"


def norms_of(kernel: Kernel) -> Iterator[tuple[int, int, int, Norm]]:
    if "block_norm" not in kernel.name:
        yield from ROWS
        return
    for m, n, k, block in BLOCKS:
        yield m, n, k, Norm("block_rms", block)


def check_gemm_norm(kernel: Kernel) -> Iterator[str]:
    tails = itertools.cycle(TAILS)
    for index, (m, n, k, norm) in enumerate(norms_of(kernel)):
        half = Format.FLOAT16 if index % 3 == 1 else Format.BFLOAT16
        outs = (OUTS[1 + index % 5], OUTS[1 + (index + 2) % 5], (half, NONE))
        for form, granularity in outs[:1] if m > 256 else outs:  # many rows are slow here
            span = norm.span(n)
            if norm.kind == "block_rms" and (
                (granularity is ROW and span != n) or (granularity is GROUP and span % 128)
            ):
                continue
            generator = torch.Generator().manual_seed(1000 * index + m)
            # Rows and columns of different sizes: a scale at the wrong place shows.
            x = torch.randn(m, k, generator=generator) + torch.randn(m, 1, generator=generator)
            x *= torch.exp2(torch.randint(-3, 3, (m, 1), generator=generator))
            w = torch.randn(n, k, generator=generator)
            w *= torch.exp2(torch.randint(-3, 3, (n, 1), generator=generator))
            x[m // 3] = 0.0
            spoiled = m // 2 if m > 2 else None
            if spoiled is not None:
                x[spoiled, k // 3] = float("nan")
            words = next(tails)
            epilogue = NormEpilogue(norm, **vectors(words, m, n, generator, half.dtype))
            fp8 = Format.E4M3FNUZ if form is Format.E4M3FNUZ else Format.E4M3FN
            a: Tensor | QuantizedTensor = x.to(half.dtype)
            b: Tensor | QuantizedTensor = w.to(half.dtype).t()
            if kernel.granularity is not NONE:
                a = numerics.quantize(x, fp8, kernel.granularity)
                b = numerics.quantize(w, fp8, kernel.b_granularity).t()
            out = poisoned(m, n, form, granularity, epilogue)
            kernel.launch(a, b, out, epilogue, ())
            exact, magnitude = ops.normalized(*ops.norm_sums(a, b), epilogue)
            case = (
                f"m={m} n={n} k={k} {half} {norm} {'+'.join(words)} -> "
                f"{form.value}/{granularity.value}"
            )
            yield from compare(case, out, exact, magnitude, spoiled)


def check_norm_quantize(kernel: Kernel) -> Iterator[str]:
    tails = itertools.cycle(TAILS)
    for index, (m, k, norm) in enumerate(LENGTHS):
        dtype = (torch.bfloat16, torch.float16, torch.bfloat16, torch.float32)[index % 4]
        half = torch.float16 if dtype is torch.float16 else torch.bfloat16
        outs = (OUTS[0], OUTS[1 + index % 5], OUTS[1 + (index + 2) % 5])
        for form, granularity in outs[half is torch.float16 :]:  # the first is bfloat16
            generator = torch.Generator().manual_seed(1000 * index + m)
            x = torch.randn(m, k + 3, generator=generator)[:, :k]
            x += 30.0 * torch.randn(m, 1, generator=generator)  # means far from 0
            x[m // 3] = 0.0
            spoiled = m // 2 if m > 2 else None
            if spoiled is not None:
                x[spoiled] = 1.0
                x[spoiled, k // 3] = float("nan")
            x = x.to(dtype)
            words = next(tails)
            epilogue = NormEpilogue(norm, **vectors(words, m, k, generator, half))
            out = poisoned(m, k, form, granularity, epilogue)
            kernel.launch(x, out, epilogue, ())
            exact, magnitude = ops.normalized(*ops.norm_rows(x), epilogue)
            case = (
                f"m={m} k={k} {dtype} {norm} {'+'.join(words)} -> {form.value}/{granularity.value}"
            )
            yield from compare(case, out, exact, magnitude, spoiled)
