"""float16 for gemm_norm of Triton, whose file is part of the digests of rows in bfloat16.

It keeps launches by the dtypes of its operands, but not of what goes into an output beside sums.
"""

from __future__ import annotations

from torch import Tensor

from lokakern.kernels.triton import gemm_norm
from lokakern.kernels.triton.norm_pieces import Form, pieces
from lokakern.registry.float16 import InHalf, has_half
from lokakern.types import NormEpilogue


class HalfForm(InHalf, Form):
    """Of an epilogue with float16."""

    __slots__ = ()


def _pieces(
    epilogue: NormEpilogue, absent: Tensor
) -> tuple[Form, tuple[Tensor, ...], tuple[int, int, int]]:
    form, *rest = pieces(epilogue, absent)
    return (HalfForm(*form) if has_half(None, None, epilogue) else form, *rest)  # type: ignore[return-value]


vars(gemm_norm)["pieces"] = _pieces
