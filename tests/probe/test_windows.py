"""What a window keeps of a step is what a probe takes of it, in few launches."""

from __future__ import annotations

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
from lokakern.probe.windows import SiteWindow, transfers_of

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
