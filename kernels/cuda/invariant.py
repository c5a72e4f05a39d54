"""Bits of a row that depend on no other row, also where a product and a sum may be contracted.

Whether the compiler makes the multiplication by a scale and the addition of a bias one instruction
depends on the tile (of n = k = 1024: at 1024 rows it does, at 512 not), and the tile on the number
of rows. Programs of calls that ask for the same bits are therefore compiled without contraction.
The files of these kernels are part of the digests of rows, as half.py says: this module puts
functions that know of it into the places of those that decide what is computed, and that bind it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from lokakern.kernels.cuda import half, scaled_gemm, scaled_gemm_unaligned
from lokakern.kernels.cuda.scaled_gemm_fast import OPTIONS
from lokakern.kernels.cuda.tiles import Kind
from lokakern.registry.float16 import InHalf


class InvariantKind(Kind):
    """What a product computes, without contraction."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and tuple(self) == tuple(other)

    def __ne__(self, other: object) -> bool:  # a tuple has its own
        return not self == other

    def __hash__(self) -> int:
        return hash((type(self), *self))


class InvariantHalfKind(half.HalfKind):
    """The same with an output in float16."""

    __slots__ = ()


def _kind_of(plain: Callable[..., Kind], *operands: Any) -> Kind:
    kind, (bias, epilogue) = plain(*operands), operands[-2:]
    adds = bias is not None or epilogue.accumulate or epilogue.activation == "hardswish"
    if not (adds and epilogue.batch_invariant):
        return kind
    return (InvariantHalfKind if isinstance(kind, InHalf) else InvariantKind)(*kind)


def _without_contraction(module: ModuleType) -> None:
    plain: Callable[..., Any] = module.bind.__wrapped__

    @functools.lru_cache(maxsize=4096)
    def bind(*signature: Any) -> Any:
        bound = plain(*signature)
        if not isinstance(signature[-1], (InvariantKind, InvariantHalfKind)):
            return bound
        return bound.with_program(replace(bound.program, options=OPTIONS))

    module.bind = bind  # type: ignore[attr-defined]


scaled_gemm._kind_of = functools.partial(_kind_of, scaled_gemm._kind_of)
for _module in (scaled_gemm, scaled_gemm_unaligned):
    _without_contraction(_module)
