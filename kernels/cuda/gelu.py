"""GELU for kernels of this folder, whose files are part of the digests of rows measured without it.

A program for GELU is that for silu with gelu.cuh in front of its source, and with the same macros
and launch parameters. As half.py does, this module, which is always loaded with the kernels, puts
functions that know of it into the places of those that bind launches by types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from lokakern.driver import CudaLaunch
from lokakern.kernels.cuda import (
    activate_quantize,
    gemm_norm,
    norm_backward,
    norm_quantize,
    norm_tiles,
    scaled_gemm,
    scaled_gemm_fast,
    scaled_gemm_unaligned,
    tiles,
)
from lokakern.nvrtc import Program

MACROS = {"gelu": {"BY_TANH": 0, "HALF": 0}, "gelu_tanh": {"BY_TANH": 1, "HALF": 0}}
PREFIX = "gelu_"  # of the file of the program with silu
BOUNDS = activate_quantize.Bound, norm_backward.Bound, norm_quantize.Bound
# Of what decides a compilation, where the activation stands.
SIGNED = {
    activate_quantize: lambda signature: signature[1],
    gemm_norm: lambda signature: signature[-1].last,
    norm_backward: lambda signature: signature[-1].last,
    norm_quantize: lambda signature: signature[-1].last,
    scaled_gemm: lambda signature: signature[-1].activation,
    scaled_gemm_fast: lambda signature: signature[-1].activation,
    scaled_gemm_unaligned: lambda signature: signature[-1].activation,
}


def in_half(program: Program) -> Program | None:
    """The program for float16 of one with GELU; None of others."""
    macros = dict(program.macros)
    if "BY_TANH" not in macros:
        return None
    return replace(program, macros=tuple((macros | {"HALF": 1}).items()))


def _with_gelu(module: ModuleType, activation_of: Callable[[tuple[Any, ...]], str]) -> None:
    """Let what binds launches in a module, and keeps them by signature, bind GELU too."""
    plain: Callable[..., Any] = vars(module)["bind"].__wrapped__

    @functools.lru_cache(maxsize=4096)
    def bind(*signature: Any) -> Any:
        bound = plain(*signature)
        macros = MACROS.get(activation_of(signature))
        if macros is None:
            return bound
        if isinstance(bound, BOUNDS):
            return bound._replace(launch=_of_gelu(bound.launch, macros))
        return _of_gelu(bound, macros)

    vars(module)["bind"] = bind


def _of_gelu(launch: CudaLaunch, macros: dict[str, int]) -> CudaLaunch:
    program, source = launch.program, Path(launch.program.source)
    with_gelu = str(source.with_name(PREFIX + source.name))
    given = (*program.macros, *macros.items())
    return launch.with_program(replace(program, source=with_gelu, macros=given))


for _numbers in (norm_tiles.LAST, norm_backward.LAST, tiles._ACTIVATIONS):
    _numbers |= dict.fromkeys(MACROS, _numbers["silu"])
for _module, _activation_of in SIGNED.items():
    _with_gelu(_module, _activation_of)
