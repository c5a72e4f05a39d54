"""Tails of layers in forwards of a converted model: names, options, tuning, changes and undoing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lokakern
from lokakern import mods
from lokakern.conversion import convert as conversion
from lokakern.conversion.convert import Conversion
from lokakern.conversion.tune import Tuning, tune
from lokakern.functional.norm_gradient import KERNEL as GRADIENT_KERNEL
from lokakern.nn.crossed_forward import crossed_of
from lokakern.nn.rectified import KERNEL
from lokakern.nn.routed_matmul import kernel_at
from lokakern.problems import make_problem
from lokakern.selection import dispatcher
from lokakern.types import Format
from tests.conversion.test_relus import ReluScript, predicted
from tests.conversion.test_tune import M, On
from tests.support.conversions import H200, K, N, measured
from tests.support.measurements import Book, time
from tests.support.routed_layers import is_quantized

INPUT = torch.randn(M, K, generator=torch.Generator().manual_seed(0)).bfloat16()
convert = functools.partial(lokakern.convert, distribution="X1", device=H200)


@pytest.fixture
def known(tmp_path: Path) -> Iterator[Book]:
    relu = time(KERNEL, make_problem("gemm_norm", (512, 8, 8), epilogue="bias+relu"), 3.0)
    problem = make_problem(
        "norm_backward", (512, 8), epilogue="bias+relu", out_format=Format.BFLOAT16
    )
    book = Book(tmp_path / "rows.sqlite")
    book.write(*measured(), relu, time(GRADIENT_KERNEL, problem, 3.0)).use()
    yield book
    dispatcher.use_snapshot(None)


class Mask(nn.Module):
    """Only ``hidden`` was measured: from 256 rows on it is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm = nn.Linear(K, N), nn.LayerNorm(N)
        self.up, self.down = nn.Linear(N, 40), nn.Linear(40, 64)
        self.first, self.deep = nn.Linear(64, 40), nn.Sequential(nn.LayerNorm(40), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.hidden(x))
        return self.deep(self.first(F.relu(self.down(F.relu(self.up(y))))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """A module that shows nothing, around one that does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.head = Mask(), nn.Linear(40, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mask(x) if x.shape[0] else x)  # type: ignore[no-any-return]


def model_of() -> Net:
    return Net().bfloat16()


JOINED = {
    "mask.hidden": "layer none linear", "mask.up": "none relu", "mask.down": "none relu",
    "mask.first": "layer silu",
}  # fmt: skip


def is_own(model: nn.Module) -> bool:
    return not any("forward" in vars(module) for module in model.modules())


def test_tails_are_reached(known: Book, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of()
    handle = convert(model, 0.06)
    assert handle.joined == JOINED
    assert list(handle.rectified) == ["mask.up", "mask.down"]
    handle.table()
    told = " ".join(capsys.readouterr().out.split())
    assert f"{KERNEL} applies the relu behind mask.up, mask.down" in told
    assert "behind mask.hidden (layer norm), mask.up (relu), mask.down (relu), mask.first (" in told
    assert crossed_of(model.mask) is not None and crossed_of(model) is None
    handle.undo()
    assert is_own(model) and type(model.mask.up) is nn.Linear and not handle.joined
    handle = convert(model, 0.06, inference=True)
    assert not handle.joined and list(handle.rectified) == ["mask.up", "mask.down"]


@pytest.mark.parametrize(
    "options", [{"between": False}, {"kernels": "bf16", "distribution": None}, {"skip": "mask.*"}]
)
def test_conversions_without_tails(known: Book, options: dict[str, Any]) -> None:
    model = model_of()
    handle = convert(model, *([] if "kernels" in options else [0.06]), **options)
    assert not handle.joined and not handle.rectified and is_own(model)


def test_models_of_which_no_kernel_was_timed(known: Book, tmp_path: Path) -> None:
    assert convert(model_of().float(), 0.06).joined  # for autocast
    Book(tmp_path / "others.sqlite").write(*measured()).use()
    model = model_of()
    assert not convert(model, 0.06).joined and is_own(model)


def test_tuning_switches_the_plans_of_a_forward_that_stays(known: Book) -> None:
    model = model_of()
    handle = convert(model, 0.06)
    before = vars(model.mask)["forward"]
    for _ in range(2):
        handle.use_routes({}, keep_classes=True, has_relus=False)
        assert not handle.joined and not handle.rectified
        assert vars(model.mask)["forward"].__self__ is before.__self__
        assert not any(before.__self__.plans)
        handle.use_routes({}, keep_classes=True, has_relus=True)
        assert handle.joined == JOINED and all(before.__self__.plans)
    handle.use_routes({}, has_relus=False)
    assert is_own(model)


def tuned(cost: Callable[[On], float]) -> tuple[Tuning, Conversion, nn.Module]:
    model = model_of().requires_grad_(False)
    handle = convert(model, 0.06, inference=True)
    step = functools.partial(predicted, model, INPUT)
    return tune(handle, step, make_timer=ReluScript(handle, cost)), handle, model


@pytest.mark.parametrize("gain_us", [2.0, -2.0])
def test_tuning_decides_about_tails(known: Book, tmp_path: Path, gain_us: float) -> None:
    gains = {"relu": gain_us, "output": 5.0}
    found, handle, _ = tuned(lambda on: 100.0 - sum(gains.get(g, 0.0) for _, g in on))
    group = next(t for t in found.groups if t.group.gemm == "relu")
    assert group.group.sites == ("mask.up", "mask.down") and group.is_kept == (gain_us > 0)
    assert bool(handle.rectified) == (gain_us > 0)
    found.save(tmp_path / "tuned.json")
    other = convert(model_of(), 0.06, inference=True, tuned=tmp_path / "tuned.json")
    assert other.rectified == handle.rectified
    other.refresh()
    assert list(other.rectified) == ["mask.up", "mask.down"]


def test_a_model_that_does_not_gain_is_that_of_nn_linear(known: Book) -> None:
    found, handle, model = tuned(lambda on: 100.0 + len(on))
    assert found.after is None and not handle.rectified and not handle.joined
    assert torch.equal(predicted(model, INPUT), predicted(model_of(), INPUT))
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager")
    assert torch.equal(predicted(run, INPUT), predicted(model_of(), INPUT))


def test_the_route_of_a_relu_follows_its_reader(known: Book) -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, K), nn.Linear(K, N)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).relu())  # type: ignore[no-any-return]

    handle = convert(Read().bfloat16(), 0.06)
    route = handle.rectified["first"]
    assert [bool(kernel_at(route, m)) for m in (16, 128, 512)] == [True, True, False]


def test_refreshes_and_changes_of_the_model(known: Book) -> None:
    model = model_of()
    handle = convert(model, 0.06)
    model.mask.down = nn.Linear(40, 64).bfloat16()
    assert not handle.joined  # the own forward runs
    assert torch.equal(model.mask(INPUT), Mask.forward(model.mask, INPUT))
    handle.use_routes({}, has_relus=False)  # as of a tuning; the module is not as it was found
    handle.use_routes({}, has_relus=True)
    assert torch.equal(model.mask(INPUT), Mask.forward(model.mask, INPUT))
    handle.refresh()
    assert handle.joined == {k: v for k, v in JOINED.items() if k != "mask.down"}
    handle.refresh(None)
    assert len(handle.joined) == 3
    model.mask.norm = nn.Identity()  # the tail is gone
    handle.use_routes({}, has_relus=False)
    handle.use_routes({}, has_relus=True)
    assert is_own(model) and not handle.joined
    handle.refresh()
    assert list(handle.joined) == ["mask.up", "mask.first"]
    del model.mask.down
    handle.use_routes({}, has_relus=False)
    handle.use_routes({}, has_relus=True)
    handle.undo()
    assert is_own(model)


def test_two_conversions(known: Book) -> None:
    model = model_of()
    first = convert(model, 0.06)
    second = convert(model, 0.06, between=False)
    assert not first.joined and not second.joined  # the newest one is in effect
    second.undo()
    assert first.joined == JOINED
    second = convert(model, 0.06)
    first.undo()
    assert second.joined == JOINED
    second.undo()
    assert is_own(model)


@pytest.mark.parametrize("first", ["conversion", "mods"])
def test_a_forward_of_a_mod_is_left_alone(known: Book, first: str) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.last = nn.Linear(K, N), nn.Linear(K, N), nn.Linear(N, 64)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.last(self.one(x) + self.two(x)))

    model = Pair().bfloat16()
    report = mods.apply(model, [mods.FuseShared()])
    assert report.changed
    handle = convert(model, None)
    assert not handle.joined
    undos = [handle.undo, report.undo]
    for undo in undos if first == "conversion" else undos[::-1]:
        undo()
    assert is_own(model)
    handle = convert(model, None)
    assert handle.joined == {"last": "none relu"}


class Both(nn.Module):
    """A product with a parameter, and a layer with a relu."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.fc = nn.Parameter(torch.randn(K, N) / K**0.5), nn.Linear(N, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x @ self.w))


def test_products_with_parameters_and_tails_share_a_forward(known: Book) -> None:
    torch.manual_seed(0)
    model, x = Both().bfloat16(), INPUT
    plain = model(x)
    handle = convert(model, None)
    assert handle.joined == {"fc": "none relu"} and "w" in handle.sites
    crossed = crossed_of(model)
    assert crossed is not None and crossed._is_own_in_eager  # the product is not quantized
    assert torch.equal(model(x), plain)
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(run(x), plain)
    handle.undo()
    handle = convert(model, kernels="row", distribution=None)
    assert not handle.joined and crossed_of(model) is not None
    quantized = model(x)
    other = convert(model, None)  # the newest, which quantizes nothing
    assert other.joined and torch.equal(model(x), plain)
    other.undo()
    assert torch.equal(model(x), quantized) and not torch.equal(quantized, plain)
    handle.undo()
    assert is_own(model)


def test_eager_calls_run_a_quantized_product_beside_a_tail(
    known: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "routes_of", is_quantized)
    model = Both().bfloat16()
    plain = model(INPUT)
    handle = convert(model, 0.06, filter=lambda module, _: not isinstance(module, nn.Linear))
    assert not handle.joined and not torch.equal(model(INPUT), plain)
    quantized = model(INPUT)
    handle.undo()
    handle = convert(model, 0.06)
    model.fc.take_routes(("", "", ""), model.fc.weight)
    assert handle.joined and torch.equal(model(INPUT), quantized)


def test_a_forward_that_cannot_be_traced_is_left_alone_without_a_warning(
    known: Book, recwarn: pytest.WarningsRecorder
) -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(K, N)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.fc(x)) if x.shape[0] > 1 else x

    model = Asks().bfloat16()
    handle = convert(model, 0.06)
    assert not handle.joined and is_own(model) and not recwarn.list
