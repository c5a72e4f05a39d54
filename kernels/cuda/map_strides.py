"""Maps of the operands of a product by all of their strides.

`scaled_gemm.run` keeps maps by addresses and by the strides of the output and of the first slice of
a. Its file is part of the digests of rows, as half.py says: this module puts a function into its
place that gives the same memory with other strides of b, of later slices or of scales along k maps
of its own. Before, it was read by the map of whatever lay there first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from lokakern.kernels.cuda import scaled_gemm
from lokakern.kernels.cuda.scaled_gemm import Plan
from lokakern.kernels.cuda.tiles import Kind

MOST_STRIDES = 32  # of a plan, each with up to 1024 maps
_NO_ADDRESS = -1  # with which the keys of these begin


def _run(
    plain: Callable[..., None],
    plan: Plan,
    kind: Kind,
    m: int,
    products: int,
    slices: Sequence[Tensor],
    slice_scales: Sequence[Tensor],
    b: Tensor,
    b_scale: Tensor,
    *others: Any,
) -> None:
    """Launch a plan, with the maps of these strides."""
    if kind.in_mainloop or len(slices) > 1 or b.stride(1) != b.shape[0]:
        scales = (b_scale, *slice_scales) if kind.in_mainloop else ()
        strides = (
            b.stride(1),
            *[x.stride(0) for x in slices],
            *[x for s in scales for x in s.stride()],
        )
        key, plans = (_NO_ADDRESS, *strides), cast(dict[tuple[int, ...], Plan], plan.maps)
        found = plans.get(key)
        if found is None:
            if len(plans) >= MOST_STRIDES:
                plans.clear()
            found = plans[key] = plan._replace(maps={})
        plan = found
    plain(plan, kind, m, products, slices, slice_scales, b, b_scale, *others)


scaled_gemm.run = functools.partial(_run, scaled_gemm.run)
