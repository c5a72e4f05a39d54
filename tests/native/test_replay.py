"""Warm calls are replayed with the same bits, and only calls that may be."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import lokakern
from lokakern import jit
from lokakern.errors import BudgetError
from lokakern.native import forget, replay, replayed
from lokakern.types import QuantizedTensor
from tests.support import native


@pytest.fixture
def library() -> Iterator[Any]:
    with native.in_use() as module, torch.no_grad():
        yield module


def operands(m: int = 24, n: int = 16, k: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m * n * k)
    draw = [torch.randn(shape, generator=generator) for shape in ((m, k), (n, k), (n,))]
    a, w, bias = (x.bfloat16() for x in draw)
    return a, w.t(), bias


class Counted:
    """A function that counts its calls in Python."""

    def __init__(self, function: Any) -> None:
        self.__name__ = self.__qualname__ = "counted"
        self.function, self.calls = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


def test_the_third_call_is_replayed_with_equal_bits(library: Any) -> None:
    a, b, bias = operands()
    counted = Counted(lambda a, b, bias: torch.addmm(bias, a, b))
    call = replayed(counted)
    for seed in range(5):
        x = torch.randn(a.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        assert torch.equal(call(x, b, bias=bias), torch.addmm(bias, x, b))
    assert counted.calls == 2 and library.size() == 1


def test_gemm_is_replayed_in_all_forms(library: Any) -> None:
    a, b, bias = operands()
    expected = torch.addmm(bias, a, b)
    out = torch.empty_like(expected)
    for _ in range(4):
        assert torch.equal(lokakern.gemm(a, b, bias=bias), expected)
        assert torch.equal(lokakern.gemm(bias=bias, b=b, a=a), expected)
        assert lokakern.gemm(a, b, bias=bias, out=out.zero_()) is out
        assert torch.equal(out, expected)
    assert library.size() == 3


@pytest.mark.parametrize("seed", range(4))
def test_replays_have_the_bits_of_python(seed: int, library: Any) -> None:
    draw = random.Random(seed)
    shape = [draw.choice(x) for x in ((1, 5, 16, 100), (1, 16, 100, 256), (16, 100, 300, 512))]
    assert native.compare_bits(draw, *shape, device="cpu") > 8 and library.size() > 8


def test_each_fact_of_an_operand_has_its_own_plan(library: Any) -> None:
    """Sizes, strides, alignment, identity and dtype."""
    counted = Counted(lambda a, b: a @ b)
    call = replayed(counted)
    base = torch.randn(64, 64).bfloat16()
    shifted = torch.randn(64 * 64 + 1).bfloat16()[1:].view(64, 64)
    cases = [
        (base, base), (base, base.clone()), (base, base.t()), (base[:32], base), (shifted, base),
        (base[:, :32], base[:32]), (base.float(), base.float()),
    ]  # fmt: skip
    for _ in range(3):
        for a, b in cases:
            assert torch.equal(call(a, b), a @ b)
    assert library.size() == len(cases) and counted.calls == 2 * len(cases)


def test_equal_constants_of_other_types_are_other_calls(library: Any) -> None:
    a, b, _ = operands()
    for _ in range(3):
        lokakern.gemm(a, b, budget=1.0)
    with pytest.raises(BudgetError):
        lokakern.gemm(a, b, budget=True)
    with pytest.raises(BudgetError):
        lokakern.gemm(a, b, budget=float("nan"))


def test_equal_budgets_share_a_plan(library: Any) -> None:
    counted = Counted(lambda a, b, budget: a @ b)
    call = replayed(counted)
    a, b, _ = operands()
    for _ in range(5):
        call(a, b, budget=lokakern.ErrorBudget(row_err=0.05))
    assert counted.calls == 2 and library.size() == 1


def test_results_of_python_and_of_replays_are_alike(library: Any) -> None:
    """Both make complete objects."""
    x = torch.randn(16, 32).bfloat16()
    made = [lokakern.quantize(x) for _ in range(4)]
    for found in made:
        assert torch.equal(found.data.view(torch.uint8), made[0].data.view(torch.uint8))
        assert found.t().transpose[0].shape == (32, 16)
    assert library.size() == 1


def test_quantized_results_are_put_together(library: Any) -> None:
    scale = torch.ones(16, 1)

    def make(x: Tensor, scale: Tensor) -> tuple[QuantizedTensor, Tensor, None]:
        data = torch.empty_like(x, dtype=torch.float8_e4m3fn).copy_(x)
        return QuantizedTensor(data, scale, lokakern.types.Granularity.ROW), x, None

    call = replayed(make)
    for _ in range(4):
        x = torch.randn(16, 32).bfloat16()
        quantized, same, nothing = call(x, scale)
        assert same is x and nothing is None
        assert quantized.scale is scale and quantized.source is None and not quantized.transposed
        assert torch.equal(quantized.data.float(), x.to(torch.float8_e4m3fn).float())
        assert quantized.transpose[0].stride() == (1, 32) and quantized.t().signature is not None
        assert repr(quantized) == "QuantizedTensor([16, 32], e4m3fn, row, cpu)"


def test_calls_that_torch_observes_stay_in_python(library: Any) -> None:
    a, b, _ = operands()
    counted = Counted(torch.mm)
    call = replayed(counted)
    for _ in range(3):
        call(a, b)
    assert counted.calls == 2
    with torch.enable_grad():
        assert call(a.clone().requires_grad_(), b).requires_grad
    with torch.autocast("cpu"):
        call(a.float(), b.float())
        call(a.float(), b.float())
    call(a.to("meta"), b.to("meta"))
    torch.vmap(call, (0, None))(a.expand(2, *a.shape), b)

    class Subclass(torch.Tensor):
        pass

    call(a.as_subclass(Subclass), b)
    assert counted.calls == 8


def test_tangents_of_forward_mode_are_kept(library: Any) -> None:
    """A dual tensor has the dispatch keys of a plain one."""
    a, b, _ = operands()
    call = replayed(lambda a, b: a @ b)
    for _ in range(3):
        call(a, b)
    with forward_ad.dual_level():
        product = call(forward_ad.make_dual(a, torch.ones_like(a)), b)
        assert forward_ad.unpack_dual(product).tangent is not None


def test_a_call_that_raises_is_not_recorded(library: Any) -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("no")

    call = replayed(fails)
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            call(torch.ones(2))
    assert jit.recorder is None


def test_other_memory_stays_in_python(library: Any) -> None:
    """A tensor that is no argument may be another one at the next call."""
    held = [torch.ones(4, 4).bfloat16()]
    counted = Counted(lambda x: x @ held[0])
    call = replayed(counted)
    x = torch.randn(4, 4).bfloat16()
    for _ in range(4):
        held[0] = held[0] + 1
        assert torch.equal(call(x), x @ held[0])
    assert counted.calls == 4


def test_new_choices_discard_plans(library: Any) -> None:
    a, b, _ = operands()
    for _ in range(3):
        lokakern.gemm(a, b)
    assert library.size() == 1
    forget()
    assert library.size() == 0


def test_choices_that_change_during_a_recording_are_not_recorded(library: Any) -> None:
    calls = []

    def changes(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            forget()
        return torch.mm(x, x)

    call = replayed(changes)
    for _ in range(3):
        call(torch.ones(4, 4))
    assert len(calls) == 3


def test_threads_share_plans(library: Any) -> None:
    a, b, bias = operands()
    expected = torch.addmm(bias, a, b)
    wrong = []

    def work() -> None:
        with torch.no_grad():
            for _ in range(200):
                if not torch.equal(lokakern.gemm(a, b, bias=bias), expected):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and library.size() == 1


def test_ops_without_a_library_are_made_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay.NATIVE, "replay", None)
    a, b, _ = operands()
    made = torch.ops.lokakern.gemm(a, b, None, None, None, "none/tensor", [], [], "bf16")
    assert torch.equal(made, a @ b)
