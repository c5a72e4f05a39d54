"""float16 for kernels of this folder, whose files are part of the digests of rows in bfloat16.

A program for float16 is that of bfloat16 with a file in front of its source (half_quantize.cuh,
half_scaled_gemm.cuh), and with the same macros and launch parameters. This module, which is always
loaded with the kernels, puts functions that know of it into the places of those that bind launches
by types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from lokakern.driver import CudaLaunch
from lokakern.kernels.cuda import (
    activate_quantize,
    gelu,
    gemm_cross,
    gemm_norm,
    norm_backward,
    norm_quantize,
    quantize,
    quantize_long,
    quantize_short,
    quantize_tensor,
    quantize_tile,
    quantize_together,
    scaled_gemm,
    scaled_gemm_fast,
    scaled_gemm_turned,
    scaled_gemm_unaligned,
)
from lokakern.kernels.cuda.norm_tiles import NormKind
from lokakern.kernels.cuda.tiles import FOLD, Kind
from lokakern.registry.float16 import InHalf, has_half
from lokakern.registry.register import KERNELS
from lokakern.types import Epilogue, NormEpilogue, QuantizedTensor

MOST_BOX = 256  # elements along a side of what one bulk copy moves
BOUNDS = activate_quantize.Bound, norm_backward.Bound, norm_quantize.Bound, quantize.Bound
# By the file of the program in bfloat16.
SOURCES = {
    "quantize.cu": "half_quantize.cu",
    "quantize_long.cu": "half_quantize_long.cu",
    "quantize_short.cu": "half_quantize_short.cu",
    "quantize_together.cu": "half_quantize_together.cu",
    "quantize_tiles_together.cu": "half_quantize_tiles_together.cu",
    "quantize_tensor.cu": "half_quantize_tensor.cu",
    "quantize_tile.cu": "half_quantize_tile.cu",
    "activate_quantize.cu": "half_activate_quantize.cu",
    "norm_quantize.cu": "half_norm_quantize.cu",
    "scaled_gemm.cu": "half_scaled_gemm.cu",
    "scaled_gemm_fast.cu": "half_scaled_gemm_fast.cu",
    "scaled_gemm_turned.cu": "half_scaled_gemm_turned.cu",
    "scaled_gemm_unaligned.cu": "half_scaled_gemm_unaligned.cu",
    "gemm_norm.cu": "half_gemm_norm.cu",
    "gemm_cross.cu": "half_gemm_cross.cu",
    "norm_backward.cu": "half_norm_backward.cu",
}


class HalfKind(InHalf, Kind):
    """What a product computes, with an output in float16."""

    __slots__ = ()


class HalfNormKind(InHalf, NormKind):
    """What a product and a norm compute, with an operand, or what is beside them, in float16."""

    __slots__ = ()


def _is_half(argument: Any) -> bool:
    if isinstance(argument, quantize_together.Words):
        argument = argument.source
    return argument is torch.float16 or isinstance(argument, InHalf)


def _with_half(module: ModuleType, name: str = "bind") -> None:
    """Let what binds launches in a module, and keeps them by signature, bind float16 too."""
    plain: Callable[..., Any] = getattr(module, name).__wrapped__

    @functools.lru_cache(maxsize=4096)
    def bind(*signature: Any, **options: Any) -> Any:
        bound = plain(*signature, **options)
        if not any(map(_is_half, signature)):
            return bound
        return _bound_in_half(bound)

    setattr(module, name, bind)


def _bound_in_half(bound: Any) -> Any:
    if isinstance(bound, BOUNDS):
        return bound._replace(launch=_in_half(bound.launch))
    return _in_half(bound)


def _in_half(launch: CudaLaunch) -> CudaLaunch:
    program = launch.program
    with_gelu = gelu.in_half(program)
    if with_gelu is not None:
        return launch.with_program(with_gelu)
    source = Path(program.source)
    return launch.with_program(replace(program, source=str(source.with_name(SOURCES[source.name]))))


def _with_half_outputs() -> None:
    """Let products write float16; and fold no rows that a bulk copy cannot take for one."""
    plain = scaled_gemm._kind_of

    def kind_of(
        scales: str,
        slices: Sequence[Tensor],
        b: Tensor,
        out: Tensor,
        bias: Tensor | None,
        epilogue: Epilogue,
    ) -> Kind:
        kind = plain(scales, slices, b, out, bias, epilogue)
        # A box of a bulk copy has at most 256 columns, which 8 rows of 48 exceed. Here, as a change
        # of `_kind_of` would make all rows of these kernels stale.
        if kind.folds and out.shape[1] * FOLD > MOST_BOX:
            kind = kind._replace(folds=False)
        return HalfKind(*kind) if out.dtype is torch.float16 else kind

    scaled_gemm._kind_of = kind_of


def _with_half_rows(module: ModuleType) -> None:
    """Launch rows of float16 by the same function, but for what binds it: signatures lack them."""
    plain = module.bind.__wrapped__

    @functools.lru_cache(maxsize=4096)
    def bind(signature: Any) -> Any:
        return _bound_in_half(plain(signature))

    name = module.__name__.rpartition(".")[-1]
    kernel = KERNELS[f"cuda.{name}"]
    of_bfloat16: Any = kernel.launch
    of_float16 = FunctionType(of_bfloat16.__code__, {**vars(module), "bind": bind})

    def launch(x: Tensor, *others: Any) -> None:
        (of_float16 if x.dtype is torch.float16 else of_bfloat16)(x, *others)

    KERNELS[kernel.name] = replace(kernel, launch=launch)


def _with_half_products_of_norms() -> None:
    """Plan products with norms of float16 by the same function, but for names of it."""
    plain = gemm_norm._planned
    types = {**gemm_norm._TYPES, torch.float16: gemm_norm._TYPES[torch.bfloat16]}
    names = {**vars(gemm_norm), "NormKind": HalfNormKind, "_TYPES": types}
    of_float16 = FunctionType(plain.__code__, names)

    def planned(
        scales: str,
        fast: bool,
        a: Tensor | QuantizedTensor,
        b: Tensor | QuantizedTensor,
        out: Tensor | QuantizedTensor,
        epilogue: NormEpilogue,
    ) -> tuple[gemm_norm.Plan, NormKind]:
        plan = of_float16 if has_half(a, out, epilogue) else plain
        return plan(scales, fast, a, b, out, epilogue)

    gemm_norm._planned = planned


def _with_half_crosses() -> None:
    """Launch products with crosses of float16 by the same function, but for a name of it."""
    names = {**vars(gemm_cross), "Kind": HalfKind}
    plain = gemm_cross._launch
    in_half = FunctionType(plain.__code__, names, argdefs=plain.__defaults__)
    for scales in gemm_cross.SCALES:
        kernel = KERNELS[f"cuda.gemm_cross_{scales}"]
        choice = kernel.launch, functools.partial(in_half, scales)

        def launch(a: Any, b: Any, out: Tensor, *others: Any, choice: Any = choice) -> None:
            choice[out.dtype is torch.float16](a, b, out, *others)

        KERNELS[kernel.name] = replace(kernel, launch=launch)


for _module in (
    activate_quantize,
    gemm_cross,
    gemm_norm,
    quantize,
    quantize_long,
    quantize_short,
    quantize_tensor,
    quantize_tile,
    quantize_together,
    scaled_gemm,
    scaled_gemm_fast,
    scaled_gemm_turned,
    scaled_gemm_unaligned,
):
    _with_half(_module)
_with_half(quantize_together, "bind_tiles")
_with_half_outputs()
_with_half_rows(norm_backward)
_with_half_rows(norm_quantize)
_with_half_products_of_norms()
_with_half_crosses()
