"""Eager calls of converted layers in C++: bits and gradients of Python's, and what stays there."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lokakern
from lokakern.errors import LaunchError
from lokakern.functional import checks
from lokakern.native import NATIVE, replay
from lokakern.nn import linear
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import PLAIN, multiply_activated
from tests.support import native
from tests.support.routed_layers import (
    EAGER_ROUTES,
    ROUTES,
    ROW_KERNEL,
    K,
    N,
    layer_in,
    layer_of,
    plain_of,
    rows,
)

ACTIVATING = "cuda.activate_quantize_row"
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
OTHER = {BFLOAT16: FLOAT16, FLOAT16: BFLOAT16}


@pytest.fixture
def calls() -> Iterator[list[bool]]:
    """Whether C++ made each call."""
    with native.in_use() as module, pytest.MonkeyPatch.context() as patch:
        made: list[bool] = []

        def counted(*given: Any) -> Any:
            y = module.call_layer(*given)
            made.append(y is not None)
            return y

        patch.setattr(NATIVE, "call_layer", counted)
        yield made


def passed(layer: nn.Module, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    y.float().square().sum().backward()
    return [y.detach(), *(z.grad for z in (x, *layer.parameters()) if z.grad is not None)]


def same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


def in_python(layer: Linear, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(NATIVE, "call_layer", None)
        return passed(layer, x)


@pytest.mark.parametrize("dtype", OTHER)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "routes", [ROUTES, (PLAIN, ROUTES[1], PLAIN), (ROUTES[0], PLAIN, PLAIN), EAGER_ROUTES]
)
def test_outputs_and_gradients_have_the_bits_of_python(
    routes: tuple[str, str, str], bias: bool, dtype: torch.dtype, calls: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    layer = layer_in(dtype, routes, bias=bias)
    for x in (rows(48), rows(8), rows(48).view(3, 16, K), rows(17)):
        expected = in_python(layer, x.to(dtype), monkeypatch)
        for _ in range(4):  # Python, recorded, replayed
            assert same_bits(passed(layer, x.to(dtype)), expected)
    assert all(calls)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_overflows_float16_has_the_bits_of_python(
    where: str, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In outputs, and in gradients, whose losses are scaled."""
    layer, x = layer_in(FLOAT16).to(where), rows(128).to(where, FLOAT16)
    x[0], x[1], x[2, 3], x[3, 5] = 6e4, -6e4, torch.inf, torch.nan
    with torch.no_grad():
        layer.weight[0] = 1.0
    expected = in_python(layer, x, monkeypatch)
    y, grad_x, grad_weight, _ = expected
    assert all(gradient.isinf().any() or gradient.isnan().any() for gradient in expected)
    assert y[0, 0] == torch.inf and y[1, 0] == -torch.inf and y[2:4].isnan().all()
    assert y[4:].isfinite().all() and grad_weight.isnan().any() and not grad_x.isfinite().all()
    for _ in range(4):
        assert same_bits(passed(layer, x), expected)
    assert all(calls)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT16, torch.float32])
def test_converted_models_of_float16(
    where: str, dtype: torch.dtype, inference: bool, calls: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 16)).to(where, dtype)
    kernels = {"output": "row", "grad_input": "row", "grad_weight": "1x128"}
    lokakern.convert(model, kernels=kernels, inference=inference, dtype=FLOAT16)
    x = rows(256).to(where, dtype)
    x[0], x[1, 1] = 60000.0, torch.inf

    def called() -> list[Tensor]:
        model.zero_grad()
        is_cast = dtype is not FLOAT16
        with torch.autocast(where, FLOAT16, is_cast), torch.set_grad_enabled(not inference):
            y = model(x)
            if not inference:
                y.float().square().sum().backward()
        return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    with monkeypatch.context() as patch:
        patch.setattr(NATIVE, "call_layer", None)
        patch.setattr(NATIVE, "call_sequence", None)
        expected = called()
    monkeypatch.setattr(NATIVE, "call_sequence", None)  # so that each layer is counted
    assert expected[0].dtype is FLOAT16 and len(expected) == (1 if inference else 5)
    for _ in range(4):
        assert same_bits(called(), expected)
    assert calls == [True] * 8


@pytest.mark.parametrize("dtype", OTHER)
def test_operands_of_the_other_dtype_are_left_to_python(
    dtype: torch.dtype, calls: list[bool]
) -> None:
    """At m with kernels and without; Python decides."""
    checks.warn_once.cache_clear()
    other = OTHER[dtype]
    for m in (48, 8):
        x, layer = rows(m).to(other), layer_in(dtype)
        with pytest.raises(RuntimeError, match="dtype"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer(x)
        layer.to(other)  # and not converted for that
        assert torch.equal(layer(x), plain_of(layer)(x))
        layer = layer_in(dtype)
        layer.bias.data = layer.bias.data.to(other)
        with pytest.raises(RuntimeError, match="dtype") if m == 8 else contextlib.nullcontext():
            assert layer(x.to(dtype)).dtype is dtype  # a quantized product rounds its bias
    assert calls == [False] * 5  # and one that torch refused


@pytest.mark.parametrize("dtype", OTHER)
def test_frozen_and_held_weights(
    dtype: torch.dtype, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = layer_in(dtype)
    held = layer_in(dtype, (PLAIN, PLAIN, PLAIN), k=37)
    both = layer_in(dtype, EAGER_ROUTES, k=37)  # compiled graphs read the held weight
    for layer in (frozen, held, both):
        layer.freeze()
    assert both.is_frozen and both.is_held
    with torch.no_grad():
        for layer, given in (
            (frozen, rows()),
            (held, rows(k=37)),
            (held, rows(k=37).t().contiguous().t()),
            (both, rows(k=37)),
            (both, rows(8, k=37).t().contiguous().t()),
        ):
            x = given.to(dtype)
            with monkeypatch.context() as patch:
                patch.setattr(NATIVE, "call_layer", None)
                expected = layer(x)
            calls.clear()
            for _ in range(4):
                assert torch.equal(layer(x), expected)
            assert all(calls)
        frozen.load_state_dict({k: 2 * v for k, v in frozen.state_dict().items()})
        fresh, x = layer_in(dtype), rows().to(dtype)
        fresh.load_state_dict(frozen.state_dict())
        for _ in range(3):
            assert torch.equal(frozen(x), fresh(x))


def test_layers_that_quantize_nothing_are_linear(calls: list[bool]) -> None:
    """At m without a kernel, or at any: C++ reads less than `layer_output`, which has no 1-D x."""
    layer, plain = layer_of(ROUTES), plain_of(layer_of(ROUTES))
    for x in (rows(8), rows(8).view(2, 4, K), rows(1)[0], rows(8).requires_grad_()):
        assert torch.equal(layer(x), plain(x)) and calls.pop()
    for m in (16, 17):
        assert not torch.equal(layer(rows(m)), plain(rows(m))) and calls.pop()
    layer.take_routes((PLAIN, PLAIN, PLAIN), layer.weight)
    for x in (rows(48), rows(48)[0], rows(48).view(3, 16, K).transpose(0, 1), rows(48)[:0]):
        assert torch.equal(layer(x), plain(x)) and calls.pop()
    layer.take_routes((PLAIN, PLAIN, ROUTES[2]), layer.weight)  # FP8 in the backward pass only
    found, expected = passed(layer, rows()), passed(plain, rows())
    assert calls.pop() and torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1]) and not torch.equal(found[2], expected[2])


def test_segments_behind_a_kernel_and_held_weights(calls: list[bool]) -> None:
    above = f"row;16:0=,32={ROW_KERNEL},64=;1:0="
    layer, plain = layer_of((above, PLAIN, PLAIN)), plain_of(layer_of())
    for m, is_plain in ((16, True), (32, False), (64, True), (333, True)):
        assert torch.equal(layer(rows(m)), plain(rows(m))) is is_plain
    held = layer_of((PLAIN, PLAIN, PLAIN), k=37)
    held.freeze()
    held.held_weight.zero_()
    with torch.no_grad():
        assert not (held(rows(k=37).t().contiguous().t()) - held.bias).any()
    assert all(calls)


def test_linear_layers_take_parameters_as_python_does(calls: list[bool]) -> None:
    layer, x = layer_of((PLAIN, PLAIN, PLAIN)), rows()
    expected, doubled = layer(x), 2 * layer.weight.detach()
    nn.utils.parametrize.register_parametrization(layer, "weight", _Double())
    assert torch.equal(layer(x), nn.functional.linear(x, doubled, layer.bias))
    assert calls == [True, False]
    nn.utils.parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    assert torch.equal(layer(x), expected)
    swapped = {"weight": doubled, "bias": None}
    found = torch.func.functional_call(layer, swapped, (x,))
    assert torch.equal(found, nn.functional.linear(x, doubled))
    vars(layer)["weight"] = doubled  # hides the parameter
    assert torch.equal(layer(x), nn.functional.linear(x, doubled, layer.bias))
    assert calls[-1] is False
    del vars(layer)["weight"]
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            seen.append(call)
            return call(*args, **(kwargs or {}))

    with Mode():
        layer(x)
    assert seen == [nn.functional.linear]
    with pytest.raises(RuntimeError, match="shape"):
        layer(rows(k=K + 16))
    del layer.bias
    with pytest.raises(AttributeError, match="bias"):
        layer(x)


def test_a_class_may_have_a_weight_of_its_own(calls: list[bool]) -> None:
    class Own(Linear):
        @property
        def weight(self) -> Tensor:
            return 2 * self._parameters["weight"]

    layer = layer_of((PLAIN, PLAIN, PLAIN))
    expected = nn.functional.linear(rows(), 2 * layer.weight, layer.bias)
    layer.__class__ = Own
    assert torch.equal(layer(rows()), expected) and calls == [False]


def test_dtypes_without_a_kernel_are_told_at_any_m(calls: list[bool]) -> None:
    checks.warn_once.cache_clear()
    layer = layer_of(ROUTES, dtype=torch.float32)
    with pytest.raises(RuntimeError), pytest.warns(match="run the model under torch.autocast"):
        layer(rows(8))
    layer = layer_of(ROUTES)
    with torch.autocast("cpu", torch.float16):
        layer(rows(8))
    assert calls == [False, False]


class _Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_small_unusual_calls_stay_in_python(calls: list[bool]) -> None:
    layer, x = layer_of(ROUTES), rows(8)

    class Sub(Tensor):
        pass

    nested = torch.nested.nested_tensor([x, x])
    for call in (
        lambda: layer(x.as_subclass(Sub)),
        lambda: layer(nested),
        lambda: torch.func.vmap(layer)(x.view(2, 4, K)),
        lambda: torch.jit.trace(layer, x, check_trace=False),
        lambda: layer(x[:0]),
    ):
        calls.clear()
        call()
        assert calls and not any(calls), call


@pytest.mark.parametrize("dtype", OTHER)
def test_second_derivatives_are_those_of_linear(dtype: torch.dtype, calls: list[bool]) -> None:
    layer = layer_in(dtype)
    x, gradient = (y.to(dtype).requires_grad_() for y in (rows(), rows(k=N, seed=2)))
    results = []
    for call in (layer, plain_of(layer)):
        leaves = (x, *call.parameters())
        first = torch.autograd.grad(call(x), leaves, gradient, create_graph=True)
        total = sum((g.float().square().sum() for g in first), torch.zeros(()))
        results.append([*first, *torch.autograd.grad(total, (*leaves[:2], gradient))])
    assert all(map(torch.equal, *results)) and calls == [True]


def test_changed_weights_are_refused_in_the_backward_pass(calls: list[bool]) -> None:
    layer = layer_of(ROUTES)
    y = layer(rows().requires_grad_())
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert all(calls)


def test_hooks_and_checkpoints_work(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(ROUTES)
    expected = in_python(layer, rows(), monkeypatch)
    found = passed(nn.Sequential(layer), rows())
    assert all(map(torch.equal, found, expected))
    x = rows().requires_grad_()
    layer.zero_grad()
    checkpoint(layer, x, use_reentrant=False).float().square().sum().backward()
    assert torch.equal(x.grad, expected[1])
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        layer(rows().requires_grad_()).sum().backward()
    assert len(packed) == 2 and all(calls)


def test_unusual_calls_stay_in_python(calls: list[bool]) -> None:
    layer = layer_of(ROUTES)
    x = rows()

    class Sub(Tensor):
        pass

    def under_tangents() -> None:
        with forward_ad.dual_level():
            layer(forward_ad.make_dual(x, torch.ones_like(x)))

    unusual = [
        lambda: layer(x.as_subclass(Sub)),
        lambda: layer(x, "0.02"),
        lambda: torch.func.vmap(layer)(x.view(3, 16, K)),
        lambda: torch.func.grad(lambda y: layer(y).float().sum())(x),
        lambda: torch.jit.trace(layer, x, check_trace=False),
        lambda: layer(x.view(3, 16, K).transpose(0, 1)),
        lambda: layer(x[:0]),
        lambda: copy.deepcopy(layer).to("meta")(x.to("meta")),
        under_tangents,
    ]
    for call in unusual:
        calls.clear()
        call()
        assert not any(calls), call
    calls.clear()
    with pytest.raises(RuntimeError, match="shape"):
        layer(rows(k=K + 16))
    assert calls == [False]


def test_profilers_see_the_ops_of_replays(calls: list[bool]) -> None:
    layer, x, names = layer_of(ROUTES), rows().requires_grad_(), []
    for _ in range(4):
        with torch.profiler.profile() as profile:
            layer(x).sum().backward()
            lokakern.quantize(x.detach())
        names.append(sorted(e.name for e in profile.events() if e.name.startswith("lokakern")))
    expected = ["lokakern.quantize", "lokakern::routed_gemm", "lokakern::routed_gemm",
                "lokakern::weight_gradient"]  # fmt: skip
    assert all(calls) and names[-1] == expected


def test_a_default_device_leaves_calls_in_cpp(calls: list[bool]) -> None:
    layer = layer_of(ROUTES)
    with torch.device("cpu"):
        for _ in range(3):
            layer(rows())
    assert calls == [True] * 3


def test_a_new_choice_is_followed(calls: list[bool]) -> None:
    layer = layer_of(ROUTES)
    plain = nn.functional.linear(rows(), layer.weight, layer.bias)
    for _ in range(3):
        quantized = layer(rows())
    layer.take_routes((PLAIN, PLAIN, PLAIN), layer.weight)
    assert torch.equal(layer(rows()), plain) and not torch.equal(quantized, plain)
    layer.take_routes(ROUTES, layer.weight)
    assert torch.equal(layer(rows()), quantized)


def test_equal_plans_are_described_once(calls: list[bool]) -> None:
    """As of a conversion whose layers change in each step, see `Conversion.weights_unchanged`."""
    layer, x, described = layer_of(ROUTES), rows(), []
    layer.take_routes((ROUTES[0], PLAIN, ROUTES[2]), layer.weight)

    def describe(plan: str) -> Any:
        described.append(plan)
        return linear.described(plan)

    for _ in range(3):
        layer.changed()
        assert NATIVE.call_layer is not None and NATIVE.call_layer(layer, x, describe) is not None
    assert len(described) <= 1  # none if another test did


def test_routes_in_use_stay_where_threads_describe_a_plan_at_once(calls: list[bool]) -> None:
    layer, x = layer_of(ROUTES), rows()
    layer.take_routes((PLAIN, PLAIN, ROUTES[2]), layer.weight)
    layer._plan = "".join([layer._plan, "\0"])  # that no other test has
    found = []

    def describe(plan: str) -> Any:  # as if another thread ran here
        if not found:
            found.append(None)
            found[0] = NATIVE.call_layer(layer, x, lambda _: None)
        return linear.described(layer_of(ROUTES)._plan)

    assert NATIVE.call_layer is not None
    assert NATIVE.call_layer(layer, x, describe) is None and found == [None]
    assert calls == [False, False]


def test_autocast_changes_nothing_in_replays(
    calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded with and without autocast, replayed with and without."""
    for layer in (layer_of(ROUTES), layer_of(ROUTES, n=64)):
        expected = in_python(layer, rows(), monkeypatch)
        for is_cast in (layer.out_features == 64, True, False, True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                assert all(map(torch.equal, passed(layer, rows()), expected))
    with torch.autocast("cpu", torch.float16):
        calls.clear()
        layer(rows())
        assert calls == [False]


def test_tensors_of_a_call_stay_where_a_thread_replaces_them(calls: list[bool]) -> None:
    layer, x = layer_of((ROUTES[0], PLAIN, PLAIN)), rows()
    layer.freeze()
    activating = f"row;16:0={ACTIVATING};1:0={ACTIVATING}  "  # that no other test has
    with torch.no_grad():
        expected = multiply_activated(
            x, "relu", activating.strip(), *linear._frozen(layer), layer.bias, ROUTES[0]
        )
        assert NATIVE.call_layer is not None

        def find(*_: Any) -> str:  # as if another thread ran here
            layer.thaw()
            layer.weight, layer.bias = (
                nn.Parameter(torch.zeros_like(p)) for p in layer.parameters()
            )
            layer.freeze()
            return ACTIVATING

        found = NATIVE.call_layer(layer, x, linear.described, "relu", activating, find)
        assert expected is not None and torch.equal(found, expected)
        assert not layer.fp8_data.any()


def test_modes_of_a_backward_pass_see_its_ops(calls: list[bool]) -> None:
    layer, seen = layer_of(ROUTES), []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            seen.append(str(op))
            return op(*args, **(kwargs or {}))

    for _ in range(3):
        y = layer(rows().requires_grad_())
        seen.clear()
        with Mode():
            y.sum().backward()
        assert {"lokakern.weight_gradient.default", "lokakern.routed_gemm.default"} <= {*seen}
    assert all(calls)


def test_autocast_does_not_change_a_replay(calls: list[bool]) -> None:
    layer = layer_of(ROUTES)
    expected = passed(layer, rows())
    for is_cast in (False, False, True, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            assert all(map(torch.equal, passed(layer, rows()), expected))
    assert all(calls)


def test_failed_launches_are_named_so(calls: list[bool]) -> None:
    """The plan of another call, which fails, stands for one whose launch does."""
    layer, other = (layer_of((ROUTES[0], PLAIN, PLAIN), bias=bias) for bias in (True, False))
    with torch.no_grad():
        with replay.keeping() as kept:
            for _ in range(3):
                layer(rows())
                other(rows())
        (signature, _), (_, plan) = kept.calls.items()
        NATIVE.module.install(signature, plan.text(), 0, False, [], None)
        with pytest.raises(LaunchError, match="a plan for 2 tensors was given 3"):
            layer(rows())
    assert len(calls) == 6 and all(calls)


def test_failed_launches_in_a_backward_pass_are_named_so(calls: list[bool]) -> None:
    layer, x = layer_of(ROUTES), rows()
    with replay.keeping() as kept:
        for _ in range(3):
            layer(x.clone().requires_grad_()).sum().backward()
    (_, plan), *_ = kept.calls.items()
    (backward,) = (s for s in kept.calls if b"weight_gradient" in s)
    NATIVE.module.install(backward, plan.text(), 0, False, [], None)
    y = layer(x.clone().requires_grad_())
    with pytest.raises(LaunchError, match="a plan for 3 tensors was given 2"):
        y.sum().backward()


class _OnGpu(Tensor):
    is_cuda = True


def test_a_layer_without_kernels_at_m_asks_for_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """No op that asks runs there."""
    native_state = replay._Native()
    asked: list[bool] = []
    monkeypatch.setattr(linear, "NATIVE", native_state)
    monkeypatch.setattr(native_state, "_begin", lambda: asked.append(True))
    layer, x = layer_of(ROUTES), rows(8)
    layer(x)
    assert not asked
    for _ in range(2):
        layer(x.as_subclass(_OnGpu))
    assert asked == [True]
    native_state._lock.acquire()  # which later calls do not wait for
    native_state.ask()
