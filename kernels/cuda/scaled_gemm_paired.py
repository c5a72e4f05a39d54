"""FP8 scaled GEMM with promoted sums, in tiles of any width whose blocks share operands.

The products of scaled_gemm.py with one scale or scales of rows, by the program and the rule of
scaled_gemm_fast.py: for rows that start within lines of the L2, and for outputs that tiles of 64,
96, 128 or 256 columns fill badly. Where those are the fastest, it takes them.
"""

from __future__ import annotations

import functools
from typing import Any

from lokakern.kernels.cuda import scaled_gemm_fast
from lokakern.kernels.cuda.scaled_gemm import SCALES
from lokakern.registry.register import PROMOTED_KERNEL_ERR_BOUND, register
from lokakern.types import EPILOGUES


def _launch(scales: str, *operands: Any) -> None:
    scaled_gemm_fast.launch(scales, True, *operands)


for _scales in ("tensor", "row"):
    register(
        "scaled_gemm",
        name=f"scaled_gemm_{_scales}_paired",
        architectures=frozenset({"sm_90"}),
        granularity=SCALES[_scales][0],
        b_granularity=SCALES[_scales][1],
        accumulation="promoted",
        supports=functools.partial(scaled_gemm_fast.supports, _scales),
        kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND,
        epilogues=EPILOGUES,
        accumulates=True,
        k_slices=True,
        batch_invariant=True,
    )(functools.partial(_launch, _scales))
