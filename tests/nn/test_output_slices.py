"""Products and chains that write to columns of the concatenation that reads them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from lokakern.nn import graph_passes, inductor
from lokakern.nn.routed_matmul import PLAIN, in_dtype, route_text, switched, turn
from lokakern.sampled_check import Marker
from lokakern.types import ErrorBudget, Granularity
from tests.nn.test_routed_chain import chained, model_of
from tests.support.routed_layers import BY_ROW, K, layer_of, rows

BY_LIBRARY = route_text(Granularity.ROW, *[[(0, "cuda.quantize_row+torch.scaled_mm_row")]] * 2)
CHECKED = Marker("1:4").mark(BY_ROW, ErrorBudget(row_err=0.06), "here")
Call = Callable[..., Any]


def compiled(call: Call, *inputs: Tensor, dynamic: bool = False) -> tuple[Any, int, int]:
    """The result, how many calls write to slices, and the number of Inductor's kernels."""
    torch._dynamo.reset()
    made = torch.compile(call, fullgraph=True, dynamic=dynamic)
    with torch._inductor.config.patch(force_disable_caches=True):
        found, (code,) = run_and_get_code(made, *inputs)
    slices = set(re.findall(r"\n +(buf\d+) = reinterpret_tensor\(buf\d+,.* # alias", code))
    written = re.findall(r"lokakern_\w+_into\(.*, out=(buf\d+)\)", code)
    assert set(written) <= slices
    return found, len(written), code.count("async_compile.cpp_pybinding(")


def layer(n: int = 40, route: str = BY_ROW, k: int = K, **options: Any) -> Any:
    return layer_of((route, PLAIN, PLAIN), n, k, **options).requires_grad_(False)


def check(call: Call, *inputs: Tensor, slices: int, kernels: int, dynamic: bool = False) -> None:
    with torch.no_grad():
        found, *counts = compiled(call, *inputs, dynamic=dynamic)
        expected = call(*inputs)
    many = expected if isinstance(expected, tuple) else (expected,)
    found = found if isinstance(found, tuple) else (found,)
    assert all(map(torch.equal, found, many)) and counts == [slices, kernels]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_layers_write_to_their_columns(half: torch.dtype) -> None:
    route = in_dtype(BY_ROW, half)
    first, second = layer(dtype=half, route=route), layer(64, route, bias=False, dtype=half)
    x, y = rows().to(half), rows(seed=2).to(half)
    check(lambda x, y: torch.cat([first(x), second(y)], -1), x, y, slices=2, kernels=0)


def test_others_read_the_concatenation() -> None:
    """Also a layer that quantizes it, and two that quantize it in one form."""
    first, second, third, fourth = layer(), layer(64), layer(32, k=104), layer(64, k=104)

    def read_by(*readers: Call) -> Call:
        def call(x: Tensor) -> Any:
            y = torch.cat([first(x), second(x)], 1)
            return tuple(reader(y) for reader in readers)

        return call

    weight = torch.randn(104, 8).bfloat16()
    for call, kernels in [
        (read_by(torch.relu, lambda y: y @ weight), 1),
        (read_by(third), 0),
        (read_by(third, fourth), 0),
    ]:
        check(call, rows(), slices=2, kernels=kernels)


def test_a_chain_and_a_product_of_torch_are_beside_a_layer() -> None:
    first, chain, plain = layer(), chained(model_of()[:5]), nn.Linear(K, 24).bfloat16()
    check(lambda x: torch.cat([plain(x), chain(x), first(x)], 1), rows(), slices=2, kernels=0)


def test_relus_before_a_concatenation_are_computed_by_products() -> None:
    """Also a relu behind it, which Inductor moves to its parts."""
    first, second = layer(), layer(64, bias=False)
    graph_passes.install_passes()
    for call in (
        lambda x: torch.cat([first(x).relu(), second(x).relu()], 1),
        lambda x: torch.cat([first(x), second(x)], 1).relu(),
        lambda x: torch.cat([first(x).relu(), second(x)], -1),
    ):
        check(call, rows(), slices=2, kernels=0)


def test_an_input_beside_a_layer_is_copied() -> None:
    """Where the concatenation has to be written anyway."""
    first, weight, x = layer(), torch.randn(40 + K, 8).bfloat16(), rows()
    check(lambda x: torch.cat([first(x), x], 1), x, slices=1, kernels=1)
    check(lambda x: torch.cat([x.relu(), first(x)], 1) @ weight, x, slices=1, kernels=1)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("call", "n", "route"),
    [
        (lambda y, x: torch.cat([y, x], 1).exp(), 40, BY_ROW),  # one kernel computes both
        (lambda y, x: torch.cat([y, x, x + 1], 1), 40, BY_ROW),  # which two would copy
        (lambda y, x: torch.cat([y, x[:, :40]]), 40, BY_ROW),
        (lambda y, x: torch.cat([y.view(6, 8, 40), x.view(6, 8, K)], 2), 40, BY_ROW),
        (lambda y, x: torch.cat([y, y], 1), 40, BY_ROW),
        (lambda y, x: (torch.cat([y, x], 1), y.relu()), 40, BY_ROW),
        (lambda y, x: torch.cat([y, x.float()], 1), 40, BY_ROW),
        (lambda y, x: torch.cat([y, x], 1), 44, BY_ROW),  # 88 bytes
        (lambda y, x: torch.cat([x[:, :4], y], 1), 40, BY_ROW),  # begins at 8 bytes
        (lambda y, x: torch.cat([y, x[:, :13]], 1), 40, BY_ROW),  # rows of 106 bytes
        (lambda y, x: torch.cat([y, x], 1), 24, BY_ROW),
        (lambda y, x: torch.cat([y, x], 1), 48, BY_LIBRARY),
        (lambda y, x: torch.cat([y, x], 1), 40, CHECKED),
    ],
    ids=["pointwise", "three", "rows", "tokens", "twice", "two-readers", "float32", "odd", "begin",
         "pitch", "narrow", "library", "checked"],
)  # fmt: skip
def test_other_outputs_are_tensors_of_their_own(call: Call, n: int, route: str) -> None:
    made = layer(n, route)
    x = rows()
    with torch.no_grad():
        found, slices, _ = compiled(lambda x: call(made(x), x), x)
        expected = call(made(x), x)
    assert slices == 0
    for one, other in zip(*(y if isinstance(y, tuple) else (y,) for y in (found, expected)),
                          strict=True):  # fmt: skip
        assert torch.equal(one, other)


def test_dynamic_sizes_and_rows_without_kernels_have_no_slices() -> None:
    first, second = layer(), layer(64)

    def call(x: Tensor) -> Tensor:
        return torch.cat([first(x), second(x)], 1)

    check(call, rows(), slices=0, kernels=1, dynamic=True)
    check(call, rows(8), slices=0, kernels=0)  # products of torch


def test_training_is_as_it_was() -> None:
    first, second = (layer(n).requires_grad_() for n in (40, 64))
    codes = []
    torch._dynamo.reset()
    call = torch.compile(lambda x: torch.cat([first(x), second(x)], 1), dynamic=False)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: call(rows()).float().sum().backward())
    assert len(codes) == 2 and not any("_into" in code for code in codes)
    assert "lokakern_routed_gemm(" in codes[0]


def test_a_product_that_is_turned_off_writes_to_its_columns_too() -> None:
    first = layer(route=switched(BY_ROW, "sliced"))

    def call(x: Tensor) -> Tensor:
        return torch.cat([first(x), x], 1)

    made = torch.compile(call, fullgraph=True, dynamic=False)
    with torch.no_grad():
        x = rows()
        quantized = made(x)
        turn(["sliced"], False)
        try:
            plain = made(x)
        finally:
            turn(["sliced"], True)
    assert torch.equal(plain[:, :40], nn.functional.linear(x, first.weight, first.bias))
    assert not torch.equal(plain, quantized) and torch.equal(made(x), quantized)


def test_calls_are_those_of_a_package_while_plans_are_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, x, out = layer(), rows(), torch.zeros(48, 104, dtype=torch.bfloat16)
    given = (x, first.weight.t(), None, None, first.bias, BY_ROW, None, None, "", False)
    calls = []
    monkeypatch.setattr(inductor, "is_keeping", lambda: True)
    monkeypatch.setattr(torch.ops.lokakern, "routed_gemm_into", lambda *given: calls.append(given))
    inductor.routed_gemm_into(*given, out=out[:, 64:])
    assert torch.equal(out[:, 64:], first(x)) and not out[:, :64].any() and not calls


@pytest.mark.gpu
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_on_a_gpu_nothing_is_copied(half: torch.dtype) -> None:
    """By calls in Python, recorded and replayed ones, with the bits of separate outputs."""
    calls: list[Call] = [
        layer(n, in_dtype(BY_ROW, half), 512, dtype=half).cuda() for n in (256, 776)
    ]
    if half is torch.bfloat16:
        narrow, chain = layer(K, k=512).cuda(), chained(model_of()[:5].cuda())
        calls.append(lambda x: chain(narrow(x)))

    def call(x: Tensor) -> Tensor:
        return torch.cat([run(x) for run in calls], 1)

    torch._dynamo.reset()
    made = torch.compile(call, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for seed in range(4):
            x = rows(256, 512, seed).cuda().to(half)
            assert torch.equal(made(x), call(x))
        with torch.profiler.profile() as found:
            made(x)
    names = [event.name for event in found.events()]
    assert "lokakern::routed_gemm_into" in names and not any("triton_" in x for x in names)
