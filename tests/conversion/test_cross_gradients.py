"""Gradients behind crosses in conversions: chosen by times and errors, told, and given up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lokakern
from lokakern.conversion.convert import Conversion
from lokakern.conversion.cross_gradients import (
    LAUNCH_US,
    CrossGradients,
    TimedGradients,
    lacks_time,
    last_layers,
)
from lokakern.conversion.routes import GEMMS, grad_input_problem
from lokakern.conversion.tune import Tuning, tune
from lokakern.conversion.variants import as_plain
from lokakern.functional.norm_gradient import KERNEL as GRADIENT_KERNEL
from lokakern.nn.compiled_form import SUMS, kernels_behind_cross
from lokakern.nn.crossed_gradients import KERNEL
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import PLAIN, SHARED
from lokakern.probe.problems import way_of
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS
from lokakern.selection import dispatcher
from lokakern.types import Device, Format, Granularity, Problem
from lokakern.workloads.gemm_cases import fused_case
from lokakern.workloads.gemm_gradient_cases import grad_weight_case
from lokakern.workloads.norm_cases import cross_backward_case
from lokakern.workloads.suite_files import suite_from_file
from tests.conversion.test_tune import On, Script
from tests.nn.test_crossed_gradients import OP, distance, exact, run
from tests.support.conversions import BLOCK_KERNEL as BLOCK
from tests.support.conversions import H200, report_of, verdict
from tests.support.measurements import BF16, Book, accuracy, time
from tests.support.measurements import ROW as ROW_KERNEL

N, RANK = 256, 32
M = (128, 256, 512)
GROUPS = "cuda.quantize_group+cuda.scaled_gemm_group"
RATE = 2e5  # bytes that the fastest kernel moves in a microsecond
convert = functools.partial(lokakern.convert, distribution="X1", device=H200)


class Cross(nn.Module):
    def __init__(self, bias: bool = True, n: int = N) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up = nn.Linear(n, RANK, bias=False), nn.Linear(RANK, n, bias)

    def forward(self, x0: Tensor) -> Tensor:
        return x0 * self.up(self.down(x0)) + x0  # type: ignore[no-any-return]


def model_of(bias: bool = True) -> nn.Module:
    return Cross(bias).bfloat16()


def moved(tensors: float, m: int) -> float:
    """Least time of so many tensors of one byte."""
    return tensors * m * N / RATE


def rows_of(
    m: int, *, cross: float = 2.0, bf16: float = 5.0, block: float = 3.0, row: float = 4.0,
    row_err: float | None = 0.04,
) -> list[Any]:  # fmt: skip
    """Times of the kernel and of both products at m, and errors that `M[0]` has not."""
    found = [time(KERNEL, crossed_problem(m), cross)]
    products = grad_input_problem(N, RANK)(m), grad_weight_case(m, N, RANK).problem
    for place, of in enumerate(products):
        found.append(time(BF16, of, bf16))
        for name, us in ((BLOCK, block), (GROUPS, block + 1), (ROW_KERNEL, row)):
            found.append(time(name, of, us))
            if row_err is not None and (place or m == M[0]):
                found.append(accuracy(name, of, row_err, only=("X1",)))
    return found


def crossed_problem(m: int, n: int = N) -> Problem:
    return cross_backward_case(m, n, Format.E4M3FN).problem


def fastest_mover() -> list[Any]:
    problem = make_problem(
        "quantize", (2048, 8 * N), out_format=Format.E4M3FN, out_granularity=Granularity.ROW
    )
    return [time("cuda.quantize_row", problem, problem.bytes_moved / RATE)]


@pytest.fixture
def known(tmp_path: Path) -> Iterator[Book]:
    """The kernel is worth it at the first two m."""
    rows = [*rows_of(M[0]), *rows_of(M[1]), *rows_of(M[2], cross=40.0), *fastest_mover()]
    book = Book(tmp_path / "rows.sqlite").write(*rows)
    yield book
    dispatcher.use_snapshot(None)


def kernels_of(handle: Conversion, site: str = "up") -> list[tuple[str, ...]]:
    layer = handle.model.get_submodule(site)
    assert isinstance(layer, Linear)
    return [kernels_behind_cross(layer.form, m) for m in M]


USED = [(BLOCK, BLOCK), (BLOCK, BLOCK), ()]
NOWHERE: list[tuple[str, ...]] = [(), (), ()]


def test_gradients_behind_a_cross_are_chosen_by_times(
    known: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = convert(model_of(), 0.06)
    assert kernels_of(handle) == USED and kernels_of(handle, "down") == NOWHERE
    assert list(handle.forms) == ["up"] and not handle.joined
    told = handle.explain("up")
    us, rival_us = 2.0 + 2 * 3.0 - moved(6, M[0]), 2 * 3.0 + moved(8, M[0])
    words = f"m={M[0]}: {us:.2f} us ({KERNEL}, {BLOCK}, {BLOCK}), {rival_us:.2f} us otherwise"
    assert words in told
    assert f"m={M[2]}: " in told and "not used: not faster beyond noise" in told
    assert KERNEL not in handle.explain("down")
    handle.table()
    told = " ".join(capsys.readouterr().out.split())
    assert "gradients of up behind crosses: 1.22x as fast" in told
    assert f"{KERNEL} quantizes them, at m={M[0]}, {M[1]}" in told
    layer = handle.model.get_submodule("up")
    handle.undo()
    assert type(layer) is nn.Linear and "form" not in vars(layer)


def test_a_compiled_step_of_the_model_runs_the_op(known: Book) -> None:
    model = model_of()
    convert(model, 0.06)
    x = torch.randn(M[0], N).bfloat16().requires_grad_()
    assert OP in run(model, x)[1]
    x = torch.randn(M[2], N).bfloat16().requires_grad_()
    assert OP not in run(model, x)[1]


def test_a_bias_counts_a_tensor_that_is_read_once_more(book: Book) -> None:
    """Between both sums only a layer with a bias gains."""
    m = 128
    us = moved(6 + 6 + 1, m)  # of the kernel; a bias adds two bytes to what it saves
    book.write(*rows_of(m, cross=us, bf16=1.5, block=1.0, row=1.2), *fastest_mover())
    found = [kernels_of(convert(model_of(bias), 0.06))[0] for bias in (True, False)]
    assert found == [(BLOCK, BLOCK), ()]


def test_products_that_were_timed_alone_count_so(book: Book) -> None:
    """With what the quantizer of the other operand moves; the whole compositions would lose."""
    m = M[2]
    whole = {"cross": 4.0, "bf16": 4.0, "block": 7.0, "row": 7.0}
    book.write(*rows_of(m, **whole), *rows_of(M[0]), *fastest_mover())
    assert kernels_of(convert(model_of(), 0.06))[2] == ()
    shapes = (m, RANK, N), (N, RANK, m)
    problems = (fused_case(*x, Granularity.GROUP, "X12", Format.E4M3FN) for x in shapes)
    alone = [time("cuda.scaled_gemm_block", case.problem, 1.5) for case in problems]
    book.write(*alone)
    handle = convert(model_of(), 0.06)
    rows = RANK * N + RANK * m  # elements of both right operands
    us = whole["cross"] + 2 * (LAUNCH_US + 1.5) + 3 * rows / RATE
    assert f"m={m}: {us:.2f} us" in handle.explain("up")
    assert kernels_of(handle)[2] == (BLOCK, BLOCK)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(RANK, N)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).sin()  # type: ignore[no-any-return]


def test_a_gradient_without_a_cross_is_quantized_once_for_both_products(book: Book) -> None:
    """The compiler's bytes do not count there, but the sums for a bias."""
    m = M[2]
    problem = cross_backward_case(m, N, Format.E4M3FN, is_crossed=False).problem
    shapes = (m, RANK, N), (N, RANK, m)
    problems = (fused_case(*x, Granularity.GROUP, "X12", Format.E4M3FN) for x in shapes)
    gemms = [time("cuda.scaled_gemm_block", case.problem, 2.5) for case in problems]
    products = rows_of(m, cross=4.0, bf16=9.0, block=12.0, row=12.0)
    book.write(*products, *rows_of(M[0]), *gemms, time(KERNEL, problem, 4.0), *fastest_mover())
    model = Plain().bfloat16()
    handle = convert(model, 0.06)
    assert kernels_of(handle) == [(), (), (SHARED + BLOCK, SHARED + BLOCK)]
    us = 4.0 + 2 * (LAUNCH_US + 2.5) + 3 * RANK * (N + m) / RATE
    words = f"m={m}: {us:.2f} us ({KERNEL}, {BLOCK}, {BLOCK}), {2 * 9.0 + moved(2, m):.2f} us"
    assert words in handle.explain("up")
    x = torch.randn(m, RANK).bfloat16().requires_grad_()
    assert OP in run(model, x)[1]
    handle.undo()
    assert OP not in run(model, x)[1]


def test_both_products_change_or_none(book: Book) -> None:
    """A product without a kernel that reads 1x128 scales leaves the other one as it is."""
    m = M[0]
    book.write(*rows_of(m)[:8], *rows_of(m)[-2:], *rows_of(m)[8:9], *fastest_mover())
    handle = convert(model_of(), 0.06)
    assert kernels_of(handle) == NOWHERE
    assert "no kernel within the budget" in handle.explain("up")


def test_what_runs_instead_may_be_other_kernels_in_fp8(book: Book) -> None:
    book.write(*rows_of(M[0], row=2.0), *rows_of(M[1]), *fastest_mover())
    assert kernels_of(convert(model_of(), 0.06)) == [(), (BLOCK, BLOCK), ()]


@pytest.mark.parametrize("budget", [0.03, None])
def test_errors_decide(known: Book, budget: float | None) -> None:
    assert kernels_of(convert(model_of(), budget)) == NOWHERE


def test_errors_that_are_unknown_or_too_large_admit_no_kernel(book: Book) -> None:
    book.write(*rows_of(M[0], row_err=None), *rows_of(M[1], row_err=0.07), *fastest_mover())
    assert kernels_of(convert(model_of(), 0.06)) == NOWHERE


@pytest.mark.parametrize("safety", ["safe", "unsafe"])
def test_verdicts_of_a_report_decide(known: Book, safety: str) -> None:
    row_err = 0.04 if safety == "safe" else 0.2
    scales = way_of(Granularity.GROUP, Granularity.BLOCK, KERNELS[BLOCK].accumulation)
    verdicts = [verdict(gemm, scales, safety, row_err, "up") for gemm in GEMMS]
    handle = lokakern.convert(model_of(), report_of(*verdicts), device=H200)
    assert kernels_of(handle) == (USED if safety == "safe" else NOWHERE)


def test_a_kernel_that_was_not_measured_there_is_not_used(book: Book) -> None:
    rows = rows_of(M[0])
    book.write(*rows[1:], *fastest_mover())
    assert "gradients behind the cross" not in convert(model_of(), 0.06).explain()
    book.write(time(KERNEL, crossed_problem(128, 2 * N), 1.0))
    handle = convert(model_of(), 0.06)
    assert kernels_of(handle) == NOWHERE
    assert f"{KERNEL} was not measured at n={N}" in handle.explain("up")


def test_what_was_not_measured_is_in_the_suite_of_the_model(known: Book, tmp_path: Path) -> None:
    handle = convert(model_of(), 0.06)
    assert "cross_gradient" not in handle.suite([M[0], 136])
    (tmp_path / "missing.toml").write_text(handle.suite([M[0], 1024]))
    suite = suite_from_file(tmp_path / "missing.toml")
    found = [case.problem for case in suite.cases(Format.E4M3FN)]
    crossed = [problem for problem in found if problem.op == "norm_backward"]
    assert crossed == [crossed_problem(1024)]
    others = convert(model_of(), 0.06, inference=True), convert(model_of(), 0.06, check="100:64")
    assert not any("cross_gradient" in other.suite([1024]) for other in others)
    assert lacks_time(1024, N, dispatcher.device_named(H200), "compiled")
    b200 = Device("nvidia", "NVIDIA B200", "sm_100", 148, 178)
    assert not lacks_time(1024, N, b200, "compiled")  # for which there is no such kernel


@pytest.mark.parametrize(
    "options",
    [
        {"inference": True}, {"regime": "eager"}, {"main_grads": True}, {"scaling": "delayed"},
        {"check": "100:64"}, {"dtype": torch.float16, "as_float32": True},
    ],
)  # fmt: skip
def test_other_conversions_have_none(known: Book, options: dict[str, Any]) -> None:
    model = model_of()
    if options.pop("as_float32", False):
        model = model.float()
    handle = convert(model, 0.06, **options)
    assert kernels_of(handle) == NOWHERE and not handle._behind_crosses


def test_forced_kernels_and_models_without_crosses_have_none(known: Book) -> None:
    handle = lokakern.convert(model_of(), kernels="1x128", device=H200)
    assert kernels_of(handle) == NOWHERE
    model = nn.Sequential(nn.Linear(RANK, N), nn.ReLU()).bfloat16()
    assert not convert(model, 0.06)._behind_crosses


def test_float32_weights_and_graphs_have_them_too(known: Book) -> None:
    """Under autocast, and in CUDA graphs."""
    assert kernels_of(convert(model_of().float(), 0.06)) == USED
    assert kernels_of(convert(model_of(), 0.06, regime="compiled-graph")) == USED


def test_a_range_of_rows_limits_them(known: Book) -> None:
    assert kernels_of(convert(model_of(), 0.06, m_range=(200, 4096))) == [(), USED[1], ()]
    handle = convert(model_of(), 0.06)
    layer: Any = handle.model.get_submodule("up")
    assert kernels_behind_cross(layer.form, 2 * M[0] - 128) == USED[0]
    assert kernels_behind_cross(layer.form, 384) == ()  # between two different choices


def test_they_join_sums_of_biases(known: Book, tmp_path: Path) -> None:
    problem = make_problem("norm_backward", (512, 8), epilogue="bias+relu",
                           out_format=Format.BFLOAT16)  # fmt: skip
    known.write(time(GRADIENT_KERNEL, problem, 3.0))
    handle = convert(model_of(), 0.06)
    assert handle.forms["up"].startswith(SUMS) and kernels_of(handle) == USED
    assert "off: a tuning" not in handle.explain("up")
    handle.use_routes({}, has_relus=False)  # as tuning decides
    assert not handle.forms and "off: a tuning" in handle.explain("up")
    handle.use_routes({}, has_relus=True)
    assert kernels_of(handle) == USED
    Book(tmp_path / "others.sqlite").write(
        *rows_of(M[0], cross=90.0), *fastest_mover(), time(GRADIENT_KERNEL, problem, 3.0)
    )
    handle.refresh()
    assert handle.forms == {"up": SUMS}


def test_a_watch_with_switches_turns_them_off(known: Book) -> None:
    """Switches are those of routes, which these kernels are not."""
    model = model_of()
    handle = convert(model, 0.06)
    with handle.watch(budget=0.06) as watch:
        assert kernels_of(handle) == NOWHERE
        assert ("up", "grad_weight") not in watch._kernels
    handle.refresh()
    assert kernels_of(handle) == USED
    handle.use_routes({"up": tuple(as_plain(r, "a test") for r in handle.sites["up"].routes)})
    assert kernels_of(handle) == USED
    with (
        pytest.warns(UserWarning, match="no layer is quantized"),
        handle.watch(budget=0.06) as watch,
    ):
        assert watch.unseen == []


def test_a_watch_of_graphs_judges_them(known: Book) -> None:
    model = model_of()
    handle = convert(model, 0.06, regime="compiled-graph")
    assert handle.sites["up"].routes[2].text == PLAIN  # these kernels alone quantize it
    x = torch.randn(M[0], N).bfloat16().requires_grad_()
    with handle.watch(budget=0.06, every=2) as watch:
        step = torch.optim.SGD(model.parameters(), 0.0).step  # which ends one
        judged = {("up", "grad_input"), ("up", "grad_weight")}
        assert watch._kernels == dict.fromkeys(judged, (BLOCK,))
        # A sampled step needs the gradient itself.
        for has_op in (False, True, False, True):
            found, text, _ = run(model, x)
            assert (OP in text) is has_op
            for one, other in zip(found, exact(model, x), strict=True):
                assert distance(one, other) < 0.05
            step()
        watch.apply(wait=True)
        assert {(e.site, e.gemm) for e in watch.events} == judged and not watch.in_bf16
        for places in ([("up", "grad_weight")], [("up", "grad_input")], sorted(judged)):
            handle.turn(places, False)
            assert kernels_of(handle) == NOWHERE and OP not in run(model, x)[1]
            handle.turn(places, True)
            assert kernels_of(handle) == USED


def tuned(cost: Callable[[On], float]) -> tuple[Tuning, Conversion]:
    model = model_of()
    handle = convert(model, 0.06)
    x = torch.randn(M[0], N).bfloat16()

    class Timer(Script):
        def on(self) -> On:
            is_on = kernels_of(self.handle) == USED
            return super().on() | ({("forms", "relu")} if is_on else set())

    def step() -> None:
        model(x).sum().backward()

    return tune(handle, step, make_timer=Timer(handle, cost)), handle


@pytest.mark.parametrize("gain_us", [3.0, -3.0])
def test_tuning_keeps_them_if_they_gain(known: Book, tmp_path: Path, gain_us: float) -> None:
    found, handle = tuned(lambda on: 100.0 - gain_us * sum(gemm == "relu" for _, gemm in on)
                          - 5.0 * sum(gemm != "relu" for _, gemm in on))  # fmt: skip
    group = next(t for t in found.groups if t.group.gemm == "relu")
    assert group.group.kernels == (KERNEL,) and group.group.sites == ("up",)
    assert group.is_kept is (gain_us > 0)
    assert kernels_of(handle) == (USED if gain_us > 0 else NOWHERE)
    found.save(tmp_path / "tuned.json")
    other = convert(model_of(), 0.06, tuned=tmp_path / "tuned.json")
    assert kernels_of(other) == kernels_of(handle)


def test_the_last_layers_of_crosses_are_found() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.layer(x) + x if x.sum() > 0 else x

    cross = Cross()
    assert list(last_layers([Branching(), cross, nn.Sequential(cross.down)])) == [cross.up]


def test_times_within_noise_are_no_gain() -> None:
    timed = TimedGradients(128, (BLOCK, BLOCK), 9.8, 0.1, 10.0, 0.1, (BF16, BF16))
    assert not timed.is_faster and timed._replace(us=9.0).is_faster
    assert CrossGradients((timed,)).form(SUMS) == SUMS and CrossGradients((timed,)).form("") == ""
    assert CrossGradients((timed._replace(us=9.0),)).form("dot") == "dot"
