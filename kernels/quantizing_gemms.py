"""Op ``gemm`` where a is quantized on its way to the tensor cores, and b before.

With a prepared weight that is one kernel; here b is quantized first, by a kernel of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lokakern.kernels import compositions
from lokakern.kernels.cuda.scaled_gemm import multiply_bfloat16, supports_bfloat16
from lokakern.registry.register import KERNELS, Kernel, add, fp8_format
from lokakern.types import Device, Problem, Rejected, Support


def compose_quantizing(quantizer: str, gemm: str) -> Kernel | None:
    """Register ``gemm`` as a quantizer of b followed by a kernel that quantizes a by itself.

    Returns:
        None where a part could not be imported on this machine.
    """
    first, second = KERNELS.get(quantizer), KERNELS.get(gemm)
    if first is None or second is None:
        return None
    quantize = first.launch

    def workspace(_a: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        weight = b.t()
        data = compositions._empty_data(weight, compositions._device_fp8(weight.device))
        rows, columns = weight.shape
        return data, second.b_granularity.empty_scale(rows, columns, weight.device)

    def launch(
        a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, given: tuple[Tensor, ...]
    ) -> None:
        data, scale = given
        quantize(b.t(), data, scale, ())
        multiply_bfloat16(a, data.t(), scale.t(), out, bias)

    def supports(problem: Problem, device: Device) -> Support:
        assert problem.b is not None  # an op with two operands
        if problem.prepared:
            return Rejected(f"quantizes b; {gemm} takes prepared weights")
        weight = replace(problem.b, layout=compositions._TRANSPOSED[problem.b.layout])
        answer = first.supports(
            compositions._quantize_problem(
                problem.n, problem.k, weight, fp8_format(device), second.b_granularity
            ),
            device,
        )
        if isinstance(answer, Rejected):
            return Rejected(f"{quantizer}: {answer.reason}")
        return supports_bfloat16(problem, device)

    kernel = Kernel(
        name=f"{quantizer}+{gemm}",
        op="gemm",
        language=second.language,
        modules=tuple(
            dict.fromkeys(("quantizing_gemms", "compositions", *first.modules, *second.modules))
        ),
        launch=launch,
        architectures=first.architectures & second.architectures,
        granularity=second.granularity,
        b_granularity=second.b_granularity,
        accumulation=second.accumulation,
        supports_problem=supports,
        workspace=workspace,
        kernel_err_bound=second.kernel_err_bound,
        parts=(quantizer, gemm),
    )
    add(kernel)
    return kernel


compose_quantizing("cuda.quantize_block", "cuda.gemm_block")
