"""Activations that kernels came to know after they were measured, which their files do not say.

As with float16, the text of a kernel's file is part of the digest of its rows. What applies GELU
although its file does not tell, and what would leave it out, stands here.
"""

from __future__ import annotations

from collections.abc import Sequence

from lokakern.types import Problem, norm_form

GELUS = ("gelu", "gelu_tanh")
_WITHOUT = ("triton.norm_quantize", "triton.gemm_norm_", "triton.gemm_block_norm_")


def refusal(kernel: str, parts: Sequence[str], problem: Problem) -> str | None:
    """Why a kernel of an op with a norm does not apply a problem's activation, or None.

    Args:
        kernel: Its name.
        parts: Those of a composition.
        problem: Any.
    """
    last = problem.epilogue.rpartition("+")[-1]
    if last == "residual_last":
        last = norm_form(problem.epilogue).last
    if last not in GELUS:
        return None
    without = next((name for name in parts or (kernel,) if name.startswith(_WITHOUT)), None)
    if without is None:
        return None
    return f"has no {last}" if without == kernel else f"{without}: has no {last}"
