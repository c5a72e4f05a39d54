"""Warm calls are replayed with the same bits, and only calls that may be."""

from __future__ import annotations

import ctypes
import gc
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import lokakern
from lokakern import driver, jit
from lokakern.errors import BudgetError
from lokakern.native import forget, replay, replayed
from lokakern.registry import register
from lokakern.types import Granularity, QuantizedTensor
from tests.support import native

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize(("dtype", "seed"), [
    *((torch.bfloat16, seed) for seed in range(4)), *((torch.float16, seed) for seed in range(2)),
])  # fmt: skip
def test_replays_have_the_bits_of_python(dtype: torch.dtype, seed: int, library: Any) -> None:
    draw = random.Random(seed)
    shape = [draw.choice(x) for x in ((1, 5, 16, 100), (1, 16, 100, 256), (16, 100, 300, 512))]
    assert native.compare_bits(draw, *shape, "cpu", dtype) > 8 and library.size() > 8


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


def test_arguments_with_tensors_are_not_kept(library: Any) -> None:
    """A named tuple can be hashed, as constants can."""

    class Cross(NamedTuple):
        x0: Tensor
        x: Tensor

    x = torch.randn(16, 32).bfloat16()
    right = lokakern.quantize(torch.randn(16, 32)).t()
    given = [torch.randn(16, 16).bfloat16() for _ in range(4)]
    gone = [weakref.ref(y) for y in given]
    while given:
        cross = Cross(given[0], given.pop())
        lokakern.scaled_gemm(lokakern.quantize(x), right, cross=cross)
    del cross
    gc.collect()
    assert [found() for found in gone] == [None] * 4


FULL = """
import sys
import torch
from tests.support import native
with native.in_use() as library:
    x = torch.ones(1)
    for i in range(70_000):
        text = f"text {i}"
        before = sys.getrefcount(text)
        library.inputs((x, text), {})
        if i in (0, 69_999):
            print(sys.getrefcount(text) - before)
    print(len(library.inputs((x, "text " + str(1)), {})), len(library.inputs((x, text), {})))
"""


@pytest.mark.rest
def test_constants_that_never_come_back_are_not_all_kept() -> None:
    """In a process of its own, whose table is full then."""
    native.library()
    command = [sys.executable, "-c", FULL]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    first, last, found = done.stdout.splitlines()
    assert int(first) > 0 and int(last) == 0
    assert found == "1 0"  # what is kept is still known


def test_a_function_never_has_the_plans_of_one_that_is_gone(library: Any) -> None:
    """Whose address the next one would get."""
    x = torch.zeros(2)
    for added in range(20):
        call = replayed(lambda x, added=added: x.add(added))
        for _ in range(3):
            assert call(x)[0] == added
        del call


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
        return QuantizedTensor(data, scale, Granularity.ROW), x, None

    call = replayed(make)
    for _ in range(4):
        x = torch.randn(16, 32).bfloat16()
        quantized, same, nothing = call(x, scale)
        assert same is x and nothing is None
        assert quantized.scale is scale and quantized.source is None and not quantized.transposed
        assert torch.equal(quantized.data.float(), x.to(torch.float8_e4m3fn).float())
        assert quantized.transpose[0].stride() == (1, 32) and quantized.t().signature is not None
        assert repr(quantized) == "QuantizedTensor([16, 32], e4m3fn, row, cpu)"


def test_views_of_arguments_are_no_arguments(library: Any) -> None:
    """A result has no gradient of the argument's, and writes to it are seen in the argument."""
    weight = torch.nn.Parameter(torch.ones(4))
    call = replayed(lambda x: x.detach())
    for _ in range(4):
        made = call(weight)
        assert made is not weight and not made.requires_grad
        version = weight._version
        made.add_(1)
        assert weight._version == version + 1
    assert weight[0] == 5 and library.size() == 1
    with torch.enable_grad():
        (made * weight).sum().backward()
    assert weight.grad is not None and weight.grad[0] == 5


@pytest.mark.parametrize("write", ["mm", "zero_", "copy_"])
def test_autograd_is_told_of_writes_to_arguments(write: str, library: Any) -> None:
    """Else a gradient would be computed from what was overwritten."""
    writes = {
        "mm": lambda x, out: torch.mm(x, x, out=out),
        "zero_": lambda x, out: out.zero_(),
        "copy_": lambda x, out: out.copy_(x),
    }
    call = replayed(writes[write])
    x, out = torch.ones(4, 4), torch.ones(4, 4)
    for _ in range(4):
        version = out._version
        assert call(x, out) is out
        assert out._version > version
    with torch.enable_grad():
        product = (torch.nn.Parameter(torch.ones(4, 4)) * out).sum()
    call(x, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    assert library.size() == 1


def test_tensors_of_inference_mode_are_written_there_only(library: Any) -> None:
    call = replayed(lambda x, out: torch.mm(x, x, out=out))
    x = torch.ones(4, 4)
    with torch.inference_mode():
        out = torch.ones(4, 4)
        for _ in range(4):
            assert call(x, out) is out
        detached = replayed(lambda x: x.detach())
        assert [detached(out).is_inference() for _ in range(4)] == [True] * 4
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        call(x, out)


def test_a_call_without_a_result_is_made_once(library: Any) -> None:
    call = replayed(lambda x: x.add_(1).clone().stride() and None)
    x = torch.zeros(3)
    for _ in range(5):
        assert call(x) is None
    assert x[0] == 5


def test_calls_that_torch_observes_stay_in_python(library: Any) -> None:
    """Even where a call with such operands has a plan."""
    a, b = torch.randn(24, 32), torch.randn(32, 16)
    counted = Counted(torch.mm)
    call = replayed(counted)
    for _ in range(4):
        call(a, b)
    assert counted.calls == 2
    with torch.enable_grad():
        assert call(a.clone().requires_grad_(), b).requires_grad
    with torch.autocast("cpu"):
        assert call(a, b).dtype is torch.bfloat16
    torch.vmap(call, (0, None))(a.expand(2, *a.shape), b)

    class Subclass(torch.Tensor):
        pass

    assert type(call(a.as_subclass(Subclass), b)) is Subclass
    with FlopCounterMode(display=False) as counter:
        call(a, b)
    assert counter.get_total_flops() == 2 * 24 * 32 * 16
    assert counted.calls == 7


def test_tangents_of_forward_mode_are_kept(library: Any) -> None:
    """A dual tensor has the dispatch keys of a plain one."""
    a, b, _ = operands()
    call = replayed(lambda a, b: a @ b)
    for _ in range(3):
        call(a, b)
    with forward_ad.dual_level():
        product = call(forward_ad.make_dual(a, torch.ones_like(a)), b)
        assert forward_ad.unpack_dual(product).tangent is not None


@pytest.mark.parametrize("shape", [(0, 32), (4, 0)])
def test_calls_without_elements_stay_in_python(shape: tuple[int, int], library: Any) -> None:
    """Their tensors have no address by which they could be told apart."""
    x = torch.empty(shape, dtype=torch.bfloat16)
    w = torch.ones(16, shape[1], dtype=torch.bfloat16)
    for _ in range(4):
        assert lokakern.quantize(x).shape == shape
        if shape[1]:
            assert lokakern.gemm(x, w.t()).shape == (0, 16)
        *_, sums = lokakern.quantize_transpose(x, column_sums=True)
        assert sums.shape == (shape[1],) and not sums.any()
    assert library.size() == 0


def test_tensors_of_meta_stay_in_python(library: Any) -> None:
    """Even where tensors of a CPU, which have the same number of a device, have a plan."""
    counted = Counted(lambda x: torch.zeros(4, device=x.device))
    call = replayed(counted)
    for _ in range(3):
        call(torch.ones(4))
        assert call(torch.ones(4, device="meta")).is_meta
    assert counted.calls == 5


def test_a_failed_recording_is_no_failed_call(library: Any) -> None:
    """`index_put_` takes a list of tensors of which some are None."""

    def cleared(x: Tensor, places: Tensor) -> Tensor:
        made = x.clone()
        made[:, places] = 0
        return made

    call = replayed(cleared)
    for _ in range(4):
        assert call(torch.ones(3, 3), torch.tensor([1])).sum() == 6


def test_the_default_device_is_not_that_of_a_recording(library: Any) -> None:
    call = replayed(lambda x: torch.full((4,), 2.0, device="cpu"))
    torch.set_default_device("meta")
    try:
        for _ in range(4):
            assert call(torch.ones(4, device="cpu")).tolist() == [2.0] * 4
    finally:
        torch.set_default_device(None)
    assert library.size() == 1


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


def test_kernels_of_users_stay_in_python(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tells of their launches, as of this write through an address."""
    monkeypatch.setattr(register, "KERNELS", {})
    size = 8

    @register.register("dequantize", granularity=Granularity.ROW)
    def write(data: Tensor, scale: Tensor, out: Tensor, workspace: tuple[Tensor, ...]) -> None:
        ctypes.memmove(out.data_ptr(), data.data_ptr(), size)

    (kernel,) = register.KERNELS.values()

    def copied(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel.launch(x, x, out, ())
        return out

    call = replayed(copied)
    for place in range(5):
        x = torch.full((size,), place, dtype=torch.uint8)
        assert torch.equal(call(x), x)


def test_signatures_in_use_stay_where_many_come_once(library: Any) -> None:
    runs: list[int] = []

    def counted(x: Tensor) -> Tensor:
        runs.append(len(x))
        return torch.empty_like(x)

    call, hot, others = replayed(counted), torch.empty(1), torch.empty(17_000)
    for m in range(2, 17_000):
        call(others[:m])
        if not m % 1000:
            for _ in range(3):
                call(hot)
    assert runs.count(1) == 2 and len(runs) > 16_384 and library.size() < 16_384


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


def test_choices_that_change_before_a_plan_is_installed(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of older choices does not outlast `forget` of another thread."""
    threads = []

    def install(*arguments: Any) -> None:
        threads.append(threading.Thread(target=forget))
        threads[0].start()
        threads[0].join(timeout=0.5)  # it ends, or waits for this thread
        library.install(*arguments)

    names = ("replay", "inputs", "dtype_code", "clear")
    module = SimpleNamespace(install=install, **{name: getattr(library, name) for name in names})
    monkeypatch.setattr(replay.NATIVE, "module", module)
    call = replayed(lambda x: torch.mm(x, x))
    for _ in range(2):
        call(torch.ones(4, 4))
    threads[0].join()
    assert library.size() == 0


def test_a_plan_that_the_library_refuses_is_no_failed_call(library: Any) -> None:
    def long(x: Tensor) -> Tensor:
        x = x.add(1)
        for _ in range(4096):  # a plan has at most 4096 steps
            x.add_(1)
        return x

    counted = Counted(long)
    call = replayed(counted)
    for _ in range(4):
        assert call(torch.zeros(2))[0] == 4097
    assert counted.calls == 4 and library.size() == 1


@pytest.mark.parametrize("broken", [(replay, "Recorder"), (driver, "make_room_for_maps")])
def test_a_recording_that_cannot_begin_does_not_prevent_others(
    broken: tuple[Any, str], library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no storage")

    counted = Counted(lambda x: torch.mm(x, x))
    call = replayed(counted)
    x = torch.ones(4, 4)
    call(x)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no storage"):
        patch.setattr(*broken, fails)
        call(x)
    for _ in range(3):
        call(x)
    assert counted.calls == 2 and jit.recorder is None


def test_a_list_may_change_during_a_replay(library: Any) -> None:
    """Its tensors are there until the replay ends."""

    def powers(xs: list[Tensor]) -> Tensor:
        made = xs[0]
        for _ in range(20):
            made = made @ xs[0]
        return made

    call = replayed(powers)
    one = torch.eye(256)
    for _ in range(2):
        call([one])
    given = [one.clone()]
    begun, is_done = threading.Event(), False

    def change() -> None:
        begun.set()
        while not is_done:
            given[:] = [one.clone()]

    thread = threading.Thread(target=change)
    thread.start()
    begun.wait()
    try:
        for _ in range(20):
            assert torch.equal(call(given), one)
    finally:
        is_done = True
        thread.join()
    assert library.size() == 1


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


def test_cold_ops_before_the_library_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading registers the ops; another thread may call one before this process uses them."""
    monkeypatch.setattr(replay.NATIVE, "module", None)
    a, b, _ = operands()
    cold = torch.ops.lokakern.gemm_cold
    made = cold(a, b, None, None, None, "none/tensor", [], [], "bf16")
    assert torch.equal(made, a @ b)


def test_generated_code_finds_the_plans_of_ops(library: Any) -> None:
    """Its calls have the signatures that the dispatcher's have."""
    from lokakern.nn import inductor  # defines the ops

    route = "row;16:0=cuda.quantize_row+cuda.scaled_gemm_row;1:0="
    layer = lokakern.Linear(32, 16, dtype=torch.bfloat16).requires_grad_(False)
    layer.take_routes((route, "", ""), layer.weight)
    x = torch.randn(48, 32).bfloat16()
    name, op = "lokakern::routed_gemm", torch.ops.lokakern.routed_gemm.default
    given = (x, layer.weight.t(), None, None, layer.bias, route)
    rest = (None, None, "", False)
    assert library.call_op(name, *given, *rest) is None  # not recorded yet
    for _ in range(3):
        expected = layer(x)
    found = library.call_op(name, *given, *rest)
    assert torch.equal(found, expected)
    assert torch.equal(inductor.routed_gemm(*given), op(*given))
    assert library.call_op(name, x[:5], *given[1:], *rest) is None  # another size
    assert library.call_op(name, x, object(), *given[2:], *rest) is None
    with pytest.raises(TypeError, match="expected the name"):
        library.call_op()
