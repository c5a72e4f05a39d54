"""`torch.bf16_padded` is the product of its operands padded with zeros."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lokakern import numerics
from lokakern.device import current_device
from lokakern.functional.checks import gemm_problem
from lokakern.kernels.torch.matmul_padded import pad_weight
from lokakern.problems import PADDED, padded_sizes
from lokakern.registry import ops
from lokakern.registry.register import KERNELS
from lokakern.types import Granularity, QuantizedTensor, Rejected
from tests.support.kernel_cases import cases, drawn

KERNEL = KERNELS[PADDED]
# Odd n, odd k, both, tails of one and of seven elements, one row, one column, long sums.
SIZES = [
    (128, 64, 13), (128, 13, 64), (65, 39, 479), (33, 65, 77), (1, 24, 39), (96, 1, 13),
    (7, 8, 9), (24, 16, 1), (40, 17, 15), (5, 3, 2), (16, 24, 8195), (257, 128, 900),
]  # fmt: skip
FORMS = ("weight", "prepared", "grad_input", "grad_weight")


def operands(form: str, m: int, n: int, k: int, where: str) -> tuple[Tensor, Tensor]:
    """a ``[m, k]`` and b ``[k, n]`` in the layouts of a product of a linear layer."""
    a, b = drawn(m, k, where=where), drawn(n, k, where=where, seed=1)
    if form in ("weight", "prepared"):
        return a, b.t()
    b = b.t().contiguous()
    return (a, b) if form == "grad_input" else (a.t().contiguous().t(), b)


def padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """A copy padded with zeros, in the layout of x."""
    if x.stride(1) != 1:
        return padded(x.t(), columns, rows).t()
    return functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


@pytest.mark.parametrize(("name", "where"), [c for c in cases("gemm") if c.values[0] == PADDED])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_equals_the_product_of_padded_operands(
    name: str, where: str, form: str, with_bias: bool
) -> None:
    """All room is NaN before, and what lies beside the output stays."""
    for m, n, k in SIZES:
        a, matrix = operands(form, m, n, k, where)
        b: Tensor | QuantizedTensor = matrix
        if form == "prepared":
            w = numerics.quantize(matrix.t(), numerics.Format.E4M3FN, Granularity.ROW)
            b = QuantizedTensor(w.data, w.scale, w.granularity, True, matrix.t())
        bias = drawn(n, where=where, seed=2) if with_bias else None
        whole = torch.full((m + 1, n + 9), math.nan, dtype=torch.bfloat16, device=where)
        out = whole[:m, 1 : 1 + n]
        problem = gemm_problem(a, b, bias, out)
        answer = KERNELS[name].supports(problem, current_device(where))
        wide_m, wide_n, wide_k = padded_sizes(problem)
        if (wide_m, wide_n, wide_k) == (m, n, k):
            assert isinstance(answer, Rejected) and "nothing to pad" in answer.reason
            continue
        assert not isinstance(answer, Rejected), answer
        workspace = KERNEL.workspace(a, b)
        for room in workspace if form != "prepared" else ():
            room.fill_(math.nan)
        KERNEL.launch(a, b, out, bias, workspace)

        left, right = padded(a, wide_m, wide_k), padded(matrix, wide_k, wide_n)
        expected = left @ right
        if bias is not None:
            expected = torch.addmm(functional.pad(bias, (0, wide_n - n)), left, right)
        if where == "cpu":  # cuBLAS may choose another kernel by the pitch of the output
            assert torch.equal(out, expected[:m, :n]), (m, n, k)
        exact, size = ops.product(a, matrix, bias), ops.magnitude(a, matrix, bias)
        error = numerics.kernel_error(out, exact, size, 2.0**-8)
        assert error.maximum <= KERNEL.bound_at(problem), (m, n, k)
        out.fill_(math.nan)
        assert whole.isnan().all(), "wrote beside its output"


def test_only_long_sums_may_be_split() -> None:
    def bound(m: int, n: int, k: int) -> float:
        return KERNEL.bound_at(
            gemm_problem(torch.empty(m, k).bfloat16(), torch.empty(k, n).bfloat16())
        )

    assert bound(64, 13, 479) == 1.0
    assert bound(64, 13, 8193) == KERNELS["torch.bf16"].bound_at(
        gemm_problem(torch.empty(64, 8193).bfloat16(), torch.empty(8193, 13).bfloat16())
    )


def test_padded_sizes_depend_on_the_layout() -> None:
    sizes = {}
    for form in FORMS[:1] + FORMS[2:]:
        sizes[form] = padded_sizes(gemm_problem(*operands(form, 13, 39, 479, "cpu")))
    assert sizes == {"weight": (13, 40, 480), "grad_input": (13, 40, 480),
                     "grad_weight": (16, 40, 479)}  # fmt: skip


def test_a_prepared_weight_is_padded_once() -> None:
    a, b = operands("weight", 32, 39, 77, "cpu")
    q = numerics.quantize(b.t(), numerics.Format.E4M3FN, Granularity.ROW)
    wide = pad_weight(b.t())
    assert wide.shape == (40, 80) and torch.equal(wide[:39, :77], b.t())
    assert not wide[:39, 77:].any()
    prepared = QuantizedTensor(q.data, q.scale, q.granularity, True, b.t(), None, wide)
    assert prepared.t().t().padded is wide and prepared.to("cpu").padded is not None
    workspace = KERNEL.workspace(a, prepared)
    assert any(room.data_ptr() == wide.data_ptr() for room in workspace)
    before = wide.clone()
    outs = []
    for _ in range(2):
        outs.append(torch.full((32, 39), math.nan).bfloat16())
        KERNEL.launch(a, prepared, outs[-1], None, KERNEL.workspace(a, prepared))
    expected = padded(a, 32, 80) @ before.t()
    assert all(torch.equal(out, expected[:, :39]) for out in outs)
    assert torch.equal(wide[:39], before[:39])


def test_rejects_what_it_does_not_pad() -> None:
    here = current_device("cpu")
    odd = torch.empty(32, 13).bfloat16()
    for a, b, words in (
        (torch.empty(32, 16).bfloat16(), torch.empty(16, 8).bfloat16(), "nothing to pad"),
        (torch.empty(32, 8).bfloat16(), torch.empty(8, 1).bfloat16(), "nothing to pad"),
        (odd.float(), torch.empty(13, 8), "takes bfloat16"),
    ):
        answer = KERNEL.supports(gemm_problem(a, b), here)
        assert isinstance(answer, Rejected) and words in answer.reason


def test_infinite_values_stay_in_their_rows() -> None:
    for form, (m, n, k) in itertools.product(FORMS[::2], [(24, 13, 39), (9, 40, 77)]):
        a, b = operands(form, m, n, k, "cpu")
        a[3, k - 1] = math.inf
        out = torch.full((m, n), math.nan).bfloat16()
        KERNEL.launch(a, b, out, None, KERNEL.workspace(a, b))
        assert out[3].isinf().all() and out[torch.arange(m) != 3].isfinite().all()
