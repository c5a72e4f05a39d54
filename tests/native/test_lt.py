"""FP8 products with a kept plan of cuBLASLt: launched only where torch gives the same bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern.errors import LaunchError
from lokakern.native import replayed
from tests.support import native
from tests.support.native import FakeLt

M, N, K = 24, 32, 48


@pytest.fixture
def library() -> Iterator[Any]:
    with native.in_use() as module, torch.no_grad():
        yield module


@pytest.fixture
def lt(library: Any) -> Iterator[FakeLt]:
    with FakeLt(library) as fake:
        yield fake


def operands(
    rowwise: bool = True, bias: bool = False, m: int = M, left: torch.dtype = torch.float8_e4m3fn,
    half: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of `torch._scaled_mm`."""
    return {
        "a": torch.randn(m, K).to(left),
        "b": torch.randn(N, K).to(torch.float8_e4m3fn).t(),
        "a_scale": torch.rand(m, 1) if rowwise else torch.rand(1, 1),
        "b_scale": torch.rand(1, N) if rowwise else torch.rand(()),
        "bias": torch.randn(N).to(half) if bias else None,
    }


def scaled_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, fast: bool = True,
    is_half: bool = False,
) -> Tensor:  # fmt: skip
    dtype = torch.float16 if is_half else torch.bfloat16
    out = torch.empty(a.shape[0], b.shape[1], dtype=dtype)
    torch._scaled_mm(a, b, a_scale, b_scale, bias, None, dtype, fast, out=out)
    return out


call = replayed(scaled_mm)


def counted(library: Any) -> tuple[int, int]:
    found = library.lt_counts()
    return found["kept"], found["refused"]


def change(library: Any, before: tuple[int, int]) -> tuple[int, int]:
    kept, refused = counted(library)
    return kept - before[0], refused - before[1]


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_products_are_kept_where_bits_are_equal(
    half: torch.dtype, rowwise: bool, bias: bool, fast: bool, library: Any, lt: FakeLt
) -> None:
    before, given_as = counted(library), {"fast": fast, "is_half": half is torch.float16}
    for _ in range(6):
        given = operands(rowwise, bias, half=half)
        assert torch.equal(call(**given, **given_as), scaled_mm(**given, **given_as))
    # Two comparisons, then one launch in each of four replays.
    assert lt.asked == 1 and lt.multiplied == 6 and change(library, before) == (1, 0)
    assert lt.most_workspace_bytes == FakeLt.MOST_WORKSPACE_BYTES
    (product,) = lt.products.values()
    assert product[25] == bytes([fast]) and (31 in product) == rowwise and (26 in product) == bias


@pytest.mark.parametrize("m", [1, 2, 17])
def test_formats_strides_and_single_rows(m: int, library: Any, lt: FakeLt) -> None:
    wide = torch.randn(m, 2 * K).to(torch.float8_e5m2)
    for _ in range(4):
        given = operands(m=m) | {
            "a": wide[:, K:],
            "b": torch.randn(N, 3 * K).to(torch.float8_e4m3fn)[:, :K].t(),
        }
        assert torch.equal(call(**given), scaled_mm(**given))
    assert lt.multiplied == 4


@pytest.mark.parametrize("left", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("is_half", [False, True])
def test_another_order_of_additions_is_refused(
    is_half: bool, left: torch.dtype, library: Any, lt: FakeLt
) -> None:
    """Although the call's own operands would not tell."""
    before, lt.is_other = counted(library), True
    given = operands() | {"a": torch.zeros(M, K).to(left), "is_half": is_half}
    for _ in range(5):
        assert torch.equal(call(**given), scaled_mm(**given))
    assert change(library, before) == (0, 1) and lt.asked == 1 and lt.multiplied <= 2
    assert library.lt_counts()["reason"] == "cuBLASLt and torch give different bits"


def test_failures_at_the_comparison_leave_it_to_torch(library: Any, lt: FakeLt) -> None:
    for failure, algorithms, reason in (
        (15, 1, "cublasLtMatmul of cuBLASLt returned 15"), (0, 0, "cuBLASLt has no algorithm")
    ):  # fmt: skip
        library.clear()
        before, lt.failure, lt.algorithms = counted(library), failure, algorithms
        for _ in range(4):
            given = operands(bias=True)
            assert torch.equal(call(**given), scaled_mm(**given))
        assert change(library, before) == (0, 1) and lt.multiplied == 0
        assert library.lt_counts()["reason"] == reason


def test_a_failure_of_a_kept_product_raises(library: Any, lt: FakeLt) -> None:
    for _ in range(3):
        call(**operands())
    lt.failure = 13
    with pytest.raises(LaunchError, match="cublasLtMatmul of cuBLASLt returned 13"):
        call(**operands())


def test_a_capture_before_the_comparison_is_left_to_torch(library: Any, lt: FakeLt) -> None:
    before, lt.is_capturing = counted(library), True
    for _ in range(4):
        given = operands()
        assert torch.equal(call(**given), scaled_mm(**given))
    assert lt.asked == lt.multiplied == 0 and change(library, before) == (0, 0)
    lt.is_capturing = False
    call(**operands())
    assert lt.multiplied == 3 and change(library, before) == (1, 0)
    lt.is_capturing = True
    call(**operands())
    assert lt.multiplied == 4


def test_workspaces_have_the_size_that_the_algorithm_wants(library: Any, lt: FakeLt) -> None:
    lt.workspace_bytes = 4096
    for _ in range(4):
        call(**operands())
    assert all(address and size == 4096 for address, size in lt.workspaces)
    assert len(lt.workspaces) == 4


def test_addresses_that_are_not_aligned_are_left_to_torch(library: Any, lt: FakeLt) -> None:
    """An algorithm is chosen for aligned ones."""
    scales = torch.rand(M + 1, 1)
    for _ in range(4):
        given = operands() | {"a_scale": scales[1:]}
        assert torch.equal(call(**given), scaled_mm(**given))
    assert lt.asked == 0 and library.size() == 1


def test_fewer_multiprocessors_are_left_to_torch(library: Any, lt: FakeLt) -> None:
    for _ in range(3):
        call(**operands())
    assert lt.multiplied == 3
    torch._C._set_sm_carveout_experimental(8)
    try:
        call(**operands())
    finally:
        torch._C._set_sm_carveout_experimental(None)
    assert lt.multiplied == 3


def test_other_forms_have_no_product(library: Any, lt: FakeLt) -> None:
    def row_major(a: Tensor, b: Tensor, **rest: Any) -> Tensor:
        return scaled_mm(a, b.contiguous(), **rest)

    def float32(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: None) -> Tensor:
        out = torch.empty(a.shape[0], b.shape[1])
        return torch._scaled_mm(a, b, a_scale, b_scale, bias, None, torch.float32, True, out=out)

    for function in (row_major, float32):
        replay = replayed(function)
        for _ in range(4):
            given = operands()
            assert torch.equal(replay(**given), function(**given))
    assert library.size() == 2 and lt.asked == 0


def test_a_cpu_has_no_products(library: Any) -> None:
    before = counted(library)
    for _ in range(4):
        call(**operands())
    assert library.size() == 1 and counted(library) == before


@pytest.mark.parametrize("is_kept", [False, True])
def test_threads_share_a_product(is_kept: bool, library: Any, lt: FakeLt) -> None:
    """Each call has its own scales in the descriptor that all share."""
    before = counted(library)
    for _ in range(3 if is_kept else 2):
        call(**operands(bias=True))
    wrong, lt.is_slow = [], is_kept

    def work() -> None:
        with torch.no_grad():
            for _ in range(20):
                given = operands(bias=True)
                if not torch.equal(call(**given), scaled_mm(**given)):
                    wrong.append(given)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and lt.asked == 1 and change(library, before) == (1, 0)
    assert len(lt.products) == 1 and 3 <= lt.multiplied <= 83
    assert lt.multiplied == 83 or not is_kept
