"""What a window keeps of a step is what a probe takes of it, in few launches."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lokakern
from lokakern.conversion.drift_watch import WEIGHTS_EVERY, _WindowProbe
from lokakern.probe import hooks, windows
from lokakern.probe.windows import SiteWindow, take_weight_sizes, transfers_of
from tests.support import native, window_kernel

K, M = 64, 256
LAYERS = 5
# No kernel of a GPU runs for these.
VIEWS = {"detach", "view", "slice", "as_strided", "alias", "select", "split_with_sizes", "t"}


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(K, K) for _ in range(LAYERS)))


class Steps:
    """Windows of the steps of a model."""

    def __init__(self, every: int) -> None:
        self.windows: list[dict[str, SiteWindow]] = []
        self.model = model_of()
        self.probe = _WindowProbe(
            self.model, every, self.windows.append, lambda: None, check="off", seed=0
        )

    def step(self, rows: int = M, calls: int = 1) -> None:
        for call in range(calls):
            loss(self.model, rows, call).backward()
        self.probe.step()


def loss(model: nn.Module, rows: int, seed: int) -> Tensor:
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


@pytest.mark.parametrize("calls", [1, 3])
def test_a_judged_window_has_the_statistics_of_a_probe(calls: int) -> None:
    steps = Steps(every=1)
    with steps.probe:
        steps.probe.step()  # from now on steps are told, whatever is called
        steps.step(calls=calls)
        (window,) = steps.windows
    model = model_of()
    with lokakern.Probe(model, every=1, check="off", seed=0) as probe:
        probe._sampler.draws_late = True
        probe.step()
        for call in range(calls):
            loss(model, M, call).backward()
        probe.step()
    for name, expected in probe.sites().items():
        found = window[name].statistics()
        for part in ("input", "grad_output"):
            operands = getattr(found, part), getattr(expected, part)
            for (which, x), (_, y) in zip(*(o.tensors() for o in operands), strict=True):
                assert torch.equal(x, y), (name, part, which)
        assert found.shape == expected.shape
        assert found.sizes == expected.sizes
        assert found.needs_input_gradient == expected.needs_input_gradient
        assert found.cancellation == pytest.approx(expected.cancellation)
        assert found.snapshot is not None and torch.equal(found.snapshot, expected.snapshot)


def test_a_window_is_handed_over_when_its_step_ends() -> None:
    steps = Steps(every=3)
    with steps.probe:
        found = []
        for _ in range(7):
            steps.step()
            found.append(len(steps.windows))
    assert found == [1, 1, 1, 2, 2, 2, 3]
    assert [bool(w["0"].weight_sizes) for w in steps.windows] == [True, False, False]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Operations, by name."""
    found: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        yield found


def launches(act: Callable[[], object]) -> int:
    with counted() as found:
        act()
    return sum(count for name, count in found.items() if name not in VIEWS)


@pytest.mark.usefixtures("path")
def test_a_sampled_step_makes_few_launches_and_others_none() -> None:
    """Of a layer: rows, their largest and columns' of both operands, and norms of its gradient."""
    steps = Steps(every=10)
    steps.step()
    plain = launches(steps.step)
    with steps.probe:
        for _ in range(2):  # weights are looked at in the first window
            between = [launches(steps.step) - plain for _ in range(10)]
        assert between[1:] == [0] * 9
        taken = between[0]
        assert 7 * LAYERS < taken <= 7 * LAYERS + 20, "random keys, places and the transfer"
        (transfer,) = transfers_of(steps.windows[-1])
        assert launches(transfer.numbers) == 0, "the thread asks the device for nothing"
    assert WEIGHTS_EVERY > 1


def test_a_watched_model_has_one_hook_of_its_own() -> None:
    """A compiled model calls each at every step, and torch.compile compiles and guards it."""
    steps = Steps(every=1)
    with steps.probe:
        found = len(steps.model._forward_pre_hooks), len(steps.model._forward_hooks)
    assert found == (1, 0)


def test_sizes_are_those_of_all_rows() -> None:
    """The largest of 8192 rows decides the scale of a tensor."""
    steps = Steps(every=1)
    with steps.probe:
        steps.step(rows=8192)
    ((_, (row_sizes, _, rows, _)),) = steps.windows[0]["0"].input.waiting
    assert len(row_sizes) == 8192 and len(rows) == M


def test_numbers_of_operands_of_unlike_sizes_are_their_own() -> None:
    """What is filled up to compare them at once counts for nothing."""
    steps = Steps(every=1)
    with steps.probe:
        steps.step()
    (window,) = steps.windows
    torch.manual_seed(1)
    wide, narrow = SiteWindow(3, 999, torch.device("cpu")), SiteWindow(3, 7, torch.device("cpu"))
    for site, rows in ((wide, 300), (narrow, 90)):
        x = torch.randn(rows, site.k, dtype=torch.float64 if site is wide else torch.bfloat16)
        sizes = x.abs().amax(dim=1), x.abs().amax(dim=0)
        site.input.waiting.append((lambda *_: None, (*sizes, x[:256], torch.rand(len(x[:256])))))
    sites = window | {"wide": wide, "narrow": narrow}
    (transfer,) = transfers_of(sites)
    together = transfer.numbers()
    for name, site in sites.items():
        (transfer,) = transfers_of({name: site})
        alone = transfer.numbers()
        assert together.of(name) == pytest.approx(alone.of(name), rel=1e-6)
        assert len(alone.of(name)) == (12 if name in window else 5)
    assert together.parts == {
        name: {"input"} | ({"grad_output"} if name in window else set()) for name in sites
    }


@pytest.fixture(params=["python", "cpp"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.in_use() if request.param == "cpp" else contextlib.nullcontext():
        yield request.param


def same(one: dict[str, SiteWindow], other: dict[str, SiteWindow]) -> None:
    """Whether two windows hold the same tensors."""
    assert one.keys() == other.keys()
    for name, site in one.items():
        for taken in ("input", "grad_output", "weights"):
            some, others = (
                x.waiting if taken == "weights" else getattr(x, taken).waiting
                for x in (site, other[name])
            )
            assert len(some) == len(others) > 0
            for (_, tensors), (_, expected) in zip(some, others, strict=True):
                assert all(map(torch.equal, tensors, expected)), (name, taken)
                assert [x.dtype for x in tensors] == [x.dtype for x in expected]
        assert all(map(torch.equal, site.weight_sizes, other[name].weight_sizes))
        assert (site.sizes, site.half) == (other[name].sizes, other[name].half)


@pytest.mark.parametrize(
    ("rows", "calls", "many"), [(M, 1, 2**17), (999, 3, 2**17), (4096, 2, 2**10)]
)
def test_samples_in_cpp_are_those_of_torch(
    rows: int, calls: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of matrices with so many rows that sizes of some are read."""
    monkeypatch.setattr(hooks, "MANY_ROWS", many)
    monkeypatch.setattr(hooks, "READ_ROWS", many // 4)
    found = []
    for in_use in (native.in_use, contextlib.nullcontext):
        steps = Steps(every=1)
        with steps.probe, in_use():
            for _ in range(2):
                steps.step(rows, calls)
        found.append(steps.windows)
    for one, other in zip(*found, strict=True):
        same(one, other)


@pytest.mark.parametrize(("rows", "calls"), [(M, 1), (999, 2)])
def test_windows_by_the_kernel_are_those_of_torch(rows: int, calls: int) -> None:
    """Sizes in float32, with the same values; of several calls, numbers are made by torch."""
    found, judged, launched = [], [], []
    for is_launched in (True, False):
        steps = Steps(every=1)
        steps.model.bfloat16()
        with contextlib.ExitStack() as stack:
            stack.enter_context(native.in_use())
            if is_launched:
                launched = stack.enter_context(window_kernel.on_host()).blocks
            stack.enter_context(steps.probe)
            if calls > 1:
                steps.probe.step()  # from now on steps are told, whatever is called
            x = torch.randn(rows, K, generator=torch.Generator().manual_seed(0)).bfloat16()
            for _ in range(calls):
                steps.model(x).square().mean().backward()
            steps.probe.step()
            (window,) = steps.windows
            (transfer,) = transfers_of(window)
            found.append(transfer.numbers())
            judged.append({name: site.statistics() for name, site in window.items()})
    weights = int(calls == 1)  # of which the first window tells
    assert len(launched) == 2 * LAYERS * calls + weights, "one of each operand"
    one, other = found
    assert (one.names, one.parts, one.nonfinite) == (other.names, other.parts, other.nonfinite)
    assert one.values.tolist() == pytest.approx(other.values.tolist(), rel=0, abs=4e-7)
    exact = [not name.endswith(windows.MEAN) for _, name in one.names]
    assert one.values[exact].tolist() == other.values[exact].tolist()
    for name, site in judged[0].items():
        expected = judged[1][name]
        for part in ("input", "grad_output"):
            operands = getattr(site, part), getattr(expected, part)
            for (which, x), (_, y) in zip(*(o.tensors() for o in operands), strict=True):
                assert torch.equal(x, y), (name, part, which)
        assert torch.equal(site.cancellations, expected.cancellations)
        assert (site.sizes, site.shape) == (expected.sizes, expected.shape)


def test_operands_that_are_not_contiguous_are_sampled_alike() -> None:
    found = []
    for in_use in (native.in_use, contextlib.nullcontext):
        steps = Steps(every=1)
        with steps.probe, in_use():
            x = torch.randn(3, K, M, generator=torch.Generator().manual_seed(0)).mT
            steps.model(x).square().mean().backward()
            steps.probe.step()
        found.append(*steps.windows)
    same(*found)


def numbers(sites: dict[str, SiteWindow]) -> Any:
    (transfer,) = transfers_of(sites)
    return transfer.numbers()


@pytest.mark.parametrize("kind", ["usual", "zeros", "nonfinite", "float16", "few rows"])
def test_numbers_in_cpp_have_the_bits_of_numpy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MOST_ELEMENTS", 2**15)  # so that there are batches
    torch.manual_seed(0)
    sites = {}
    for place in range(4):
        n, k = 8 + place, 300 - 64 * place
        site = sites[str(place)] = SiteWindow(n, k, torch.device("cpu"))
        for part, columns in ((site.input, k), (site.grad_output, n)):
            for call in range(1 + place % 2):
                rows = 2 if kind == "few rows" else 500 + 300 * call
                x = torch.randn(rows, columns) * torch.randn(rows, 1).exp2()
                x = x.to(torch.float16 if kind == "float16" else (torch.bfloat16, None)[place // 2])
                if kind == "zeros":
                    x[::2], x[:, 1::3] = 0.0, 1e-42
                    x *= place > 0
                if kind == "nonfinite":
                    x[3, 5], x[7, 2] = float("inf"), float("nan")
                part.waiting.append(((lambda *_: None), (*hooks.sizes_of(x), x[:256], x[0])))
        site.weight = torch.randn(n, k).bfloat16()
    take_weight_sizes(list(sites.values()))
    expected = numbers(sites)
    with native.in_use():
        take_weight_sizes(list(sites.values()))
        found = numbers(sites)
    assert found.names == expected.names and len(found.names) == 4 * 12
    assert found.values.tolist() == expected.values.tolist()
    assert (found.parts, found.nonfinite) == (expected.parts, expected.nonfinite)
    assert bool(found.nonfinite) == (kind == "nonfinite")
    assert bool(found.parts) == (kind != "few rows")


def test_an_error_of_torch_is_the_same_in_cpp() -> None:
    """Such as of memory, which the watch tells apart."""

    class Full(TorchDispatchMode):
        def __torch_dispatch__(self, *_: Any) -> Any:
            raise torch.OutOfMemoryError("no memory left")

    site = SiteWindow(8, 8, torch.device("cpu"))
    x = torch.randn(64, 8)
    site.input.waiting.append(((lambda *_: None), (*hooks.sizes_of(x), x, x[0])))
    site.weight = x
    with native.in_use() as library, Full():
        for act in (
            lambda: library.take_samples([x], [x[0].long()], [(0, 1)]),
            lambda: take_weight_sizes([site]),
            lambda: transfers_of({"0": site}),
        ):
            with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
                act()


def test_a_sampled_step_is_one_call_of_the_library_for_each_pass() -> None:
    """The ops that take all samples of a graph at its end; of a CPU, whose kernel none is."""
    calls: Counter[str] = Counter()
    with native.in_use() as library:
        steps = Steps(every=1)
        ops = torch.ops.lokakern
        x, weights = torch.randn(M, K), [layer.weight for layer in steps.model]
        numbers = [recorder.number for recorder in steps.probe._recorders.values()]

        class Counted:
            def __getattr__(self, name: str) -> Any:
                calls[name] += 1
                return getattr(library, name)

        native.replay.NATIVE.module = Counted()  # until the library is in use no more
        with steps.probe:
            taken = ops.probe_taps([x] * LAYERS, [x] * LAYERS, weights, numbers, [True] * LAYERS)
            assert calls == {"take_pass": 1, "take_samples": 1, "as_tensors": 1}
            assert len({int(number) for number in taken}) == LAYERS
            calls.clear()
            ops.probe_tap_gradients(x, [x] * LAYERS, taken, numbers)
            assert calls == {"take_pass": 1, "take_samples": 1}
            steps.probe.step()
    assert all(len(site.grad_output.waiting) == 1 for site in steps.windows[0].values())
