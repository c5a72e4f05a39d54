"""Conversions of layers whose sizes nobody measured, by the time model."""

from __future__ import annotations

import itertools
import tomllib
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lokakern
from lokakern import mods
from lokakern.bench.fp8_gain.gain import _problems, worth
from lokakern.bench.fp8_gain.products import Product, products_from_file, suite_of
from lokakern.conversion.convert import Conversion
from lokakern.conversion.routes import GEMMS, problem_of
from lokakern.nn.routed_matmul import read_route
from lokakern.registry.register import KERNELS
from lokakern.selection import dispatcher
from lokakern.types import ErrorBudget, Format
from lokakern.workloads.suite_files import suite_from_file

H200 = "NVIDIA H200"
UNMEASURED, MEASURED, ODD = (2560, 1536), (2048, 2048), (2561, 1535)  # k and n


@pytest.fixture(autouse=True)
def predicting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOKAKERN_PREDICT", "1")
    dispatcher.use_snapshot(None)
    yield
    dispatcher.use_snapshot(None)


def converted(
    k: int, n: int, budget: float = 0.06, inference: bool = True, device: str = "meta",
    m_range: tuple[int, int] | None = None,
) -> Conversion:  # fmt: skip
    """A converted layer; routes need no data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(k, n, dtype=torch.bfloat16, device=device))
    return lokakern.convert(
        model, budget, inference=inference, device=H200, regime="compiled-graph", m_range=m_range
    )


def texts(found: Conversion) -> dict[str, str]:
    return {r.gemm: r.text for r in found.sites["0"].routes}


def test_a_layer_of_an_unmeasured_size_is_quantized_where_the_lower_end_gains() -> None:
    found = converted(*UNMEASURED, inference=False)
    routes = {r.gemm: r for r in found.sites["0"].routes}
    assert [*routes] == [*GEMMS]
    for gemm in GEMMS[:2]:
        assert "quantize" in routes[gemm].text
        assert "predicted at the lower end of an interval, not measured" in routes[gemm].why
    choices = {c.m: c for c in routes["output"].choices}
    assert [*choices] == [256, 1024, 4096, 16384, 65536, 262144]
    small, large = choices[256], choices[65536]
    assert small.kernel == "torch.bf16" and large.kernel != "torch.bf16"
    plain = large.table.plain_at(65536)
    assert plain is not None and large.latency_us is not None
    asked = lokakern.dispatch("gemm", (65536, 1536, 2560), 0.06, device=H200, epilogue="bias",
                              regime="compiled-graph")  # fmt: skip
    assert asked.predicted is not None and asked.predicted.low > 1
    assert plain.latency_us / large.latency_us <= asked.predicted.speedup
    told = large.explain()
    assert "us (estimated, compiled-graph)" in told
    assert "time: predicted, at the lower end of its speedup; the kernel itself was not" in told


@pytest.mark.parametrize("m_range", [(8192, 8192), (9000, 10_000)])
def test_a_range_between_the_usual_m_is_predicted_at_its_ends(m_range: tuple[int, int]) -> None:
    (route, *_) = converted(*UNMEASURED, m_range=m_range).sites["0"].routes
    assert [choice.m for choice in route.choices] == sorted(set(m_range))
    assert "quantize" in route.text and "predicted at the lower end" in route.why
    at = route.choices[0]
    plain = at.table.plain_at(at.m)
    (whole, *_) = converted(*UNMEASURED).sites["0"].routes
    assert plain is not None and plain == whole.choices[0].table.plain_at(at.m)  # not listed there
    assert not converted(*UNMEASURED, m_range=(8, 8)).sites["0"].routes[0].text


def test_measured_sizes_take_facts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with_model = texts(converted(*MEASURED, inference=False))
    monkeypatch.setenv("LOKAKERN_PREDICT", "0")
    dispatcher.use_snapshot(None)
    assert texts(converted(*MEASURED, inference=False)) == with_model
    assert not any(texts(converted(*UNMEASURED, inference=False)).values())


def test_times_of_one_form_come_before_predictions_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of most layers the product without a bias was measured, and with some forms of the weight."""
    sizes = ((2048, 3200), (3456, 512), (1024, 1024), (512, 1024), (4096, 4096), (512, 256))
    found = []
    for switch in ("1", "0"):
        monkeypatch.setenv("LOKAKERN_PREDICT", switch)
        dispatcher.use_snapshot(None)
        found.append([texts(converted(k, n, inference=x)) for n, k in sizes for x in (True, False)])
    assert found[0] == found[1]
    assert any(text for routes in found[0] for text in routes.values())


def test_what_was_predicted_is_still_to_be_measured() -> None:
    found = converted(*UNMEASURED)
    assert found.sites["0"].routes[0].is_predicted
    assert "k = 2560" in found.suite([8192])
    assert converted(*MEASURED).suite([8192]) == ""


def test_unaligned_sizes_are_not_predicted() -> None:
    """The reason names the regime of convert, and what to do, not the nearest of other sizes."""
    found = converted(*ODD, inference=False)
    assert not any(texts(found).values())
    output, grad_input, grad_weight = (route.why for route in found.sites["0"].routes)
    for why in (output, grad_input):
        assert (
            why.startswith("nothing was measured at n=") and ", compiled-graph, and convert" in why
        )
        assert "unaligned rows: mods.Pad, before it, makes them n=" in why
    assert grad_weight.endswith("unaligned rows: mods.Pad, before it, aligns them")
    n, k = (1536, 2576)
    assert output.endswith(f"makes them n={n} k={k}") and grad_input.endswith(f"n={k} k={n}")


@pytest.mark.parametrize("is_padded", [False, True])
def test_pad_is_not_recommended_where_it_leaves_a_layer_alone(is_padded: bool) -> None:
    model = nn.Sequential(nn.Linear(1500, 1504), nn.Linear(1500, 1)).bfloat16()
    if is_padded:
        mods.apply(model, [mods.Pad(16)])
    rows = lokakern.convert(model, 0.06, inference=True, device=H200).choices
    whys = {row["site"]: row["why"] for row in rows if row["gemm"] == "output"}
    assert whys["1"].endswith("convert takes no predictions of unaligned rows")
    assert ("makes them n=1504 k=1504" in whys["0"]) == (not is_padded)


def test_a_budget_below_the_bound_quantizes_nothing() -> None:
    found = converted(*UNMEASURED, budget=0.03)
    assert not any(texts(found).values())


def test_a_predicted_layer_runs() -> None:
    found = converted(*UNMEASURED, device="cpu")
    layer = found.sites["0"].module
    x = torch.randn(16384, UNMEASURED[0], dtype=torch.bfloat16)[:4096]
    with torch.no_grad():
        y, exact = layer(x), nn.functional.linear(x, layer.weight, layer.bias).float()
    error = ((y.float() - exact).norm() / exact.norm()).item()
    assert 0.01 < error < 0.06


@pytest.mark.parametrize("m_range", [None, (16384, 16384)])
def test_every_m_has_the_choice_of_dispatch(m_range: tuple[int, int] | None) -> None:
    """Between usual m nothing differs; some m take FP8, others do not."""
    n, k = 1024, 1728
    found = converted(k, n, inference=False, m_range=m_range)
    route = next(r for r in found.sites["0"].routes if r.gemm == "grad_input")
    _, segments, _ = read_route(route.text)
    starts = [start for start, _ in segments]
    kernels = set()
    for m in (
        (512, 4096, 8192, 10_000, 16384, 16_500, 20_480, 30_000) if m_range is None else m_range
    ):
        problem = problem_of("grad_input", m, n, k)
        asked = lokakern.dispatch(
            "gemm", (m, k, n), 0.06, device=H200, regime="compiled-graph", a=problem.a, b=problem.b
        )
        assert asked.predicted is not None
        wanted = "" if asked.kernel == "torch.bf16" else asked.kernel
        assert segments[bisect_right(starts, m) - 1][1] == wanted, m
        kernels.add(wanted)
    assert len(kernels) == 1 if m_range else kernels > {""}


def test_no_route_names_a_kernel_at_m_that_it_refuses() -> None:
    """Quantizers take fewer than 2^33 elements: m up to 2097151 at n = 4096."""
    n, k = 4096, 1680
    device = dispatcher.device_named(H200)
    for gemm, text in texts(converted(k, n, inference=False)).items():
        both = read_route(text)[1:] if text and gemm != "grad_weight" else ()
        for segments, m_of in zip(both, (16, 1), strict=False):
            for (_, name), (stop, _) in itertools.pairwise(segments):
                m = (stop - 1) // m_of * m_of
                m -= m_of == 1 and m % 16 == 0
                problem = problem_of(gemm, m, n, k)
                assert not name or KERNELS[name].refusal(problem, device) is None, (gemm, m)


def test_beyond_the_measured_m_a_range_is_predicted() -> None:
    """As by `dispatch`; without a range the measured m count alone."""
    k, n = MEASURED
    far = (100_000, 100_000)
    (route, *_) = converted(k, n, m_range=far).sites["0"].routes
    asked = lokakern.dispatch("gemm", (far[0], n, k), 0.06, device=H200, prepared=True,
                              regime="compiled-graph")  # fmt: skip
    assert asked.predicted is not None and asked.kernel != "torch.bf16"
    assert route.is_predicted and asked.kernel in route.text
    assert all(choice.m < far[0] for choice in converted(k, n).sites["0"].routes[0].choices)


def test_a_weight_gradient_is_predicted_at_few_m() -> None:
    """Each number of samples has its own table, of which one m is used."""
    output, _, route = converted(*UNMEASURED, inference=False).sites["0"].routes
    assert len(output.choices[0].table.measured_m) > 50
    assert len(route.choices) == 9
    for choice in route.choices:
        assert choice.m == 1536 and len(choice.table.measured_m) < 10
        assert choice.kernel == choice.pick.name


def test_a_weight_gradient_names_its_product_and_where_it_was_measured() -> None:
    """Of 13 inputs, whose rows are unaligned, nothing is predicted."""
    route = converted(13, 512, inference=False, m_range=(16384, 16384)).sites["0"].routes[2]
    assert route.why == (
        "dW[512, 13], whose product sums over m samples, was measured at m=1024, 2048, 8192, "
        "20480, not within m_range=16384..16384"
    )


@pytest.mark.parametrize("training", [False, True])
def test_a_suite_lists_what_explain_misses(training: bool) -> None:
    model = nn.Sequential(nn.Linear(1728, 1024), nn.Linear(1024, 512), nn.Linear(512, 1))
    gemms = GEMMS if training else GEMMS[:1]
    products = [Product(n, 16384, x.out_features, x.in_features, bias=True)
                for n, x in model.named_children()]  # fmt: skip
    found = worth(products, budget=ErrorBudget.of(0.06), device=dispatcher.device_named(H200),
                  regime="compiled", gemms=gemms)  # fmt: skip
    missing = {(x["n"], x["k"], x.get("bias"), *x["forms"]) for x in found.missing()}
    model = model if training else model.bfloat16()
    handle = lokakern.convert(model, 0.06, device=H200, inference=not training)
    layers = tomllib.loads(handle.suite([16384]))["layer"]
    listed = {(x["n"], x["k"], x.get("bias"), *x["forms"]) for x in layers if "epilogue" not in x}
    assert missing == listed and len(missing) == (3 if training else 1)


def test_a_suite_holds_the_problems_that_explain_looks_up(tmp_path: Path) -> None:
    products = [Product("a", 16384, 1024, 1728, bias=True), Product("b", 16384, 1024, 1728)]
    device = dispatcher.device_named(H200)
    found = worth(products, budget=ErrorBudget.of(0.06), device=device, regime="compiled")
    file = tmp_path / "missing.toml"
    file.write_text(suite_of(found.missing(), name="missing"))
    problems = {case.problem for case in suite_from_file(file).build(Format.E4M3FN)}
    for product in products:
        first, *_ = _problems(product, "output", device, is_training=False)
        assert {p.epilogue for p in first} == {"bias" if product.bias else "none"}
        assert problems.issuperset(first)
    assert [x.bias for x in products_from_file(file)] == [True, False]


def test_reasons_at_one_m_are_those_of_dispatch() -> None:
    found = converted(1728, 1024, inference=False)
    told = found.explain("0", m=16384)
    assert told.count("gemm m=16384 n=") == 2 and told.count(" k=16384 ") == 1
    assert "m=4096" not in told and len(told) < len(found.explain("0")) / 3
