"""On a GPU: kept plans of cuBLASLt and torch give equal bits, whichever is launched."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lokakern
from lokakern.functional.run import run
from lokakern.native import replayed
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import Granularity, QuantizedTensor
from tests.support import native

pytestmark = pytest.mark.gpu
ROWS = (1, 7, 16, 300, 2048, 8192)
SIZES = (16, 48, 128, 512, 1040, 2048)


@pytest.fixture(autouse=True)
def library() -> Iterator[Any]:
    with native.in_use() as module, torch.no_grad():
        yield module


def operands(m: int, n: int, k: int, scales: str) -> tuple[QuantizedTensor, QuantizedTensor]:
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    of_x, of_w = ("1x128", "128x128") if scales == "block" else (scales, scales)
    return lokakern.quantize(x, of_x), lokakern.quantize(w, of_w).t()


def by_torch(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, fast: bool) -> Tensor:
    if a.granularity is Granularity.GROUP:
        return run(KERNELS["torch.scaled_mm_block"], a, b, bias=bias)
    return torch._scaled_mm(
        a.data, b.transpose[0], a.scale, b.transpose[1], bias, None, torch.bfloat16, fast
    )


def kernel_call(scales: str, fast: bool) -> Callable[..., Any]:
    load_kernels()
    kernel = KERNELS[f"torch.scaled_mm_{scales}" + ("_fast" if fast else "")]
    return replayed(lambda a, b, bias=None: run(kernel, a, b, bias=bias))


def decided(library: Any) -> int:
    found = library.lt_counts()
    return int(found["kept"]) + int(found["refused"])


@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_bits_are_those_of_torch(scales: str, fast: bool, seed: int, library: Any) -> None:
    draw = random.Random(f"{scales} {fast} {seed}")
    m, n, k = draw.choice(ROWS), draw.choice(SIZES), draw.choice(SIZES)
    call, before = kernel_call(scales, fast), decided(library)
    for with_bias in (False, True):
        for _ in range(6):
            a, b = operands(m, n, k, scales)
            bias = torch.randn(n, device="cuda", dtype=torch.bfloat16) if with_bias else None
            expected = by_torch(a, b, bias, fast)
            assert torch.equal(call(a, b, bias), expected), f"{m}x{n}x{k} {library.lt_counts()}"
    assert decided(library) == before + 2


@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("fast", [False, True])
def test_bits_of_float16_are_those_of_torch(scales: str, fast: bool, library: Any) -> None:
    """Where torch has such products; no kernel of this package asks for them."""

    def multiply(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
        out = torch.empty(a.shape[0], b.shape[1], device="cuda", dtype=torch.float16)
        (data, scale), kind = b.transpose, torch.float16
        torch._scaled_mm(a.data, data, a.scale, scale, bias, None, kind, fast, out=out)
        return out

    call, before = replayed(multiply), decided(library)
    try:
        multiply(*operands(2048, 512, 1024, scales))
    except RuntimeError as error:
        pytest.skip(str(error))
    for with_bias in (False, True):
        for _ in range(6):
            a, b = operands(2048, 512, 1024, scales)
            bias = torch.randn(512, device="cuda").half() if with_bias else None
            assert torch.equal(call(a, b, bias), multiply(a, b, bias)), library.lt_counts()
    assert decided(library) == before + 2


def test_tensorwise_products_are_kept(library: Any) -> None:
    """torch multiplies these by cuBLASLt alone."""
    before = library.lt_counts()
    a, b = operands(2048, 512, 1024, "tensor")
    call = kernel_call("tensor", True)
    for _ in range(3):
        call(a, b)
    found = library.lt_counts()
    assert found["kept"] == before["kept"] + 1, found["reason"]


@pytest.mark.parametrize("seed", range(6))
def test_products_by_blocks_are_kept_with_the_bits_of_torch(seed: int, library: Any) -> None:
    draw = random.Random(seed)
    m, n, k = draw.choice((4, 300, 2048, 8192)), *(draw.choice((128, 640, 2048)) for _ in "nk")
    call, before = kernel_call("block", False), library.lt_counts()
    for _ in range(6):
        a, b = operands(m, n, k, "block")
        assert torch.equal(call(a, b), by_torch(a, b, None, False)), f"{m}x{n}x{k}"
    found = library.lt_counts()
    assert found["kept"] == before["kept"] + 1, found["reason"]


@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("warm", [2, 4])
def test_graphs_before_and_after_the_comparison(scales: str, warm: int, library: Any) -> None:
    a, b = operands(300, 512, 1024, scales)
    call, before = kernel_call(scales, True), decided(library)
    for _ in range(warm):
        call(a, b)
    assert decided(library) == before + (warm > 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(a, b)
    assert decided(library) == before + (warm > 2)
    for _ in range(2):
        other, _ = operands(300, 512, 1024, scales)
        a.data.copy_(other.data)
        a.scale.copy_(other.scale)  # type: ignore[union-attr]
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        expected = by_torch(a, b, None, True)
        assert torch.equal(captured, expected) and torch.equal(call(a, b), expected)
    assert decided(library) == before + 1


def test_threads_and_streams_share_a_product(library: Any) -> None:
    call = kernel_call("row", True)
    for _ in range(2):
        call(*operands(2048, 512, 1024, "row"))
    before, found = decided(library), list[bool]()

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(20):
                a, b = operands(2048, 512, 1024, "row")
                found.append(torch.equal(call(a, b), by_torch(a, b, None, True)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80 and decided(library) == before + 1


@pytest.mark.parametrize(
    ("scales", "fast"),
    [("tensor", True), ("tensor", False), ("row", True), ("row", False), ("block", False)],
)
def test_products_are_launched_without_cublaslt(scales: str, fast: bool, library: Any) -> None:
    before, call = library.lt_counts(), kernel_call(scales, fast)
    for _ in range(4):
        a, b = operands(2048, 512, 1024, scales)
        assert torch.equal(call(a, b), by_torch(a, b, None, fast))
    found = library.lt_counts()
    assert found["captured"] == before["captured"] + 1, found["uncaptured_reason"]


def test_addresses_that_are_less_aligned_are_left_to_cublaslt(library: Any) -> None:
    """Such as rows of a larger matrix."""
    call, step = kernel_call("row", True), 7
    wide, b = operands(2048 + step, 512, 1040, "row")
    assert wide.scale is not None
    for _ in range(6):
        a = QuantizedTensor(wide.data[step:], wide.scale[step:].clone(), wide.granularity)
        assert a.data.data_ptr() % 256 and not a.data.data_ptr() % 16
        assert torch.equal(call(a, b), by_torch(a, b, None, True))
