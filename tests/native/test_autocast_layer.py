"""Eager calls of converted layers under autocast in C++: bits and gradients of Python's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lokakern.errors import UnsupportedError
from lokakern.native import NATIVE
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import PLAIN, in_dtype, route_text
from tests.support import native
from tests.support.routed_layers import (
    BLOCK,
    BLOCK_KERNEL,
    BY_GROUP,
    BY_ROW,
    ROUTE,
    ROUTES,
    K,
    N,
    layer_of,
    rows,
)  # fmt: skip

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
BY_BLOCK = route_text(BLOCK, [(0, ""), (16, BLOCK_KERNEL)], [(0, "")])
ACTIVATOR = "cuda.activate_quantize_row"
ACTIVATING = f"row;16:0={ACTIVATOR};1:0={ACTIVATOR}"
REPEATS = 3  # in Python, recorded, replayed
Found = list[Any]  # tensors, and words about the rest


@dataclass(frozen=True)
class Case:
    """One layer, its input, and what requires a gradient."""

    routes: tuple[str, str, str] = ROUTES
    m: int = 48
    shape: str = "rows"
    x: torch.dtype = FLOAT32
    weight: torch.dtype = FLOAT32
    bias: torch.dtype | None = FLOAT32
    needs: tuple[bool, bool, bool] = (True, True, True)
    is_cached: bool = True
    device: str = "cpu"
    half: torch.dtype = BFLOAT16

    @property
    def is_for_python(self) -> bool:
        """Whether C++ leaves a call with a kernel to Python."""
        is_mixed = self.half is FLOAT16 and BFLOAT16 in (self.x, self.weight, self.bias)
        is_mixed = is_mixed or (self.half is BFLOAT16 and self.weight is FLOAT16)
        return is_mixed or (self.shape == "turned samples" and not self.input().is_contiguous())

    def layer(self) -> Linear:
        first, second, third = (in_dtype(route, self.half) for route in self.routes)
        made = layer_of((first, second, third), bias=self.bias is not None, dtype=self.weight)
        if self.bias is not None:
            made.bias = nn.Parameter(made.bias.detach().to(self.bias))
        for parameter, needs in zip(made.parameters(), self.needs[1:], strict=False):
            parameter.requires_grad_(needs)
        return made.to(self.device)

    def input(self, seed: int = 1) -> Tensor:
        x = rows(self.m, 2 * K, seed).to(self.device, self.x)
        if self.shape == "rows":
            x = x[:, :K].clone()
        elif self.shape == "slice":
            x = x[:, K:]
        elif self.shape == "columns":
            x = x[:, :K].t().clone().t()
        else:
            x = x[:, :K].clone().view(-1, 2 if self.m % 2 == 0 else 1, K)
            x = x.transpose(0, 1) if self.shape == "turned samples" else x
        return x.detach().requires_grad_(self.needs[0])

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, self.half, cache_enabled=self.is_cached)


def leaves_of(layer: Linear, *inputs: Tensor) -> list[Tensor]:
    return [x for x in (*inputs, *layer.parameters()) if x.requires_grad]


def tried(call: Callable[[], Any]) -> Found:
    """The results, or the kind and beginning of the error."""
    try:
        found = call()
    except (RuntimeError, UnsupportedError) as error:
        return [type(error).__name__, str(error)[:60]]
    return [*found] if isinstance(found, list | tuple) else [found]


def differentiated(y: Tensor, leaves: list[Tensor], seed: int = 2, **options: Any) -> Found:
    """The output's gradient with respect to the leaves, by `torch.autograd.grad`."""
    if not leaves:
        return [y.requires_grad]
    gradient = rows(y.numel() // N, N, seed).view_as(y).to(y)
    return tried(lambda: torch.autograd.grad(y, leaves, gradient, **options))


def backward(y: Tensor, leaves: list[Tensor], seed: int = 2, **options: Any) -> Found:
    """The output and what its backward pass leaves in ``.grad``."""
    if not leaves:
        return [y, y.requires_grad]
    y.backward(rows(y.numel() // N, N, seed).view_as(y).to(y.device), **options)
    return [y.detach(), *(leaf.grad.clone() for leaf in leaves if leaf.grad is not None)]


def step(case: Case, layer: Linear) -> Found:
    x = case.input()
    with case.autocast():
        y = layer(x)
    return backward(y, leaves_of(layer, x))


def step_inside(case: Case, layer: Linear) -> Found:
    """The backward pass under autocast."""
    x = case.input()
    with case.autocast():
        return backward(layer(x), leaves_of(layer, x))


def two_calls(case: Case, layer: Linear) -> Found:
    """In one graph, and the sum of them in `.grad`, then a second step on top of it."""
    x, other = case.input(), case.input(seed=3)
    leaves = leaves_of(layer, x, other)
    found: Found = []
    for seed in (2, 4):
        with case.autocast():
            y = layer(x) + 2 * layer(other)
        found += backward(y, leaves, seed)
    return found


def retained(case: Case, layer: Linear) -> Found:
    x = case.input()
    with case.autocast():
        y = layer(x)
    leaves = leaves_of(layer, x)
    return [
        *backward(y, leaves, retain_graph=True),
        *backward(y, leaves, 3, retain_graph=False),
        *differentiated(y, leaves),  # whose graph is gone
    ]


def each_alone(case: Case, layer: Linear) -> Found:
    x = case.input()
    with case.autocast():
        y = layer(x)
    leaves = leaves_of(layer, x)
    return [g for leaf in leaves for g in differentiated(y, [leaf], retain_graph=True)]


def second_derivatives(case: Case, layer: Linear) -> Found:
    x = case.input()
    leaves = leaves_of(layer, x)
    with case.autocast():
        y = layer(x)
    first = differentiated(y, leaves, create_graph=True)
    if not leaves or not y.requires_grad:
        return first
    total = torch.stack([g.float().square().sum() for g in first]).sum()
    if not total.requires_grad:
        return first
    return [*first, *torch.autograd.grad(total, leaves, allow_unused=True)]


def changed(case: Case, layer: Linear) -> Found:
    """The weight changes between the passes."""
    x = case.input()
    with case.autocast():
        y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2.0)
    leaves = leaves_of(layer, x)
    return [
        *differentiated(y, leaves, create_graph=True),
        *differentiated(y, leaves, retain_graph=True),
    ]


def changed_unseen(case: Case, layer: Linear) -> Found:
    """It changes through ``data``, which does not change its version."""
    x = case.input()
    with case.autocast():
        y = layer(x)
    layer.weight.data.mul_(2.0)
    leaves = leaves_of(layer, x)
    return [
        *differentiated(y, leaves, create_graph=True),
        *differentiated(y, leaves, retain_graph=True),
    ]


def without_gradients(case: Case, layer: Linear) -> Found:
    with torch.no_grad(), case.autocast():
        first = layer(case.input())
    with torch.inference_mode(), case.autocast():
        return [first, first.requires_grad, layer(case.input()).clone()]


def on_inference_tensors(case: Case, layer: Linear) -> Found:
    with torch.inference_mode():
        x = case.input().clone()
    with case.autocast():
        return tried(lambda: backward(layer(x), leaves_of(layer)))


def of_an_inference_weight(case: Case, layer: Linear) -> Found:
    """It has no version."""
    x = case.input()
    with torch.inference_mode():
        layer.weight = nn.Parameter(layer.weight.clone(), requires_grad=False)

    def passed() -> Found:
        with case.autocast():
            y = layer(x)
        leaves = leaves_of(layer, x)
        return [
            y.detach(),
            *differentiated(y, leaves, create_graph=True),
            *differentiated(y, leaves, retain_graph=True),
        ]

    return tried(passed)


def of_a_computed_weight(case: Case, layer: Linear) -> Found:
    """It is no leaf."""
    x = case.input()
    leaves = leaves_of(layer, x)
    with case.autocast():
        weight = 2 * layer.weight + 1
        y = torch.func.functional_call(layer, {"weight": weight}, x)
    return [
        *differentiated(y, leaves, create_graph=True, allow_unused=True),
        *backward(y, leaves),
    ]


def with_regions_inside(case: Case, layer: Linear) -> Found:
    x = case.input()
    with case.autocast():
        first = layer(x)
        with torch.autocast(case.device, enabled=False):
            between = tried(lambda: layer(x))
        with torch.autocast(case.device, FLOAT16 if case.half is BFLOAT16 else BFLOAT16):
            other = tried(lambda: layer(x).detach())  # the cache has the layer's dtype
        y = first + layer(x)
    return [*between, *other, *backward(y, leaves_of(layer, x))]


def recomputed(case: Case, layer: Linear) -> Found:
    x = case.input()
    leaves = leaves_of(layer, x)
    with case.autocast():
        y = checkpoint(layer, x, use_reentrant=False)
    return backward(y, leaves)


def packed(case: Case, layer: Linear) -> Found:
    """What is saved for the backward pass, and read by it."""
    x, seen = case.input(), []

    def pack(saved: Tensor) -> Tensor:
        seen.append((saved.dtype, tuple(saved.shape), saved.is_leaf))
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved), case.autocast():
        y = layer(x)
    return [*seen, *backward(y, leaves_of(layer, x))]


def hooked(case: Case, layer: Linear) -> Found:
    x, seen = case.input(), []
    leaves = leaves_of(layer, x)
    for leaf in leaves:
        leaf.register_hook(lambda g: seen.append(g.dtype) or 2 * g)
        leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.dtype))
    with case.autocast():
        y = layer(x)
    return [*backward(y, leaves), *seen]


WAYS: tuple[Callable[[Case, Linear], Found], ...] = (
    step, step_inside, two_calls, retained, each_alone, second_derivatives, changed, changed_unseen,
    without_gradients, on_inference_tensors, of_an_inference_weight, of_a_computed_weight,
    with_regions_inside, recomputed, packed, hooked,
)  # fmt: skip
# Where some call is not under autocast to the layer's dtype, or may get nothing to multiply.
NOT_ALL_IN_CPP = (with_regions_inside,)


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    return isinstance(b, Tensor) and a.dtype is b.dtype and torch.equal(a, b)


@contextlib.contextmanager
def counted() -> Iterator[list[bool]]:
    """Whether C++ made each call."""
    with native.in_use() as module:
        made: list[bool] = []

        def call(*given: Any) -> Any:
            made.append(True)  # also a call that raises
            y = module.call_layer(*given)
            made[-1] = y is not None
            return y

        NATIVE.call_layer = call  # the outer block restores it
        yield made


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    own, NATIVE.call_layer = NATIVE.call_layer, None
    try:
        yield
    finally:
        NATIVE.call_layer = own


def compare(case: Case, way: Callable[[Case, Linear], Found]) -> None:
    with counted() as made:
        with in_python():
            expected = way(case, case.layer())
        for _ in range(REPEATS):
            found = way(case, case.layer())
            assert len(found) == len(expected), (found, expected)
            for a, b in zip(found, expected, strict=True):
                assert same(a, b), (a, b)
        if case.is_for_python:
            assert not any(made) or case.m != 48  # others may have no kernel, and are nn.Linear's
        elif way not in NOT_ALL_IN_CPP:
            assert all(made) and made


CASES = st.builds(
    Case,
    routes=st.tuples(
        st.sampled_from([BY_ROW, PLAIN, BY_BLOCK]),
        st.sampled_from([BY_ROW, PLAIN, BY_BLOCK]),
        st.sampled_from([BY_GROUP, PLAIN]),
    ).filter(any),
    m=st.sampled_from([48, 17, 8, 1]),
    shape=st.sampled_from(["rows", "slice", "columns", "samples", "turned samples"]),
    x=st.sampled_from([FLOAT32, FLOAT16, BFLOAT16]),
    weight=st.sampled_from([FLOAT32, FLOAT32, BFLOAT16, FLOAT16]),
    bias=st.sampled_from([FLOAT32, None, BFLOAT16, FLOAT16]),
    needs=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    is_cached=st.booleans(),
    half=st.sampled_from([BFLOAT16, FLOAT16]),
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@settings(max_examples=5)  # beside those below, others each time
@given(case=CASES)
@example(case=Case())
@example(case=Case(needs=(False, True, True)))
@example(case=Case(routes=(BY_ROW, PLAIN, BY_GROUP)))
@example(case=Case(routes=(PLAIN, BY_ROW, PLAIN)))
@example(case=Case(routes=(PLAIN, PLAIN, BY_GROUP), x=BFLOAT16, bias=None))
@example(case=Case(routes=(BY_BLOCK, PLAIN, PLAIN), needs=(False, False, False)))
@example(case=Case(m=8))
@example(case=Case(routes=(BY_ROW, BY_BLOCK, PLAIN), m=17))  # no kernel for the gradient
@example(case=Case(weight=BFLOAT16, shape="samples"))
@example(case=Case(x=BFLOAT16, shape="samples"))  # the order of gradients
@example(case=Case(half=FLOAT16))
@example(case=Case((BY_ROW, PLAIN, BY_GROUP), half=FLOAT16))
@example(case=Case((PLAIN, BY_ROW, PLAIN), weight=FLOAT16, bias=FLOAT16, half=FLOAT16))
@example(case=Case(m=8, x=FLOAT16, shape="samples", half=FLOAT16))
@example(case=Case(x=BFLOAT16, half=FLOAT16))  # Python's
def test_calls_under_autocast_have_the_bits_of_python(
    way: Callable[[Case, Linear], Found], case: Case
) -> None:
    compare(case, way)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("routes", [ROUTES, (BY_ROW, PLAIN, BY_GROUP), (PLAIN, BY_ROW, PLAIN)])
@pytest.mark.parametrize("half", [BFLOAT16, FLOAT16])
def test_a_gpu_has_the_bits_of_python(
    half: torch.dtype, routes: tuple[str, str, str], way: Callable[[Case, Linear], Found]
) -> None:
    for case in (
        Case(routes, m=128),
        Case(routes, m=128, x=half, shape="samples", needs=(False, True, True)),
        Case(routes, m=17, bias=None),
        Case(routes, m=128, x=half, weight=half, bias=half),
    ):
        compare(replace(case, device="cuda", half=half), way)


@pytest.mark.parametrize("half", [BFLOAT16, FLOAT16])
def test_frozen_and_held_weights(half: torch.dtype) -> None:
    frozen, other = Case(half=half).layer(), Case(bias=half, half=half).layer()
    held = layer_of((PLAIN, PLAIN, PLAIN), k=37, dtype=half)
    for layer in (frozen, other, held):
        layer.freeze()
    held.held_weight.mul_(2.0)  # so that it is not the weight
    calls = [
        (layer, rows(m, layer.in_features).to(dtype))
        for layer in (frozen, other, held)
        for m in (48, 8)
        for dtype in (FLOAT32, FLOAT16, half)
    ]
    calls.append((held, rows(k=37).float().t().contiguous().t()))
    with counted() as made, torch.no_grad(), torch.autocast("cpu", half):
        for layer, x in calls:
            with in_python():
                expected = layer(x)
            for _ in range(REPEATS):
                assert same(layer(x), expected)
        assert all(made) and len(made) == REPEATS * len(calls)
    with counted() as made, torch.autocast("cpu", half):
        frozen.requires_grad_(False)
        with in_python():
            expected = frozen(rows().float())
        assert same(frozen(rows().float()), expected) and made == [True]
        frozen.requires_grad_(True)
        frozen(rows().float())
        assert made == [True, False]


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("half", [BFLOAT16, FLOAT16])
def test_an_activated_input_is_multiplied_by_a_frozen_weight(half: torch.dtype, where: str) -> None:
    layer = layer_of((in_dtype(ROUTE, half), PLAIN, PLAIN), dtype=FLOAT32).to(where)
    layer.freeze()
    x = rows(128).to(where, half)
    x[0, 0], x[1, 0] = torch.finfo(half).max, torch.inf
    with counted() as made, torch.no_grad():
        with torch.autocast(where, half):
            with in_python():
                expected = layer.forward_activated(x, "relu", ACTIVATING)
            assert expected is not None and expected.dtype is half
            for _ in range(REPEATS):
                y = layer.forward_activated(x, "relu", ACTIVATING)
                assert y is not None and same(y.view(torch.int16), expected.view(torch.int16))
            assert made == [True] * REPEATS
            for other in (FLOAT32, BFLOAT16 if half is FLOAT16 else FLOAT16):
                assert layer.forward_activated(x.to(other), "relu", ACTIVATING) is None
            relu = layer(x.relu())
            assert same(relu.view(torch.int16), expected.view(torch.int16))
        assert layer.forward_activated(x, "relu", ACTIVATING) is None


@pytest.mark.parametrize("is_cached", [True, False])
def test_unquantized_products_cast_weights_as_autocast_does(is_cached: bool) -> None:
    """Once in each region if autocast caches; products of routes at this m are unquantized."""
    case = Case(m=8, is_cached=is_cached)
    layer, counts = case.layer(), []

    def count() -> int:
        x = case.input().detach()
        with torch.profiler.profile() as profile, case.autocast():
            for _ in range(3):
                layer(x)
        return sum(event.name == "aten::_to_copy" for event in profile.events())

    with counted() as made:
        counts = [count() for _ in range(2)]
        assert made == [True] * 6
        with in_python():
            counts.append(count())
    assert counts == [3 + 2 if is_cached else 3 * 3] * 3  # of x, and of weight and bias


def test_what_is_rare_stays_in_python() -> None:
    half = Case(weight=FLOAT16, bias=FLOAT16).layer()
    kept, gathered, assembled = (Case().layer() for _ in range(3))
    kept._kept = {}
    gathered._gathered = SimpleNamespace(is_of=lambda _: False)
    assembled.take_routes(ROUTES, None)
    checked = Case(routes=(f"{BY_ROW};check=1:4:0.9:1:site", PLAIN, PLAIN)).layer()
    x = rows().float()
    with counted() as made:
        for layer in (half, kept, gathered, assembled, checked):
            with torch.autocast("cpu", BFLOAT16):
                found = layer(x)
                with in_python():
                    assert same(found, layer(x))
        assert made == [False] * 5
        made.clear()
        with torch.autocast("cpu", FLOAT16):
            Case().layer()(x)
        with torch.autocast("cpu", enabled=False):
            Case().layer()(x)
        with torch.autocast("cpu", BFLOAT16), pytest.raises(RuntimeError):
            Case().layer()(x.double())
        assert made == [False] * 3


def test_a_changed_weight_is_named_in_second_derivatives() -> None:
    layer, x = Case().layer(), Case().input()
    with counted() as made:
        with torch.autocast("cpu", BFLOAT16):
            y = layer(x)
        with torch.no_grad():
            layer.weight.mul_(2.0)
        with pytest.raises(UnsupportedError, match=rf"its layer, \[{N}, {K}\], which was changed"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
        (first,) = torch.autograd.grad(y.sum(), x)  # of the weight that was multiplied
        assert made == [True]
    assert first.dtype is FLOAT32 and first.any()
