"""Chains of a conversion: what is chosen, what is not and why, from rows made by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lokakern.chain.candidates import Chain, Form, Layer, Step
from lokakern.chain.search import LayerOption
from lokakern.conversion import chains
from lokakern.conversion.chain_rivals import ChainJudge, Rivals, SpanLayer
from lokakern.conversion.chains import PlannedChain, SpanPlan, plan_span, takes
from lokakern.conversion.routes import Judge, Route, routes_of
from lokakern.nn.chain_norm import frozen_norms
from lokakern.nn.chain_plan import read_plan, steps_at
from lokakern.problems import make_problem
from lokakern.selection import dispatcher
from lokakern.selection.candidates import Time
from lokakern.selection.weight_forms import with_weight
from lokakern.types import ErrorBudget, Granularity
from tests.support.chain_rows import (
    FUSED,
    NARROW,
    NONE,
    QUANTIZING,
    ROW,
    WIDE,
    both,
    fp8_rows,
    layer_problem,
    layer_rows,
    plain_rows,
)
from tests.support.measurements import BF16, H200, Book, accuracy, gemm, time
from tests.support.measurements import ROW as ROUTED

LAST = Layer(256, 512, "bias")
PLAIN = Route("output", "", "nothing was measured")
JUDGE = ChainJudge(0.06, H200, ("X1",))
BLOCK = "cuda.quantize_group+cuda.gemm_norm_block"


def planned(*layers: Layer, judge: ChainJudge = JUDGE, route: Route = PLAIN) -> SpanPlan:
    return plan_span([SpanLayer(layer, 1e-5, route) for layer in layers], judge)


def kernels_at(chain: PlannedChain, m: int) -> list[str]:
    return [step.kernel for step in steps_at(chain.text, m)]


# --- what is chosen


def test_layers_exchange_fp8_where_that_is_faster(book: Book) -> None:
    book.write(*both({512: 20.0, 2048: 60.0}, {512: 10.0, 2048: 30.0}))
    (chain,) = planned(WIDE, NARROW).chains
    assert (chain.start, chain.stop) == (0, 2)
    first, second = steps_at(chain.text, 512)
    assert first[1:] == (QUANTIZING, NONE, ROW, ROW)
    assert second[1:] == (FUSED, ROW, ROW, NONE)
    assert [x.weight for x in chain.layers] == [ROW, ROW]
    at = {t.m: t for t in chain.times}
    assert at[512].us == pytest.approx(22.0)
    assert at[512].rival_us == pytest.approx(40.0)
    # The rounding between the layers is part of the error of the second one.
    assert at[512].row_err == pytest.approx((0.04**2 + 0.04**2) ** 0.5)


@pytest.mark.parametrize("asked", ["relu", "bias+relu"])
def test_times_with_another_bias_stand_for_those_that_were_not_measured(
    book: Book, asked: str
) -> None:
    measured = {"relu": "bias+relu", "bias+relu": "relu"}[asked]
    layer, known = (WIDE._replace(epilogue=x) for x in (asked, measured))
    rows = [
        *layer_rows(known, {512: 20.0}, {512: 10.0}),
        *layer_rows(NARROW, {512: 20.0}, {512: 10.0}),
    ]
    book.write(*rows)
    plan = planned(layer, NARROW)
    (chain,) = plan.chains
    assert [x.epilogue for x in chain.layers] == [asked, NARROW.epilogue]
    assert [x.epilogue for x in read_plan(chain.text)[0]] == [asked, NARROW.epilogue]
    assert len(steps_at(chain.text, 512)) == 2
    assert chain.why.endswith(f"by times of {measured}")
    assert plan.missing == (layer,)


def test_a_plan_is_used_between_measured_m_and_nowhere_else(book: Book) -> None:
    book.write(*both({512: 20.0, 2048: 60.0}, {512: 10.0, 2048: 30.0}))
    (chain,) = planned(WIDE, NARROW).chains
    used = [m for m in (1, 511, 512, 513, 1000, 2048, 2049, 10**6) if kernels_at(chain, m)]
    assert used == [512, 513, 1000, 2048]


def test_between_different_choices_interpolated_times_decide(book: Book) -> None:
    # The chain takes 24 us instead of 20 at m=512, and 44 instead of 80 at m=2048: it is faster by
    # 5 % from 30 us instead of 32 us on.
    book.write(*both({512: 10.0, 2048: 40.0}, {512: 11.0, 2048: 21.0}))
    (chain,) = planned(WIDE, NARROW).chains
    begins = next(m for m in range(512, 2049, 16) if kernels_at(chain, m))
    share = (begins - 512) / 1536
    assert 24 + 20 * share < (20 + 60 * share) * 0.97
    share = (begins - 16 - 512) / 1536
    assert 24 + 20 * share >= (20 + 60 * share) * 0.95
    assert not kernels_at(chain, 512)
    assert kernels_at(chain, 2048) == [QUANTIZING, FUSED]


def test_a_range_of_m_limits_plans(book: Book) -> None:
    book.write(*both({512: 20.0, 1024: 40.0, 2048: 60.0}, {512: 10.0, 1024: 20.0, 2048: 30.0}))
    judge = JUDGE.__class__(0.06, H200, ("X1",), None, (600, 1500))
    (chain,) = planned(WIDE, NARROW, judge=judge).chains
    assert [m for m in (512, 592, 608, 1024, 1488, 1504, 2048) if kernels_at(chain, m)] == [
        608, 1024, 1488,
    ]  # fmt: skip
    assert [t.m for t in chain.times] == [1024]


def test_launches_that_refuse_an_odd_m_are_not_used_there(book: Book) -> None:
    """The range begins at an m where others would be chosen."""
    name = "cuda.quantize_group+torch.scaled_mm_block+cuda.norm_quantize"
    sizes = (512, 1024, 2048)
    rows: list[Any] = []
    for m in sizes:
        problem = layer_problem(NARROW, m, NONE, Granularity.BLOCK, NONE)
        rows += plain_rows(NARROW, m, m / 10)
        rows += [time(name, problem, m / 128), time(BLOCK, problem, m / 20)]
    rows += [accuracy(name, problem, 0.03), accuracy(BLOCK, problem, 0.03)]
    book.write(*rows)
    judge = JUDGE.__class__(0.06, H200, ("X1",), None, (1001, 1500))
    (chain,) = planned(NARROW, judge=judge).chains
    assert kernels_at(chain, 1008) == [name]
    assert not [m for m in range(1001, 1501) if m % 16 and kernels_at(chain, m)]


def test_a_product_without_anything_behind_it_ends_a_chain(book: Book) -> None:
    rows = both({512: 20.0}, {512: 10.0})
    rows += layer_rows(LAST, {512: 20.0}, {512: 5.0})
    product = with_weight(gemm(512, LAST.n, LAST.k, epilogue="bias"), ROW, H200)
    rows += [time(BF16, product, 15.0)]
    book.write(*rows)
    route = routes_of(LAST.n, LAST.k, Judge(ErrorBudget(row_err=0.06)), H200, has_bias=True,
                      inference=True)[0]  # fmt: skip
    span = [SpanLayer(WIDE, 1e-5, PLAIN), SpanLayer(NARROW, 1e-5, PLAIN),
            SpanLayer(LAST, 1e-5, route)]  # fmt: skip
    (chain,) = plan_span(span, JUDGE).chains
    assert (chain.start, chain.stop) == (0, 3)
    # A product is compared with the product, not with a kernel that adds a bias only.
    assert chain.times[0].rival_us == pytest.approx(55.0)
    # Alone it is left to its route.
    assert not plan_span(span[2:], JUDGE).chains


def test_a_slow_layer_cuts_a_span(book: Book) -> None:
    slow = Layer(512, 512, "bias+relu")
    rows = both({512: 20.0}, {512: 10.0})
    rows += layer_rows(slow, {512: 10.0}, {512: 30.0})
    book.write(*rows)
    plan = planned(WIDE, NARROW, slow, WIDE, NARROW)
    assert [(c.start, c.stop) for c in plan.chains] == [(0, 2), (3, 5)]


def test_a_single_layer_with_a_norm_may_be_a_chain(book: Book) -> None:
    name = "cuda.gemm_norm_bf16"
    problem = layer_problem(NARROW, 512, NONE, NONE, NONE)
    book.write(*plain_rows(NARROW, 512, 20.0), time(name, problem, 10.0),
               accuracy(name, problem, 0.002))  # fmt: skip
    (chain,) = planned(NARROW).chains
    assert kernels_at(chain, 512) == [name]
    assert chain.layers[0].weight is NONE


def test_weights_have_the_granularity_that_is_fastest_over_all_m(book: Book) -> None:
    block = Granularity.BLOCK
    rows = [row for m in (512, 1024, 2048) for row in plain_rows(NARROW, m, 40.0)]
    for m, row_us, block_us in ((512, 10.0, 30.0), (1024, 20.0, 19.0), (2048, 20.0, 19.0)):
        rows += fp8_rows(NARROW, m, row_us - 2.0, is_judged=m == 512)
        problem = layer_problem(NARROW, m, NONE, block, NONE)
        rows += [time(BLOCK, problem, block_us)]
    book.write(*rows, accuracy(BLOCK, problem, 0.04))
    (chain,) = planned(NARROW).chains
    assert {name for m in (512, 1024, 2048) for name in kernels_at(chain, m)} == {QUANTIZING}
    assert chain.layers[0].weight is ROW


# --- what is not chosen, and why


def test_weights_have_only_the_granularities_of_the_conversion(book: Book) -> None:
    book.write(*both({512: 20.0, 2048: 60.0}, {512: 10.0, 2048: 30.0}))
    for weights, count in (((ROW,), 1), ((Granularity.TENSOR, Granularity.BLOCK), 0)):
        judge = JUDGE.__class__(0.06, H200, ("X1",), weights=weights)
        assert len(planned(WIDE, NARROW, judge=judge).chains) == count


def test_no_chain_over_the_budget(book: Book) -> None:
    book.write(*both({512: 20.0}, {512: 10.0}, row_err=0.07))
    plan = planned(WIDE, NARROW)
    assert not plan.chains
    assert plan.why == "over the budget: the least row_err is 0.07 > 0.06"


def test_the_budget_limits_each_layer_and_not_their_sum(book: Book) -> None:
    book.write(*both({512: 20.0}, {512: 10.0}, row_err=0.05))
    (chain,) = planned(WIDE, NARROW).chains
    assert chain.times[0].row_err > 0.06
    # With 0.057 an FP8 output is over the budget, and there are quantizers in between.
    book.write(*both({512: 20.0}, {512: 10.0}, row_err=0.057))
    chains = planned(WIDE, NARROW).chains
    assert {k for c in chains for k in kernels_at(c, 512)} == {QUANTIZING}


def test_no_chain_that_is_not_faster(book: Book) -> None:
    book.write(*both({512: 10.0}, {512: 9.0}))
    plan = planned(WIDE, NARROW)
    assert not plan.chains
    assert plan.why.startswith("not faster: 20.00 us at best, at m=512, and 20.00 us without")


def test_a_gain_within_noise_is_none(book: Book) -> None:
    book.write(*both({512: 10.0}, {512: 8.8}))
    assert not planned(WIDE, NARROW).chains


@pytest.mark.parametrize("layer", [WIDE, NARROW])
def test_no_chain_without_measurements(book: Book, layer: Layer) -> None:
    book.write(*plain_rows(WIDE, 512, 10.0))
    plan = planned(layer)
    assert not plan.chains
    assert plan.why.startswith("not measured at these sizes")
    assert plan.missing == (layer,)


@pytest.mark.parametrize(("m_range", "at"), [((1024, 1024), [1024]), ((1000, 1040), [1008, 1040])])
def test_a_range_between_measured_m_has_the_chain_of_no_range(
    book: Book, m_range: tuple[int, int], at: list[int]
) -> None:
    book.write(*both({512: 20.0, 2048: 60.0}, {512: 10.0, 2048: 30.0}))
    (whole,) = planned(WIDE, NARROW).chains
    (chain,) = planned(WIDE, NARROW, judge=replace(JUDGE, m_range=m_range)).chains
    assert [t.m for t in chain.times] == at and all(t.interpolated for t in chain.times)
    for m in m_range:
        assert kernels_at(chain, m) == kernels_at(whole, m) != []
    assert not kernels_at(chain, 512) and not kernels_at(chain, 2048)


def test_no_chain_beyond_the_measured_m(book: Book) -> None:
    book.write(*both({512: 20.0, 2048: 60.0}, {512: 10.0, 2048: 30.0}))
    plan = planned(WIDE, NARROW, judge=replace(JUDGE, m_range=(4096, 8192)))
    assert plan.why == "measured at m=512, 2048, not within m_range=4096..8192"


def test_no_chain_where_the_unquantized_layer_was_not_measured(book: Book) -> None:
    book.write(*fp8_rows(NARROW, 512, 1.0))
    assert planned(NARROW).why.startswith("not measured at these sizes")


def routed_rows(product: float, routed: float) -> list[Any]:
    problem = gemm(512, NARROW.n, NARROW.k)
    prepared = with_weight(problem, ROW, H200)
    return [
        time(BF16, problem, product), time(BF16, prepared, product),
        time(ROUTED, prepared, routed), accuracy(ROUTED, prepared, 0.04),
    ]  # fmt: skip


def route_of(layer: Layer) -> Route:
    by = Judge(ErrorBudget(row_err=0.06), ("X1",))
    return routes_of(layer.n, layer.k, by, H200, inference=True)[0]


def test_the_route_with_a_norm_is_a_rival(book: Book) -> None:
    # The norm takes 20 - 14 us, so that the route and the norm take 5 + 6 us.
    book.write(*routed_rows(14.0, 5.0), *layer_rows(NARROW, {512: 20.0}, {512: 9.5}))
    assert route_of(NARROW).text
    plan = planned(NARROW, route=route_of(NARROW))
    assert not plan.chains
    assert "and 11.00 us without a chain" in plan.why
    assert planned(NARROW).chains  # without the route


def test_a_compiler_pads_the_rival_of_unaligned_rows(book: Book) -> None:
    # Unaligned rows take 240 us, and the norm behind them makes 254; padded ones take 50.
    odd = Layer(1024, 1001, "bias+layer+affine+relu")
    problems = (gemm(512, odd.n, odd.k), gemm(512, odd.n, 1008))
    forms = [form for p in problems for form in (p, with_weight(p, ROW, H200))]
    rows = [time(BF16, p, us) for p, us in zip(forms, (240, 240, 50, 50), strict=True)]
    book.write(*rows, *plain_rows(odd, 512, 254.0))
    route = route_of(odd)
    assert not route.text and route.choices
    judge = ChainJudge(0.06, H200, ("X1",), "compiled")
    assert Rivals(judge).at(SpanLayer(odd, 1e-5, route), 512) == pytest.approx((50, 0), abs=0.2)


@pytest.mark.parametrize("regime", [None, "graph-cold", "compiled", "compiled-graph"])
@pytest.mark.parametrize(
    ("n", "norm", "is_long"),
    [(2048, "layer", True), (2048, "rms", True), (1024, "layer", False),
     (2048, "block_rms(256)", False)],
)  # fmt: skip
def test_a_compiler_reads_long_rows_twice(
    book: Book, n: int, norm: str, is_long: bool, regime: str | None
) -> None:
    layer = Layer(n, 512, f"bias+{norm}" + "+affine" * (norm in ("layer", "rms")))
    bytes_of_y = 2 * 512 * n
    # The fastest of all: 10 us for the bytes of a product, so that y is read in less than 10 us.
    book.write(*layer_rows(layer, {512: 30.0}, {512: 10.0}))
    rate = dispatcher.snapshot().least_us_per_byte(H200, "graph-cold")
    (us, _) = Rivals(replace(JUDGE, regime=regime)).at(SpanLayer(layer, 1e-5, PLAIN), 512) or (0, 0)
    is_compiled = (regime or "").startswith("compiled")
    again = bytes_of_y * rate if is_long and is_compiled else 0.0
    assert us == pytest.approx(30.0 + again) and 0 < bytes_of_y * rate < 10


def test_the_rival_of_a_handed_input_has_no_quantizer(book: Book) -> None:
    problem = make_problem("scaled_gemm", (512, NARROW.n, NARROW.k), epilogue="bias")
    scaled = ROUTED.partition("+")[2]
    rows = [*routed_rows(14.0, 5.0), *layer_rows(NARROW, {512: 20.0}, {512: 6.0})]
    book.write(*rows)
    route = route_of(NARROW)
    rivals = Rivals(JUDGE)
    assert rivals.at(SpanLayer(NARROW, 1e-5, route), 512) == pytest.approx((11.0, 0.0), abs=0.1)
    handed = SpanLayer(NARROW, 1e-5, route, is_handed=True)
    # Nothing is known of the product alone, and it counts nothing; the norm does.
    assert Rivals(JUDGE).at(handed, 512) == pytest.approx((6.0, 0.0), abs=0.1)
    book.write(time(scaled, problem, 3.0))
    assert Rivals(JUDGE).at(handed, 512) == pytest.approx((9.0, 0.0), abs=0.1)


def test_static_scales_need_a_budget_that_admits_them(book: Book) -> None:
    bounded = Layer(512, 512, "bias+block_rms(256)+relu")
    static = Granularity.TENSOR
    rows = layer_rows(bounded, {512: 20.0}, {512: 12.0})
    for name, reads, us in ((FUSED, ROW, 6.0), (QUANTIZING, NONE, 7.0)):
        problem = layer_problem(bounded, 512, reads, ROW, static)
        rows += [time(name, problem, us), accuracy(name, problem, 0.045)]
    book.write(*rows)
    (chain,) = planned(bounded, bounded).chains
    assert [s.writes for s in steps_at(chain.text, 512)] == [static, NONE]
    judge = ChainJudge(0.06, H200, ("X1",), admits_static=False)
    (chain,) = planned(bounded, bounded, judge=judge).chains
    assert [s.writes for s in steps_at(chain.text, 512)] == [ROW, NONE]


AFFINE = Layer(512, 512, "bias+layer+affine+relu")


def static_rows(layer: Layer = AFFINE, row_err: float = 0.045) -> list[Any]:
    """Times and errors of a layer that is fastest where it writes with a static scale."""
    found = layer_rows(layer, {512: 20.0, 2048: 60.0}, {512: 12.0, 2048: 40.0})
    for m, static_us in ((512, 6.0), (2048, 20.0)):
        for name, reads, more in ((FUSED, ROW, 0.0), (QUANTIZING, NONE, 1.0)):
            problem = layer_problem(layer, m, reads, ROW, Granularity.TENSOR)
            found.append(time(name, problem, static_us + more))
            found += [accuracy(name, problem, row_err)] if m == 512 else []
    return found


@pytest.mark.parametrize(
    ("added", "is_static"), [(0.0001, True), (0.039, True), (0.04, False), (math.inf, False)]
)
def test_static_scales_behind_affine_norms_are_judged_by_the_weight(
    book: Book, added: float, is_static: bool
) -> None:
    """Within 0.06 the stored error of 0.045 leaves 0.0397 to what the weight adds."""
    book.write(*static_rows())
    span = [SpanLayer(AFFINE, 1e-5, PLAIN, added=added)] * 2
    (chain,) = plan_span(span, JUDGE).chains
    writes = [s.writes for s in steps_at(chain.text, 512)]
    assert writes == [Granularity.TENSOR if is_static else ROW, NONE]
    # The rounding of the output is part of the error of its reader.
    row_err = math.hypot(0.04, added) if is_static else 0.04
    assert chain.times[0].row_err == pytest.approx(math.hypot(0.04, row_err))
    judge = JUDGE.__class__(0.06, H200, ("X1",), admits_static=False)
    (chain,) = plan_span(span, judge).chains
    assert [s.writes for s in steps_at(chain.text, 512)] == [ROW, NONE]
    assert frozen_norms(chain.text) == ()


def test_no_launch_repeats_a_scale_that_a_norm_keeps(book: Book) -> None:
    """Kernels with 1x128 scales would read a matrix of them."""
    rows = static_rows()
    for m, us in ((512, 1.0), (2048, 3.0)):
        problem = layer_problem(AFFINE, m, Granularity.GROUP, Granularity.BLOCK, NONE)
        rows += [time("cuda.gemm_norm_block", problem, us)]
    rows += [accuracy("cuda.gemm_norm_block", problem, 0.03)]
    book.write(*rows)
    (chain,) = plan_span([SpanLayer(AFFINE, 1e-5, PLAIN, added=0.0)] * 2, JUDGE).chains
    for steps in chain.launches:
        assert Granularity.GROUP not in {step.reads for step in steps}
    assert dict(frozen_norms(chain.text)) == {0: 2048}


def test_no_kernel_takes_some_sizes() -> None:
    assert takes(WIDE, H200)
    assert not takes(Layer(1023, 511, "bias+relu"), H200)


# --- never slower than what runs instead

MS = (64, 256)
FORMS = (Form(NONE, NONE), Form(ROW, ROW))
LAYERS = [Layer(16 * (i + 1), 16, "bias+relu") for i in range(5)]


def option_of(m: int, reads: Form, writes: Form, weight: Granularity, us: float) -> LayerOption:
    problem = layer_problem(LAYERS[0], m, reads.written, weight, writes.written)
    step = Step(0, problem, FUSED, Time(us, 0.0, "fresh", 1), False, 0.04, 0.0016)
    return LayerOption(reads, writes, us, 0.0016, (step,))


Times = dict[tuple[Layer, int, Form, Form, Granularity], float]
kinds = list(itertools.product(LAYERS, MS, FORMS, FORMS, (ROW, Granularity.BLOCK)))
some_times = st.fixed_dictionaries({kind: st.integers(1, 40) for kind in kinds})
some_rivals = st.fixed_dictionaries({(x, m): st.integers(1, 40) for x in LAYERS for m in MS})


@settings(max_examples=60, deadline=None)
@given(some_times, some_rivals, st.integers(1, 5))
def test_what_is_chosen_is_faster_than_what_runs_instead(
    times: Times, rivals: dict[tuple[Layer, int], float], count: int
) -> None:
    def options(chain: Chain, place: int, *_: object) -> list[LayerOption]:
        return [
            option_of(chain.m, reads, writes, weight, us)
            for (layer, m, reads, writes, weight), us in times.items()
            if layer == chain.layers[place] and m == chain.m
            and not (chain.is_last(place) and writes != FORMS[0])
        ]  # fmt: skip

    def rival(_self: Rivals, x: SpanLayer, m: int, _reader: Any) -> tuple[float, float] | None:
        return (rivals[x.layer, m], 0.0) if (x.layer, m) in rivals else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains, "own_options", options)
        patch.setattr(Rivals, "at", rival)
        patch.setattr(Rivals, "measured_m", lambda _self, _layer: list(MS))
        span = [SpanLayer(layer, 1e-5, PLAIN) for layer in LAYERS[:count]]
        plan = plan_span(span, JUDGE)
    ends = [x for c in plan.chains for x in (c.start, c.stop)]
    assert ends == sorted(ends)
    gain = {(c.start, c.stop): 0.0 for c in plan.chains}
    for chain in plan.chains:
        for m in MS:
            alone = sum(rivals[x, m] for x in LAYERS[chain.start : chain.stop])
            at = next(t for t in chain.times if t.m == m)
            steps = steps_at(chain.text, m)
            if not steps:
                continue
            assert at.us < alone * 0.98
            assert alone == pytest.approx(at.rival_us)
            gain[chain.start, chain.stop] += alone - at.us
            # Every step was offered, and each reads what the one before wrote.
            assert [s.reads for s in steps[1:]] == [s.writes for s in steps[:-1]]
            assert (steps[0].reads, steps[-1].writes) == (NONE, NONE)
            assert [s.weight for s in steps] == [x.weight for x in chain.layers]
            us = sum(
                times[layer, m, Form(s.reads, s.reads), Form(s.writes, s.writes), s.weight]
                for layer, s in zip(LAYERS[chain.start :], steps, strict=False)
            )
            assert us == at.us
    assert all(x > 0 for x in gain.values())


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6).flatmap(lambda n: st.tuples(
    st.just(n), st.lists(st.integers(0, 20), min_size=n * n, max_size=n * n)
)))  # fmt: skip
def test_cuts_have_the_largest_gain(given_: tuple[int, list[int]]) -> None:
    count, gains = given_

    def gain(_self: object, start: int, stop: int) -> float:
        return gains[start * count + stop - 1]

    def most(start: int) -> float:
        """The largest gain of all cuts from a layer on, by trying all."""
        if start == count:
            return 0.0
        every = [gain(None, start, stop) + most(stop) for stop in range(start + 1, count + 1)]
        return max(most(start + 1), *every)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rivals, "measured_m", lambda _self, _layer: [])
        patch.setattr(chains._Search, "_gain", gain)
        span = tuple(SpanLayer(LAYERS[0], 1e-5, PLAIN) for _ in range(count))
        cuts = chains._Search(span, JUDGE).best_cuts()
    assert sum(gain(None, *cut) for cut in cuts) == most(0)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(cuts))


def test_layers_before_others_need_times_with_an_fp8_output(book: Book) -> None:
    rows = [*plain_rows(WIDE, 512, 20.0), *layer_rows(NARROW, {512: 20.0}, {512: 30.0})]
    problem = layer_problem(WIDE, 512, NONE, ROW, NONE)
    rows += [time(QUANTIZING, problem, 30.0), accuracy(QUANTIZING, problem, 0.04)]
    book.write(*rows)
    assert planned(WIDE, NARROW).missing == (WIDE,)
    assert planned(NARROW, WIDE).missing == ()


def test_plans_are_read_back(book: Book) -> None:
    book.write(*both({512: 20.0}, {512: 10.0}))
    (chain,) = planned(WIDE, NARROW).chains
    layers, aligned, other = read_plan(chain.text)
    assert layers == chain.layers
    assert [start for start, _ in aligned] == [start for start, _ in other] == [0, 512, 513]


def test_explanations_tell_times_and_errors(book: Book) -> None:
    book.write(*both({512: 20.0}, {512: 10.0}))
    (chain,) = planned(WIDE, NARROW).chains
    text = chain.explain()
    assert "chain of 2 layers (1024 x 512 bias+relu, 512 x 1024 bias+layer+affine+relu)" in text
    assert "m=512: 22.00 us, 40.00 us without the chain, row_err 0.05657" in text
    assert f"layer 1: {QUANTIZING} (bf16 to row), 12.00 us, row_err 0.045" in text


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
def test_an_activation_behind_a_product_is_counted_once(
    book: Book, monkeypatch: pytest.MonkeyPatch, activation: str
) -> None:
    """Where a product by its route leaves it to a kernel of its own, which relu needs none of."""
    layer, m = Layer(1024, 512, f"bias+{activation}"), 512
    book.write(*layer_rows(layer, {m: 2e6}, {m: 15.0}))
    x, reader = SpanLayer(layer, 1e-5, PLAIN), SpanLayer(Layer(512, 1024), 1e-5, PLAIN)
    rivals = Rivals(JUDGE)
    own = rivals.at(x, m)
    assert own is not None and own[0] == pytest.approx(2e6)
    assert rivals.at(x, m, reader) == own  # it was timed with its activation
    monkeypatch.setattr(Rivals, "_routed", lambda *_: [(10.0, 0.0)])
    least = 2 * 2 * m * layer.n * dispatcher.snapshot().least_us_per_byte(H200, "graph-cold")
    more = 0.0 if activation == "relu" else least
    assert 0 < least < 1e5
    rivals = Rivals(JUDGE)
    found, last, quantized = (
        rivals.at(x, m, after)
        for after in (
            reader,
            None,
            reader._replace(route=Route("output", "row;16:0=cuda.x;1:0=cuda.x", "")),
        )
    )
    assert found is not None and found[0] == pytest.approx(10.0 + more)
    assert last is not None and last[0] == 10.0  # what reads it may apply it
    assert quantized is not None and quantized[0] == 10.0  # with the kernel that quantizes


def test_times_of_gelu_stand_in_for_gelu_by_tanh(book: Book) -> None:
    layer = Layer(1024, 512, "bias+gelu")
    book.write(*layer_rows(layer, {512: 20.0}, {512: 10.0}))
    for epilogue, is_planned in (
        ("bias+gelu", True), ("bias+gelu_tanh", True), ("gelu_tanh", True), ("bias+silu", False),
    ):  # fmt: skip
        x = SpanLayer(layer._replace(epilogue=epilogue), 1e-5, PLAIN)
        plan = plan_span([x], JUDGE)
        assert bool(plan.chains) == is_planned
        assert [layer.epilogue for chain in plan.chains for layer in chain.layers] == (
            [epilogue] if is_planned else []
        )
