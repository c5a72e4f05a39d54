"""Crosses of DCN in conversions: what is found, chosen, told and undone."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lokakern
from lokakern.bench.models.dhen import SIZES, DHENLayer
from lokakern.bench.models.zoo.dcnv2 import FullCrossNetwork
from lokakern.chain.candidates import Layer
from lokakern.conversion.convert import Conversion
from lokakern.conversion.cross_sites import CrossSpan, tensors_moved
from lokakern.conversion.tune import Tuning, tune
from lokakern.nn.cross_pattern import crosses_in
from lokakern.nn.crossed_forward import graph_of
from lokakern.nn.routed_matmul import dtype_of
from lokakern.problems import make_problem
from lokakern.selection.weight_forms import with_weight
from lokakern.types import Format, Granularity, Operand
from lokakern.workloads.suite_files import suite_from_file
from tests.conversion.test_tune import On, Script
from tests.support.chain_rows import (
    NONE,
    ROW,
    fp8_rows,
    layer_problem,
    layer_rows,
    plain_rows,
)
from tests.support.conversions import H200
from tests.support.measurements import BF16, Book, accuracy, gemm, time

N, RANK = 512, 64
FULL = Layer(N, N, "bias+cross")
DOWN, UP = Layer(RANK, N, "none"), Layer(N, RANK, "bias+cross")
M = (512, 2048)
MOST_RATE = 4e6  # bytes per us of `fastest_mover`
convert = functools.partial(lokakern.convert, device=H200, distribution="X1", inference=True)


class FullCrosses(nn.Module):
    def __init__(self, n: int = N) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, n) for _ in range(2))

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for layer in self.layers:
            x = x0 * layer(x) + x
        return x


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(N, RANK, bias=False), nn.Linear(RANK, N)

    def forward(self, flat: Tensor) -> Tensor:
        return flat * self.up(self.down(flat)) + flat


class Net(nn.Module):
    """Crosses, then a layer; only its crosses show in a trace, because it branches itself."""

    def __init__(self, crosses: nn.Module) -> None:
        super().__init__()
        self.crosses, self.last = crosses, nn.Linear(N, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.crosses(x))
        return y if x.shape[0] > 0 else y * 2


def products(layer: Layer, us: dict[int, float]) -> list[Any]:
    found = []
    for m, t in us.items():
        for epilogue in ("none", "bias"):
            problem = gemm(m, layer.n, layer.k, epilogue=epilogue)
            found += [time(BF16, x, t) for x in (problem, with_weight(problem, ROW, H200))]
    return found


def fastest_mover() -> list[Any]:
    """A kernel that moves more bytes in a microsecond than all others here."""
    problem = make_problem(
        "quantize", (2048, 8 * N), out_format=Format.E4M3FN, out_granularity=Granularity.ROW
    )  # of no layer
    return [time("cuda.quantize_row", problem, problem.bytes_moved / MOST_RATE)]


def moved_us(tensors: int, m: int) -> float:
    """The least time of so many tensors of the size of the output."""
    return 2 * tensors * m * N / MOST_RATE


def same(us: float) -> dict[int, float]:
    return dict.fromkeys(M, us)


@pytest.fixture
def full(book: Book) -> Book:
    return book.write(
        *products(FULL, same(20.0)), *layer_rows(FULL, same(30.0), same(10.0)),
        *fastest_mover(),
    )  # fmt: skip


@pytest.fixture
def low(book: Book) -> Book:
    return book.write(
        *products(DOWN, same(8.0)), *products(UP, same(9.0)),
        *layer_rows(DOWN, same(9.0), same(3.0)), *layer_rows(UP, same(30.0), same(5.0)),
        *fastest_mover(),
    )  # fmt: skip


def model_of(kind: type[nn.Module] = FullCrosses) -> nn.Module:
    torch.manual_seed(0)
    return Net(kind()).bfloat16().eval()


def rows(m: int = 512) -> Tensor:
    return torch.randn(m, N, generator=torch.Generator().manual_seed(1)).bfloat16()


def crosses_of(handle: Conversion) -> list[CrossSpan]:
    return [span for span in handle.spans if isinstance(span, CrossSpan)]


def chains_run(model: nn.Module, m: int = 512) -> int:
    with torch.no_grad(), torch.profiler.profile() as profile:
        model(rows(m))
    return sum(event.name == "lokakern::routed_chain" for event in profile.events())


def test_full_crosses_become_chains(full: Book, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = model_of(), rows()
    with torch.no_grad():
        plain = model(x)
    handle = convert(model, 0.06)
    assert "2 chains of 2 layers" in repr(handle)
    assert [span.sites for span in crosses_of(handle)] == [
        ("crosses.layers.0",), ("crosses.layers.1",)
    ]  # fmt: skip
    assert (chains_run(model), chains_run(model, 100)) == (2, 0)
    with torch.no_grad():
        y = model(x)
        assert torch.equal(model(rows(100)), copy.deepcopy(model_of())(rows(100)))
    assert not torch.equal(y, plain)
    assert (y - plain).float().norm() < 0.06 * plain.float().norm()
    assert "bias+cross" in handle.explain("crosses.layers.0")
    handle.table()
    assert "crosses.layers.1" in capsys.readouterr().out
    handle.undo()
    assert "forward" not in vars(model.crosses) and not list(model.buffers())
    with torch.no_grad():
        assert torch.equal(model(x), plain)


def test_crosses_become_chains_in_float16(full: Book) -> None:
    """By errors of the product with float16."""
    model, x = model_of().half(), rows().half()
    with torch.no_grad():
        plain = model(x)
    handle = convert(model, 0.06)
    assert not any(span.plan.chains for span in crosses_of(handle))
    half = Operand(Format.FLOAT16)
    full.write(accuracy("cuda.quantize_row+cuda.scaled_gemm_row", gemm(512, N, N, a=half), 0.04))
    handle.refresh()
    plans = [chain.text for span in crosses_of(handle) for chain in span.plan.chains]
    assert len(plans) == 2 and all(dtype_of(text) is torch.float16 for text in plans)
    with torch.no_grad(), torch.profiler.profile() as profile:
        y = model(x)
    assert sum(event.name == "lokakern::routed_chain" for event in profile.events()) == 2
    assert y.dtype is torch.float16 and not torch.equal(y, plain)
    assert (y - plain).float().norm() < 0.06 * plain.float().norm()


@pytest.mark.parametrize(("row_err", "count"), [(0.04, 2), (0.07, 0)])
def test_a_cross_has_the_errors_of_its_product(book: Book, row_err: float, count: int) -> None:
    """No suite measures errors of crosses; those of their own come first, even too few."""
    fp8 = [row for m in M for row in fp8_rows(FULL, m, 10.0, is_judged=False)]
    product = gemm(M[0], FULL.n, FULL.k)
    book.write(
        *products(FULL, same(20.0)), *(row for m in M for row in plain_rows(FULL, m, 30.0)), *fp8,
        *fastest_mover(), accuracy("cuda.quantize_row+cuda.scaled_gemm_row", product, row_err),
        accuracy(BF16, product, 0.003),
    )  # fmt: skip
    model = model_of()
    handle = convert(model, 0.06)
    assert chains_run(model) == count
    why = "over the budget: the least row_err is 0.07 > 0.06" * (not count)
    assert why in handle.explain("crosses.layers.0")
    handle.undo()
    own = layer_problem(FULL, M[0], NONE, ROW, NONE)
    book.write(accuracy("cuda.quantize_row+cuda.gemm_norm_row", own, 0.5, seeds=(0,)))
    convert(model, 0.06)
    assert chains_run(model) == 0


def test_a_cross_of_low_rank_is_a_chain_of_two(low: Book) -> None:
    model = model_of(LowRank)
    handle = convert(model, 0.06)
    row = next(row for row in handle.choices if row["gemm"] == "chain")
    assert (row["site"], row["n"], row["k"]) == ("crosses.down to crosses.up", N, N)
    assert row["us"] == pytest.approx([10.0, 10.0])  # 3 and a quantizer, then 5
    # Two products. x0 is x, and a reader outside may compute the cross: two reads less one.
    assert row["rival_us"] == pytest.approx([17.0 + moved_us(1, m) for m in M])
    assert chains_run(model) == 1


def test_the_rival_is_the_product_and_the_least_time_of_a_kernel(full: Book) -> None:
    handle = convert(model_of(), 0.06)
    first, last = (row for row in handle.choices if row["gemm"] == "chain")
    # x0 is x, and the next layer reads the result: three tensors.
    assert first["rival_us"] == pytest.approx([20.0 + moved_us(3, m) for m in M])
    # A reader outside of the module may compute the cross: three reads less one.
    assert last["rival_us"] == pytest.approx([20.0 + moved_us(2, m) for m in M])


@pytest.mark.parametrize(
    ("us", "budget", "words"),
    [
        (30.0, 0.06, "not faster"),
        (10.0, 0.01, "over the budget"),
    ],
)
def test_why_there_is_no_chain(book: Book, us: float, budget: float, words: str) -> None:
    book.write(
        *products(FULL, same(20.0)), *layer_rows(FULL, same(30.0), same(us)), *fastest_mover()
    )
    model = model_of()
    handle = convert(model, budget)
    assert words in handle.explain("crosses.layers.1")
    assert "forward" not in vars(model.crosses) and not chains_run(model)


def test_a_suite_lists_crosses(book: Book, tmp_path: Path) -> None:
    book.write(*plain_rows(Layer(64, 64, "bias+relu"), 512, 1.0))
    handle = convert(model_of(), 0.06)
    assert "not measured" in handle.explain("crosses.layers.0")
    text = handle.suite([512])
    assert 'n = 512\nk = 512\nepilogue = "bias+cross"\nforms = ["chain"]' in text
    (tmp_path / "s.toml").write_text(text)
    cases = list(suite_from_file(tmp_path / "s.toml").build(Format.E4M3FN))
    found = [case.problem for case in cases if case.problem.op == "gemm_norm"]
    for reads, weight in ((NONE, NONE), (NONE, ROW), (ROW, ROW)):
        assert layer_problem(FULL, 512, reads, weight, NONE) in found


def test_times_with_a_bias_stand_for_those_without(full: Book) -> None:
    crosses = FullCrosses()
    for layer in crosses.layers:
        layer.bias = None
    model = Net(crosses).bfloat16().eval()
    handle = convert(model, 0.06)
    assert chains_run(model) == 2
    for row in (row for row in handle.choices if row["gemm"] == "chain"):
        assert row["why"].endswith("by times of bias+cross")
    assert "(512 x 512 cross)" in handle.explain("crosses.layers.0")
    assert 'epilogue = "cross"' in handle.suite([512])


class BehindRelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(N, N), nn.Linear(N, N)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.last(torch.relu(self.first(x))) + x


def test_a_layer_of_a_cross_ends_no_other_chain(full: Book) -> None:
    """One call of a traced forward replaces a layer."""
    relu, plain = Layer(N, N, "bias+relu"), Layer(N, N, "bias")
    full.write(
        *layer_rows(relu, same(30.0), same(5.0)),
        *(row for m in M for row in fp8_rows(plain, m, 5.0, is_judged=False)),
    )
    handle = convert(model_of(BehindRelu), 0.06)
    found = [chain.text for span in handle.spans for chain in span.plan.chains]
    assert [(span.sites, len(span.plan.chains)) for span in handle.spans] == [
        (("crosses.last",), 1), (("crosses.first",), 1)
    ]  # fmt: skip
    assert "cross" in found[0] and "relu" in found[1]


class Training(FullCrosses):
    def forward(self, x0: Tensor) -> Tensor:
        return super().forward(x0) if self.training else super().forward(x0) * 2


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(N, N)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        x = x.clone().mul_(2)
        return x * y + x


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Training, "a Training: no cross is a chain: its forward depends on whether it trains"),
        (Writes, "crosses.layer: no cross is a chain: clone is computed between"),
        (functools.partial(FullCrosses, 12), "n is 12; kernels of crosses take multiples of 8"),
    ],
)
def test_why_a_cross_is_left_alone(full: Book, kind: Any, words: str) -> None:
    handle = convert(nn.Sequential(kind()).bfloat16() if "12" in words else model_of(kind), 0.06)
    assert words in handle.explain()
    assert not crosses_of(handle)


def test_layers_that_are_not_converted_have_no_chain(full: Book) -> None:
    handle = convert(model_of(), 0.06, skip="crosses.layers.0")
    assert [span.sites for span in crosses_of(handle)] == [("crosses.layers.1",)]


def test_a_first_layer_that_is_not_converted_runs_by_itself(low: Book) -> None:
    model = model_of(LowRank)
    handle = convert(model, 0.06, skip="crosses.down")
    (span,) = crosses_of(handle)
    assert span.sites == ("crosses.up",)


@pytest.mark.parametrize("options", [{"inference": False}, {"between": False}, {"check": "9:9"}])
def test_conversions_without_chains_trace_nothing(full: Book, options: dict[str, Any]) -> None:
    model = model_of()
    handle = convert(model, 0.06, **options)
    assert not crosses_of(handle) and "forward" not in vars(model.crosses)


def test_refreshes_and_two_conversions(full: Book) -> None:
    model = model_of()
    handle = convert(model, 0.06)
    assert handle.refresh(0.06) == []
    names = [f"crosses.layers.{i}/chain" for i in range(2)]
    assert handle.refresh(0.01) == names and "forward" not in vars(model.crosses)
    assert handle.refresh(0.06) == names and chains_run(model) == 2
    newer = convert(model, 0.01)
    assert chains_run(model) == 0
    newer.undo()
    assert chains_run(model) == 2
    newer = convert(model, 0.06)
    handle.undo()
    assert chains_run(model) == 2
    newer.undo()
    assert type(model.crosses.layers[0]) is nn.Linear and "forward" not in vars(model.crosses)


def test_copies_and_pickles(full: Book) -> None:
    model = model_of()
    handle = convert(model, 0.06)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        y = model(rows())
        handle.undo()
        for twin in twins:
            assert chains_run(twin) == 2
            assert torch.equal(twin(rows()), y)


def test_compiled_models(full: Book) -> None:
    model = model_of()
    convert(model, 0.06)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(rows()), model(rows()))
    assert chains_run(compiled) == 2


def test_chains_that_are_off_leave_the_traced_forward(full: Book) -> None:
    model = model_of()
    with torch.no_grad():
        plain = model(rows())
    handle = convert(model, 0.06)
    every = {span.sites for span in crosses_of(handle)}
    handle.use_routes({}, keep_classes=True, off_chains=every)
    assert "forward" in vars(model.crosses) and chains_run(model) == 0
    with torch.no_grad():
        assert torch.equal(model(rows()), plain)
    handle.use_routes({}, keep_classes=True, off_chains=())
    assert chains_run(model) == 2
    handle.use_routes({}, off_chains=every)
    assert "forward" not in vars(model.crosses)


# --- tuning


def tuned(model: nn.Module, gain_us: float) -> tuple[Tuning, Conversion]:
    handle = convert(model, 0.06)
    chains = {(f"{span.words}", "chain"): gain_us for span in crosses_of(handle)}
    script = ChainScript(handle, lambda on: 100.0 - sum(chains.get(x, 0.0) for x in on))

    def step() -> None:
        with torch.no_grad():
            model(rows())

    return tune(handle, step, make_timer=script), handle


class ChainScript(Script):
    """Times follow from the chains that run."""

    def on(self) -> On:
        return {
            (span.words, "chain") for span in crosses_of(self.handle)
            if span.sites not in self.handle.off_chains
        }  # fmt: skip


@pytest.mark.parametrize(("gain_us", "count"), [(10.0, 2), (-10.0, 0)])
def test_tuning_keeps_chains_that_gain(
    full: Book, tmp_path: Path, gain_us: float, count: int
) -> None:
    model = model_of()
    found, handle = tuned(model, gain_us)
    groups = [t.group for t in found.groups if t.group.gemm == "chain"]
    # The two have equal plans: one group, although their rivals differ.
    assert [group.chains for group in groups] == [(("crosses.layers.0",), ("crosses.layers.1",))]
    assert chains_run(model) == count
    found.save(tmp_path / "tuned.json")
    handle.undo()
    again = model_of()
    convert(again, 0.06, tuned=tmp_path / "tuned.json")
    assert chains_run(again) == count


# --- models


def found_in(module: nn.Module) -> list[tuple[tuple[str, ...], str, int]]:
    crosses = crosses_in(graph_of(module), module)
    return [(x.names, x.why, tensors_moved(x, module)) for x in crosses]


def test_crosses_of_models_are_found() -> None:
    full = FullCrossNetwork(16, 3)
    names = [(f"layers.{i}",) for i in range(3)]
    assert found_in(full) == [(names[0], "", 3), (names[1], "", 4), (names[2], "", 2)]
    # Its reader is a module, whose linear layer reads the transpose.
    for n in (4, 6):  # with and without a shortcut
        assert found_in(DHENLayer(n, SIZES["tiny"])) == [(("down", "up"), "", 3)]


class Viewed(FullCrossNetwork):
    def __init__(self) -> None:
        super().__init__(16, 1)
        self.after = nn.Linear(4, 4)

    def forward(self, x0: Tensor) -> Tensor:
        y: Tensor = self.after(super().forward(x0).view(-1, 4, 4))
        return y


def test_a_layer_may_read_a_view() -> None:
    assert found_in(Viewed()) == [(("layers.0",), "", 3)]


class Read(FullCrossNetwork):
    """A cross that modules read, one of which may begin with a product."""

    def __init__(self, *readers: nn.Module) -> None:
        super().__init__(16, 1)
        self.readers = nn.ModuleList(readers)

    def forward(self, x0: Tensor) -> Tensor:
        x = super().forward(x0)
        given = [(x, x0) if isinstance(reader, Second) else (x,) for reader in self.readers]
        return torch.stack([r(*some) for r, some in zip(self.readers, given, strict=True)])


class Late(nn.Module):
    """A layer that reads something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.relu())
        return y


class Second(nn.Module):
    """A layer that reads another input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = x + self.layer(y)
        return found


class Opaque(nn.Module):
    """A module whose forward cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) if x.sum() > 0 else x
        return y


def test_a_module_may_begin_with_the_layer() -> None:
    """Otherwise a compiler may compute the cross in the kernel of its reader."""
    layer = nn.Linear(16, 16)
    norm = nn.Sequential(nn.LayerNorm(16), layer)
    for readers, tensors in (
        ([nn.Sequential(layer, nn.ReLU())], 3), ([nn.Sequential(nn.Sequential(layer))], 3),
        ([norm, Late()], 1), ([norm], 1), ([nn.Sequential()], 1), ([Opaque()], 1),
        ([norm, nn.Sequential(layer)], 3), ([Second()], 1),
    ):  # fmt: skip
        assert [x[2] for x in found_in(Read(*readers))] == [tensors], readers
