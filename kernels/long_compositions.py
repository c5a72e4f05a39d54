"""Op ``gemm`` where a has long rows: one kernel quantizes them, another one b, then a scaled GEMM.

`cuda.quantize_long_row` writes the bytes of `cuda.quantize_row`, which quantizes b: a weight has
few rows, is prepared as a rule, and may be column-major.
"""

from __future__ import annotations

import functools

from lokakern.kernels.compositions import _launcher_of, _supports_composition, _workspace_of
from lokakern.registry.register import KERNELS, Kernel, add, load_parts

FIRST, B_QUANTIZER = "cuda.quantize_long_row", "cuda.quantize_row"
# Not torch.scaled_mm_row_fast, which takes k up to 4096.
GEMMS = "torch.scaled_mm_row", "cuda.scaled_gemm_row", "cuda.scaled_gemm_row_fast"


def _compose(gemm: str) -> None:
    names = FIRST, B_QUANTIZER, gemm
    if not KERNELS.keys() >= set(names):
        return
    first, b_quantizer, second = every = [KERNELS[name] for name in names]
    modules = ("long_compositions", "compositions", *(x for k in every for x in k.modules))
    add(Kernel(
        name=f"{FIRST}+{gemm}",
        op="gemm",
        language=second.language,
        modules=tuple(dict.fromkeys(modules)),
        launch=_launcher_of(first.launch, b_quantizer.launch, second.launch),
        architectures=first.architectures,
        granularity=second.granularity,
        b_granularity=second.b_granularity,
        accumulation=second.accumulation,
        supports_problem=functools.partial(_supports_composition, first, b_quantizer, second),
        workspace=_workspace_of(first, b_quantizer, second),
        kernel_err_bound=second.kernel_err_bound,
        parts=names,
    ))  # fmt: skip


load_parts()
for _gemm in GEMMS:
    _compose(_gemm)
