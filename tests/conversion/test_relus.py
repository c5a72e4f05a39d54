"""Relus in products of a conversion: where, by which measurements, and tuned as one group."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lokakern
from lokakern.conversion import tuning_file
from lokakern.conversion.compile_backend import compile_graph, explain
from lokakern.conversion.convert import Conversion
from lokakern.conversion.tune import Tuning, tune
from lokakern.conversion.variants import OTHER_FORM
from lokakern.errors import ChoicesError
from lokakern.functional.norm_gradient import KERNEL as GRADIENT_KERNEL
from lokakern.nn.compiled_form import DOT, LOGIT, SUMS
from lokakern.nn.linear import Linear
from lokakern.nn.rectified import KERNEL
from lokakern.nn.routed_matmul import kernel_at
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS
from lokakern.selection import dispatcher
from lokakern.types import Format
from tests.conversion.test_compiled_chains import OPTIONS, Compiled
from tests.conversion.test_tune import M, On, Script
from tests.support.conversions import H200, K, N, measured
from tests.support.measurements import Book, time

RELUS = ("relus", "relu")
BF16 = Format.BFLOAT16
INPUT = torch.randn(M, K, generator=torch.Generator().manual_seed(0)).bfloat16()
convert = functools.partial(lokakern.convert, distribution="X1", device=H200)


@pytest.fixture
def known(tmp_path: Path) -> Iterator[Book]:
    relu = time(KERNEL, make_problem("gemm_norm", (512, 8, 8), epilogue="bias+relu"), 3.0)
    book = Book(tmp_path / "rows.sqlite").write(*measured(), relu)
    book.use()
    yield book
    dispatcher.use_snapshot(None)


def model_of() -> nn.Sequential:
    """Only layer 2 was measured: from 256 rows on it is quantized."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, K), nn.ReLU(), nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 40), nn.ReLU(),
        nn.Linear(40, 1),
    ).bfloat16()  # fmt: skip


def ms(route: str) -> list[bool]:
    return [bool(kernel_at(route, m)) for m in (16, 128, 512)]


def test_products_that_nothing_around_quantizes_apply_relus(known: Book) -> None:
    model = model_of()
    handle = convert(model, 0.06)
    assert {name: ms(route) for name, route in handle.rectified.items()} == {
        "0": [True, True, False], "2": [True, True, False], "4": [True, True, True],
    }  # fmt: skip
    handle.undo()
    assert type(model) is nn.Sequential


def test_a_model_of_which_nothing_was_measured_has_them(
    known: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 8)).bfloat16()
    handle = convert(model, 0.06, inference=True)
    assert list(handle.rectified) == ["0"]
    handle.table()
    assert f"{KERNEL} applies the relu behind 0" in capsys.readouterr().out


def test_no_relu_where_the_kernel_was_not_timed_or_sequences_are_left_alone(
    known: Book, tmp_path: Path
) -> None:
    assert convert(model_of(), 0.06).rectified
    assert not convert(model_of(), 0.06, between=False).rectified
    assert not convert(model_of(), kernels="bf16", distribution=None).rectified
    assert convert(model_of().float(), 0.06).rectified  # for autocast
    Book(tmp_path / "others.sqlite").write(*measured()).use()
    assert not convert(model_of(), 0.06).rectified


def test_a_watch_changes_no_code_of_the_steps_that_it_does_not_sample(known: Book) -> None:
    model = model_of()
    handle = convert(model, 0.06, regime="compiled-graph")
    x, codes = torch.randn(128, 32).bfloat16(), list[str]()

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        codes.append(graph.code)
        return graph.forward

    def steps(count: int) -> list[str]:
        codes.clear()
        call = torch.compile(model, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        for _ in range(count):
            call(x).float().square().mean().backward()
            optimizer.step()
        return codes.copy()

    (plain,) = steps(1)
    with handle.watch(every=2):
        sampled, other = steps(4)
    assert (other, "relu" in plain, "relu" in sampled) == (plain, False, True)


class ReluScript(Script):
    """Times that also follow from the relus."""

    def on(self) -> On:
        is_on = any(kernel_at(route, M) for route in self.handle.rectified.values())
        return super().on() | ({RELUS} if is_on else set())


def predicted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)  # type: ignore[no-any-return]


def tuned(
    cost: Callable[[On], float], made: Callable[[], nn.Module] = model_of
) -> tuple[Tuning, Conversion, nn.Module]:
    model = made()
    handle = convert(model, 0.06)
    step = functools.partial(predicted, model, INPUT[:, : next(model.parameters()).shape[1]])
    return tune(handle, step, make_timer=ReluScript(handle, cost)), handle, model


def cost_of(gain_us: float) -> Callable[[On], float]:
    gains = {"relu": gain_us, "output": 5.0, "grad_input": 1.0, "grad_weight": 1.0}
    return lambda on: 100.0 - sum(gains[gemm] for _, gemm in on)


def test_tuning_keeps_relus_that_gain(known: Book, tmp_path: Path) -> None:
    found, handle, _ = tuned(cost_of(2.0))
    outcomes = {t.group.gemm: t for t in found.groups}
    assert list(outcomes)[-1] == "relu" and outcomes["relu"].is_kept
    assert outcomes["relu"].group.sites == ("4",) and outcomes["relu"].group.kernels == (KERNEL,)
    assert handle.has_relus
    found.save(tmp_path / "tuned.json")
    other = convert(model_of(), 0.06, tuned=tmp_path / "tuned.json")
    assert other.rectified == handle.rectified


def test_tuning_drops_relus_that_lose(known: Book, tmp_path: Path) -> None:
    found, handle, _ = tuned(cost_of(-2.0))
    outcomes = {t.group.gemm: t for t in found.groups}
    assert outcomes["output"].is_kept and not outcomes["relu"].is_kept
    assert not handle.has_relus and not handle.rectified
    found.save(tmp_path / "tuned.json")
    other = convert(model_of(), 0.06, tuned=tmp_path / "tuned.json")
    assert not other.rectified
    other.refresh()
    assert other.rectified


@pytest.mark.parametrize("gain_us", [2.0, -2.0])
def test_a_tuning_with_relus_is_for_the_kernel_that_was_timed(
    known: Book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gain_us: float
) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    tuned(cost_of(gain_us))[0].save(new)
    file = tuning_file.read(new)
    assert file.kernels[KERNEL] == KERNELS[KERNEL].digest
    kernels = {name: digest for name, digest in file.kernels.items() if name != KERNEL}
    file = msgspec.structs.replace(file, kernels=kernels)
    tuning_file.write(msgspec.structs.replace(file, digest=tuning_file._digest(file)), old)
    assert bool(convert(model_of(), 0.06, tuned=old).rectified) == (gain_us > 0)
    monkeypatch.setitem(KERNELS, KERNEL, dataclasses.replace(KERNELS[KERNEL], modules=()))
    with pytest.raises(ChoicesError, match=f"the digest of {KERNEL} is"):
        convert(model_of(), 0.06, tuned=new)


def test_a_model_that_does_not_gain_is_that_of_nn_linear(known: Book) -> None:
    found, handle, model = tuned(lambda on: 100.0 + len(on))
    assert found.after is None and not handle.rectified
    assert torch.equal(predicted(model, INPUT[:, :32]), predicted(model_of(), INPUT[:, :32]))


def test_no_relu_appears_where_quantized_products_were_dropped(known: Book) -> None:
    """There was no group of relus, because the only layer before one quantizes at these rows."""

    def quantized() -> nn.Module:
        return nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, 1)).bfloat16()

    found, handle, _ = tuned(lambda on: 100.0 + len(on), quantized)
    assert [t.group.gemm for t in found.groups] == ["output"]
    assert found.after is None and not handle.rectified


def with_gradients(known: Book) -> None:
    problem = make_problem("norm_backward", (512, 8), epilogue="bias+relu", out_format=BF16)
    known.write(time(GRADIENT_KERNEL, problem, 3.0)).use()


def test_tuning_decides_about_gradients_behind_layers_with_relus(
    known: Book, tmp_path: Path
) -> None:
    with_gradients(known)
    found, handle, _ = tuned(cost_of(2.0))
    group = next(t.group for t in found.groups if t.group.gemm == "relu")
    assert group.kernels == (KERNEL, GRADIENT_KERNEL, OTHER_FORM) and group.sites == (
        "4",
        "0",
        "2",
        "6",
    )
    assert handle.joined == dict.fromkeys("024", "none relu")
    found.save(tmp_path / "tuned.json")
    assert GRADIENT_KERNEL in (tmp_path / "tuned.json").read_text()
    assert convert(model_of(), 0.06, tuned=tmp_path / "tuned.json").joined == handle.joined


def test_gradients_behind_layers_are_joined_in_training_where_their_kernel_was_timed(
    known: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    def normed() -> nn.Sequential:
        return nn.Sequential(nn.Linear(32, K), nn.LayerNorm(K), nn.ReLU(), nn.Linear(K, N),
                             nn.ReLU(), nn.Linear(N, 1)).bfloat16()  # fmt: skip

    assert not convert(normed(), 0.06).joined
    with_gradients(known)
    model = normed()
    handle = convert(model, 0.06)
    assert handle.joined == {"0": "layer relu linear", "3": "none relu"}
    assert handle.forms == {"0": SUMS, "3": SUMS, "5": LOGIT}
    for options, forms in (({"inference": True}, {"5": LOGIT}), ({"between": False}, {})):
        other = convert(normed(), 0.06, **options)
        assert not other.joined and other.forms == forms
    assert convert(normed(), None, inference=True).forms == {"5": DOT}  # as it is, but for layouts
    assert not convert(normed(), kernels="row").forms
    assert convert(normed().float(), 0.06).forms == handle.forms  # for autocast
    handle.use_routes({}, has_relus=False)  # as tuning decides
    assert not handle.joined and not handle.rectified and not handle.forms
    assert not any(module.form for module in model if isinstance(module, Linear))
    handle.use_routes({}, has_relus=True)
    assert handle.forms == {"0": SUMS, "3": SUMS, "5": LOGIT}
    assert model[5].form == LOGIT
    handle.table()
    told = " ".join(capsys.readouterr().out.split())
    assert "compiled code: sums over products of elements in 5" in told
    assert "compiled training: gradients of biases are summed apart" in told
    handle.undo()
    assert type(model) is nn.Sequential
    assert [type(model[place]) for place in (0, 3, 5)] == 3 * [nn.Linear]


def test_gradients_of_modified_models_and_of_layers_with_their_own_norm_are_joined(
    known: Book,
) -> None:
    with_gradients(known)
    model = nn.Sequential(
        nn.Linear(32, K), nn.LayerNorm(K), nn.SiLU(), nn.Linear(K, N), nn.SiLU(),
        nn.Linear(N, 40), nn.RMSNorm(40),
    ).bfloat16()  # fmt: skip
    assert lokakern.mods.apply(model, [lokakern.mods.HardSwish()]).changed
    found = {"0": "layer hardswish linear", "3": "none hardswish", "5": "rms none"}
    assert convert(model, 0.06).joined == found
    lokakern.mods.apply(model, [lokakern.mods.NoBias(keep=())])
    del found["3"]
    kept = convert(model, 0.06).joined
    assert kept == {name: text for name, text in found.items() if name in kept} and "0" in kept
    alone = nn.ModuleDict({"a": lokakern.LinearNormAct(32, K), "b": lokakern.Linear(K, 1)})
    handle = convert(alone.bfloat16(), 0.06)
    assert handle.joined == {"a": "layer relu"} and handle.forms == {"b": LOGIT}
    for options in ({"inference": True}, {"between": False}):
        assert not convert(copy.deepcopy(alone), 0.06, **options).joined
    handle.use_routes({}, has_relus=False)
    assert not handle.joined and not alone["a"].form
    handle.use_routes({}, has_relus=True)
    handle.undo()
    assert not alone["a"].form


def test_tuning_decides_about_forms_of_layers(known: Book) -> None:
    """A layer with one output, without any relu: one group, which has no kernel's name."""

    def head() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 1)).bfloat16()

    with_gradients(known)
    found, handle, _ = tuned(lambda on: 100.0 + len(on), head)
    assert [(t.group.gemm, t.group.kernels, t.group.sites) for t in found.groups] == [
        ("relu", (OTHER_FORM,), ("0",))
    ]
    assert found.after is None and not handle.forms
    found.table()


# ---- the backend of torch.compile ----


class Rectified(Compiled):
    """A model without gradients that the backend compiled by itself."""

    def __init__(self, model: Callable[..., Any], dynamic: bool = False, **options: Any) -> None:
        torch._dynamo.reset()
        super().__init__(model, dynamic, **options)

    def __call__(self, *inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return super().__call__(*inputs)

    @property
    def relus(self) -> int:
        """How many products have one."""
        return len(self.calls_of(torch.ops.lokakern.rectified_layer.default))


def inputs(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize(("m", "relus"), [(16, 3), (512, 1)])
def test_the_backend_has_the_relus_of_the_converted_model(m: int, relus: int, known: Book) -> None:
    model, x = model_of(), inputs(m, 32)
    converted = copy.deepcopy(model)
    convert(converted, 0.06, inference=True)
    call = Rectified(model)
    y = call(x)
    with torch.no_grad():
        expected = torch.compile(converted, backend="aot_eager", dynamic=False)(x)
    assert call.relus == relus
    assert torch.equal(y, expected) or m == 512  # whose weights it quantizes in each call
    assert f"4 (m={m}, n=40, k={N}): {KERNEL} applies the relu behind it" in explain()


def by_a_function(layer: Any, x: Tensor) -> Tensor:
    return F.relu(layer(x), inplace=True)


def by_another(layer: Any, x: Tensor) -> Tensor:
    return torch.relu(layer(x))


def by_a_method(layer: Any, x: Tensor) -> Tensor:
    return layer(x).relu_()  # type: ignore[no-any-return]


def by_addmm(layer: Any, x: Tensor) -> Tensor:
    return torch.addmm(layer.bias, x.flatten(0, -2), layer.weight.t()).relu()


def read_twice(layer: Any, x: Tensor) -> Tensor:
    y = layer(x)
    return y.relu() + y  # type: ignore[no-any-return]


def of_columns(layer: Any, x: Tensor) -> Tensor:
    return F.relu(layer(x)[..., :4])


def written(layer: Any, x: Tensor) -> Tensor:
    x = x * 1
    y = layer(x)
    x.zero_()
    return y.relu() + x.sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("sizes", [(16, 32), (2, 8, 32)])
@pytest.mark.parametrize(
    ("run", "relus"),
    [
        (by_a_function, 1), (by_another, 1), (by_a_method, 1), (by_addmm, 1), (read_twice, 0),
        (of_columns, 0), (written, 0),
    ],
)  # fmt: skip
def test_ways_to_write_a_relu(
    run: Callable[[Any, Tensor], Tensor], relus: int, sizes: tuple[int, ...], known: Book
) -> None:
    layer, x = nn.Linear(32, 40).bfloat16(), inputs(*sizes)
    call = Rectified(functools.partial(run, layer))
    assert torch.equal(call(x), run(layer, x.clone())) and call.relus == relus


def test_what_convert_leaves_is_left(known: Book) -> None:
    def relus(model: nn.Module, x: Tensor, **options: Any) -> int:
        call = Rectified(model, **options)
        with torch.no_grad():
            assert torch.equal(call(x), model(x))
        return call.relus

    layer = nn.Sequential(nn.Linear(32, 40), nn.ReLU()).bfloat16()
    assert relus(layer, inputs(16, 32)) == 1
    assert relus(layer, inputs(16, 32), budget=None) == 1  # as it quantizes nothing
    assert relus(layer, inputs(16, 32), skip="0") == 0
    assert relus(layer, inputs(8, 32, 2).transpose(1, 2)) == 0  # rows with gaps
    narrow = nn.Sequential(nn.Linear(10, 40), nn.ReLU()).bfloat16()
    assert relus(narrow, inputs(16, 10)) == 1  # padded
    for sizes in ((32, 20), (36, 40), (20, 40)):
        few = nn.Sequential(nn.Linear(*sizes), nn.ReLU()).bfloat16()
        assert relus(few, inputs(16, sizes[0])) == 0
    assert (
        relus(nn.Sequential(nn.Linear(32, 40, bias=False), nn.ReLU()).bfloat16(), inputs(16, 32))
        == 0
    )
    assert relus(layer.float(), inputs(16, 32).float()) == 0
    layer.bfloat16()
    call = Rectified(layer)
    assert call.call(inputs(16, 32)).requires_grad and call.relus == 0  # training


@pytest.mark.parametrize(("place", "relus"), [(0, 1), (2, 0)])
def test_of_any_m_a_relu_has_to_gain_at_all(place: int, relus: int, known: Book) -> None:
    """Layer 2 is quantized from 256 rows on."""
    layer: Any = model_of()[place]
    model = nn.Sequential(layer, nn.ReLU())
    call = Rectified(model, dynamic=True)
    for m in (16, 128):
        x = inputs(m, layer.in_features)
        with torch.no_grad():
            assert torch.equal(call(x), model(x))
    assert call.relus == relus


def test_a_device_without_a_time_of_the_kernel_has_none(tmp_path: Path) -> None:
    Book(tmp_path / "rows.sqlite").write(*measured()).use()
    call = Rectified(model_of())
    call(inputs(16, 32))
    assert call.relus == 0
    dispatcher.use_snapshot(None)


@pytest.mark.rest
def test_inductor_calls_the_product_with_its_relu(known: Book) -> None:
    layer, x = nn.Sequential(nn.Linear(32, 40), nn.ReLU()).bfloat16(), inputs(16, 32)
    torch._dynamo.reset()
    call = torch.compile(layer, backend=compile_graph, options=OPTIONS, fullgraph=True)
    with torch.no_grad(), torch.profiler.profile() as profile:
        y = call(x)
        assert torch.equal(y, layer(x))
    assert any(event.name == "aten::_addmm_activation" for event in profile.events())
