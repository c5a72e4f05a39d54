"""Op ``gemm`` as two launches: one quantizes both operands, then a scaled GEMM.

`lokakern.kernels.compositions` has a launch for each operand, and four for a column-major one by
rows, which the host pays for where no CUDA graph holds them.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from lokakern.kernels.compositions import _supports_composition, _workspace_of
from lokakern.kernels.cuda.quantize_together import Matrix, launch_together
from lokakern.problems import sums_over_samples
from lokakern.registry.register import KERNELS, Kernel, Launcher, add, load_parts
from lokakern.types import Device, Granularity, Problem, QuantizedTensor, Rejected, Support

TOGETHER, APART = "cuda.quantize_together", "cuda.quantize"  # stems of quantizers
GEMMS = (
    "torch.scaled_mm_row",
    "torch.scaled_mm_row_fast",
    "torch.scaled_mm_block",
    "cuda.scaled_gemm_row",
    "cuda.scaled_gemm_block",
    "cuda.scaled_gemm_group",
)


def _supports(
    first: Kernel, b_quantizer: Kernel, second: Kernel, problem: Problem, device: Device
) -> Support:
    if second.granularity is not Granularity.ROW and not sums_over_samples(problem):
        return Rejected("reads operands whose rows are samples; use a kernel by rows")
    return _supports_composition(first, b_quantizer, second, problem, device)


def _launcher_of(first: Kernel, b_quantizer: Kernel, second: Kernel) -> Launcher:
    a_scales, b_scales = second.granularity, second.b_granularity
    quantize, quantize_b, multiply = first.launch, b_quantizer.launch, second.launch

    def launch(
        a: Tensor, b: Any, out: Tensor, bias: Tensor | None, workspace: tuple[Any, ...]
    ) -> None:
        data, scale, scratch, sums = workspace[:4]
        if type(b) is QuantizedTensor:
            quantize(a, data, scale, scratch)
            multiply(data, scale, *b.transpose, out, bias, sums)
            return
        b_data, b_scale, turned = workspace[4:]
        weight = b.t()
        if weight.dtype is a.dtype:
            right = Matrix(weight, b_data, b_scale, b_scales)
            launch_together((right, Matrix(a, data, scale, a_scales)))
        else:
            quantize(a, data, scale, scratch)
            quantize_b(weight, b_data, b_scale, scratch)
        multiply(data, scale, *turned, out, bias, sums)

    return launch


def _compose(gemm: str) -> None:
    second = KERNELS.get(gemm)
    if second is None:
        return
    suffixes = second.granularity.suffix, second.b_granularity.suffix
    names = [f"{stem}_{suffix}" for stem in (APART, TOGETHER) for suffix in suffixes]
    found = [KERNELS.get(name) for name in names]
    every = [kernel for kernel in (*found, second) if kernel is not None]
    if len(every) < len(names) + 1:
        return
    first, b_quantizer, together = every[:3]
    modules = ("together_compositions", "compositions", *(x for k in every for x in k.modules))
    add(Kernel(
        name=f"{together.name}+{gemm}",
        op="gemm",
        language=second.language,
        modules=tuple(dict.fromkeys(modules)),
        launch=_launcher_of(first, b_quantizer, second),
        architectures=together.architectures,
        granularity=second.granularity,
        b_granularity=second.b_granularity,
        accumulation=second.accumulation,
        supports_problem=functools.partial(_supports, first, b_quantizer, second),
        workspace=_workspace_of(first, b_quantizer, second),
        kernel_err_bound=second.kernel_err_bound,
        parts=tuple(dict.fromkeys((*names[2:], gemm))),
    ))  # fmt: skip


load_parts()
for _gemm in GEMMS:
    _compose(_gemm)
